"""The free slots of a pool: a stack of returned ones, and a counter for those that were never used.

Duty: give out free slots. A slot that came back last goes out first, since its memory is warm; slots never used go out
in ascending order, and only when no returned one is left, so that the memory of a pool is touched as late as possible.
"""

from __future__ import annotations

from typing import final

import numpy as np

from aiokv.core.watching import StackWatch
from aiokv.model.ids import IntArray, SlotArray, TableArray

__all__ = ["FreeList"]


@final
class FreeList:
    """Free slots of `[first, end)`; `len` counts them."""

    __slots__ = ("_end", "_fresh", "_returned", "_returned_count", "watchers")

    def __init__(self, *, first: int, end: int) -> None:
        self._fresh = first
        self._end = end
        self._returned: TableArray = np.empty(end, np.int32)
        self._returned_count = 0
        self.watchers: list[StackWatch] = []
        """Each is told how low the stack of returned slots has been."""

    def __len__(self) -> int:
        return self._returned_count + self._end - self._fresh

    @property
    def fresh(self) -> int:
        """The first slot that was never used: all below it were."""
        return self._fresh

    @property
    def returned(self) -> SlotArray:
        """Slots that were used and are free, the next one to go out last; a copy."""
        return self._returned[: self._returned_count].copy()

    @property
    def returned_count(self) -> int:
        """How many slots were used and are free."""
        return self._returned_count

    def returned_between(self, start: int, stop: int) -> SlotArray:
        """Entries `[start, stop)` of the returned slots, as far as there are; a copy."""
        return self._returned[start : min(stop, self._returned_count)].copy()

    def take(self, n: int) -> IntArray:
        """Up to `n` slots."""
        top = self._returned_count
        self._returned_count = max(top - n, 0)
        for watch in self.watchers:
            watch.low = min(watch.low, self._returned_count)
        slots = self._returned[self._returned_count : top][::-1].astype(np.int64)
        fresh = min(n - len(slots), self._end - self._fresh)
        if fresh == 0:
            return slots
        self._fresh += fresh
        return np.concatenate((slots, np.arange(self._fresh - fresh, self._fresh)))

    def put(self, slots: SlotArray) -> None:
        """Take `slots` (distinct, not free) back; the last of them goes out first."""
        self._returned[self._returned_count : self._returned_count + len(slots)] = slots
        self._returned_count += len(slots)
