"""Ranks of other processes, as far as the runtime sees them: they take transfers, and answer in any order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Final, final

from aiokv import KVRuntime, Outcome, RankTransfer

__all__ = ["RemoteRanks"]

_LATEST_S: Final = 0.01
_VERY_LATE_S: Final = 0.1
_VERY_LATE: Final = 0.02
"""Of all reports."""


@final
class RemoteRanks:
    """Copies nothing: its memory is nobody's. `faults` is the fraction of copies that fail on each rank."""

    __slots__ = ("_faults", "_kv", "_random", "_ranks", "_seen", "is_healed")

    def __init__(self, kv: KVRuntime, *, ranks: Sequence[int], seed: int, faults: float, seen: Counter[str]) -> None:
        self._kv = kv
        self._ranks = tuple(ranks)
        self._random = random.Random(f"{seed}/ranks")
        self._faults = faults
        self._seen = seen
        self.is_healed = False
        """From now on every copy goes well."""

    async def run(self) -> None:
        """Answer to whatever the runtime hands out, until it is cancelled."""
        loop = asyncio.get_running_loop()
        async for transfer in self._kv.transfers():
            for rank in self._random.sample(self._ranks, k=len(self._ranks)):
                is_late = self._random.random() < _VERY_LATE
                delay = self._random.random() * (_VERY_LATE_S if is_late else _LATEST_S)
                loop.call_later(delay, self._report, transfer, rank)

    def _report(self, transfer: RankTransfer, rank: int) -> None:  # the loop calls it
        fails = not self.is_healed and self._random.random() < self._faults
        self._seen["rank_reports"] += 1
        self._seen["rank_failures"] += fails
        self._kv.report(transfer.transfer_id, rank, Outcome.FAILED if fails else Outcome.OK)
