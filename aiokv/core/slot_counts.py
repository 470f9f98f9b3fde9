"""How many of a set of holders hold each slot: two flat multisets, a dense one and a sorted one.

Rules: each batch names a slot once; nothing here knows what a holder is.

- `HeldSlots` costs no more than its batch, and 12 bytes per slot of the pool once they are touched: for one set a pool.
- `SlotCounts` costs memory for what is held only, and a pass over that (about a nanosecond a slot) when it grows: for
  many small sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import numpy as np
import numpy.ma  # what `np.unique` imports at its first call, 20 ms in one hold
from numpy.typing import NDArray

from aiokv.core.slot_memory import zeros
from aiokv.model.ids import IntArray, SlotArray, TableArray

__all__ = ["HeldSlots", "SlotCounts", "SlotTimes", "count_repeats"]

SlotTimes = NDArray[np.int32]
"""How often each of a batch of slots is meant, shape `[n]`."""
_ONE: Final = np.int32(1)
"""Of the arrays' own type, with which `add.at` is thirty times faster."""


def count_repeats(batches: Sequence[SlotArray]) -> tuple[SlotArray, SlotTimes]:
    """Batches as one: the distinct slots, ascending, and in how many of them each is."""
    if len(batches) == 1:
        return np.sort(batches[0].astype(np.int32, copy=False)), np.ones(len(batches[0]), np.int32)
    slots, times = np.unique(np.concatenate(batches), return_counts=True)
    return slots, times.astype(np.int32)


@final
class HeldSlots:
    """Slots below `end` and how many holders each has.

    State: `_slots[:n]` are those that have one, in no order; `_where[slot]` is the place of each in there.
    """

    __slots__ = ("_count", "_size", "_slots", "_where")

    def __init__(self, end: int) -> None:
        self._count: SlotTimes = zeros(end, np.int32)
        self._where: SlotTimes = zeros(end, np.int32)
        self._slots: SlotArray = zeros(end, np.int32)
        self._size = 0

    def __len__(self) -> int:
        """How many distinct slots are held."""
        return self._size

    @property
    def slots(self) -> SlotArray:
        """Those that are held, distinct, in no order; a view, valid until a change."""
        return self._slots[: self._size]

    @property
    def counts(self) -> SlotTimes:
        """Holders of each of `slots`, 1 or more."""
        return self._count[self.slots]

    def places(self, slots: SlotArray) -> IntArray:
        """Where in `self.slots` those of `slots` stand that are held, in their order; valid until a change."""
        return self._where[slots[self._count[slots] > 0]].astype(np.int64)

    def places_of_held(self, slots: SlotArray) -> IntArray:
        """Like `places`, for slots all of which are held."""
        return self._where[slots].astype(np.int64)

    def merge(self, batches: Sequence[SlotArray]) -> tuple[SlotArray, SlotTimes]:
        """Batches of held slots as one: the distinct slots, each where it comes last, and in how many of them it is."""
        if len(batches) == 1:
            return batches[0], np.ones(len(batches[0]), np.int32)
        slots = np.concatenate(batches, dtype=np.int64)
        at = self.places_of_held(slots)
        times = np.bincount(at, minlength=self._size).astype(np.int32)
        if np.count_nonzero(times) == len(slots):
            return slots, np.ones(len(slots), np.int32)
        order = np.arange(len(slots))
        last = np.empty(self._size, np.int64)
        last[at] = order
        is_last = last[at] == order
        return slots[is_last], times[at[is_last]]

    def add(self, slots: SlotArray) -> None:
        """One more holder of each of `slots`."""
        fresh = slots[self._count[slots] == 0]
        self._count[slots] += 1
        stop = self._size + len(fresh)
        self._slots[self._size : stop] = fresh
        self._where[fresh] = np.arange(self._size, stop, dtype=np.int32)
        self._size = stop

    def remove(self, slots: SlotArray, times: int | SlotTimes = 1) -> None:
        """So many holders less of each of `slots`: that many it has at least."""
        self._count[slots] -= times
        gone = slots[self._count[slots] == 0]
        left = self._size - len(gone)
        tail = self._slots[left : self._size]
        movers = tail[self._count[tail] > 0]
        holes = self._where[gone]
        holes = holes[holes < left]
        self._slots[holes] = movers
        self._where[movers] = holes
        self._size = left


@final
class SlotCounts:
    """Slots and how many holders each has.

    State: distinct slots, ascending, with their counts; those without a holder are cleared away once they are the
    majority. Batches are sorted before they are searched for: in no order that takes up to ten times as long.
    """

    __slots__ = ("_counts", "_live", "_slots", "num_holders")

    def __init__(self) -> None:
        self._slots: TableArray = np.zeros(0, np.int32)
        self._counts: SlotTimes = np.zeros(0, np.int32)
        self._live = 0
        self.num_holders = 0
        """Of all slots together."""

    def __len__(self) -> int:
        """How many distinct slots are held."""
        return self._live

    @property
    def slots(self) -> TableArray:
        """Those that are held, distinct, ascending."""
        return self._slots[self._counts > 0]

    @property
    def counts(self) -> SlotTimes:
        """Holders of each of `slots`, 1 or more."""
        return self._counts[self._counts > 0]

    def add(self, slots: SlotArray) -> None:
        """One more holder of each of `slots`."""
        self.num_holders += len(slots)
        new = np.sort(slots.astype(np.int32, copy=False))
        at = np.searchsorted(self._slots, new)
        known = at < len(self._slots)
        known[known] = self._slots[at[known]] == new[known]
        held = at[known]
        self._live += len(new) - int(np.count_nonzero(self._counts[held]))
        self._counts[held] += 1
        if len(held) < len(new):
            where = at[~known]
            self._slots = np.insert(self._slots, where, new[~known])
            self._counts = np.insert(self._counts, where, 1)

    def remove(self, slots: SlotArray, times: int | SlotTimes = 1) -> None:
        """So many holders less of each of `slots`: that many it has at least. With `times` they are ascending."""
        self.num_holders -= len(slots) if isinstance(times, int) else int(times.sum())
        at = np.searchsorted(self._slots, np.sort(slots) if isinstance(times, int) else slots)
        self._counts[at] -= times
        self._live -= len(at) - int(np.count_nonzero(self._counts[at]))
        if 2 * self._live < len(self._slots):
            self._slots, self._counts = self.slots, self.counts

    def count_absent(self, slots: SlotArray) -> int:
        """How many of `slots` nobody holds."""
        return len(slots) - int(np.count_nonzero(self._counts_of(slots)))

    def count_last(self, slots: SlotArray) -> int:
        """How many of `slots` have one holder only."""
        return int(np.count_nonzero(self._counts_of(slots) == 1))

    def _counts_of(self, slots: SlotArray) -> SlotTimes:
        """Holders of those of `slots` that have an entry."""
        ordered = np.sort(slots.astype(np.int32, copy=False))
        at = np.searchsorted(self._slots, ordered)
        known = at < len(self._slots)
        found = at[known]
        counts: SlotTimes = self._counts[found[self._slots[found] == ordered[known]]]
        return counts
