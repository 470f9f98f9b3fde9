"""Transfers that other processes have to make for their ranks, on their way to whoever sends them there.

A runtime of several ranks copies for its *local* ranks through its backend. For every *remote* rank the embedder takes
each transfer from `KVRuntime.transfers()`, has the rank make the same copies in its own arenas, and hands the answer to
`KVRuntime.report`.

Rules
- Every transfer is handed out exactly once, in the order of submission; none is dropped for a slow reader. How many can
  wait here is bounded, as unfinished transfers are.
- What nobody has taken was started on no remote rank: the runner may take it back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import final

from aiokv.model.plan import RankTransfer
from aiokv.runtime.wakeup import Wakeup

__all__ = ["RankOutlet"]


@final
class RankOutlet:
    """Which ranks are local and which are remote, and the transfers that nobody has taken for the remote ones yet."""

    __slots__ = ("_untaken", "_wakeup", "has_ended", "local_ranks", "remote_ranks")

    def __init__(self, *, world_size: int, remote_ranks: Iterable[int] = ()) -> None:
        self.remote_ranks = frozenset(remote_ranks)
        self.local_ranks = tuple(rank for rank in range(world_size) if rank not in self.remote_ranks)
        self.has_ended = False
        self._untaken: deque[RankTransfer] = deque()
        self._wakeup = Wakeup("transfers are handed out once")

    def __len__(self) -> int:
        return len(self._untaken)

    def put(self, transfer: RankTransfer) -> None:
        """One more transfer was submitted, and there are remote ranks."""
        self._untaken.append(transfer)
        self._wakeup.wake()

    def take(self) -> RankTransfer:
        """The oldest transfer nobody has taken; there must be one."""
        return self._untaken.popleft()

    def take_all(self) -> list[RankTransfer]:
        """Every transfer nobody has taken, oldest first."""
        taken = list(self._untaken)
        self._untaken.clear()
        return taken

    def end(self) -> None:
        """Nothing will be submitted any more: the reader is told."""
        self.has_ended = True
        self._wakeup.wake()

    async def changed(self) -> None:
        """Wait for the next `put` or `end`. `UsageError` for a second reader at a time."""
        await self._wakeup.wait()
