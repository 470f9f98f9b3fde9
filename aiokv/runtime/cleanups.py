"""How long a cancellation takes: from the moment the runtime hears of it until nothing is held for its sake any more.

A lease drops its own pins at once; copies that were running hold theirs until they have ended (law 4).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import final

from aiokv.core.meters import Meters
from aiokv.observe.stats import Histogram

__all__ = ["Cleanups"]


@final
class _Cleanup:
    """One cancelled lease, some of whose copies go on."""

    __slots__ = ("copies_left", "since")

    def __init__(self, *, since: float, copies_left: int) -> None:
        self.since = since
        self.copies_left = copies_left


@final
class Cleanups:
    """Times the ends of cancelled leases."""

    __slots__ = ("_by_copy", "_histogram", "_meters")

    def __init__(self, meters: Meters, *, histogram: Histogram) -> None:
        self._meters = meters
        self._histogram = histogram
        self._by_copy: dict[int, list[_Cleanup]] = {}

    def begin(self, transfer_ids: Collection[int], *, since: float) -> None:
        """A lease that was cancelled has dropped its pins; these copies were its own or shared by it."""
        running = self._meters.watch(transfer_ids)
        if not running:
            self._histogram.observe(time.monotonic() - since)
            return
        cleanup = _Cleanup(since=since, copies_left=len(running))
        for transfer_id in running:
            self._by_copy.setdefault(transfer_id, []).append(cleanup)

    def end_copies(self) -> None:
        """Watched copies have given their pins back: time those leases that have none left."""
        now = time.monotonic()
        for transfer_id in self._meters.take_returned():
            for cleanup in self._by_copy.pop(transfer_id, ()):
                cleanup.copies_left -= 1
                if not cleanup.copies_left:
                    self._histogram.observe(now - cleanup.since)
