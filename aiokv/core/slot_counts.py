"""How many of a set of holders hold each slot: a flat multiset.

Rules: each batch names a slot once; nothing here knows what a slot or a holder is. Adding and removing costs a pass
over what is held (about a nanosecond a slot), never over a pool.

State: the distinct slots, ascending, and how often each was added.
"""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

from aiokv.model.ids import IntArray, SlotArray

__all__ = ["SlotCounts"]


@final
class SlotCounts:
    """Slots and how many holders each has."""

    __slots__ = ("counts", "slots")

    def __init__(self) -> None:
        self.slots: SlotArray = np.zeros(0, np.int32)
        """Distinct, ascending."""
        self.counts: NDArray[np.int32] = np.zeros(0, np.int32)
        """Holders of `slots[i]`, 1 or more."""

    def __len__(self) -> int:
        """How many distinct slots are held."""
        return len(self.slots)

    def places(self, slots: SlotArray) -> IntArray:
        """Where in `self.slots` those of `slots` stand that are held, in their order; valid until a change."""
        at: IntArray = np.searchsorted(self.slots, slots).astype(np.int64, copy=False)
        known = at < len(self.slots)
        found = at[known]
        places: IntArray = found[self.slots[found] == slots[known]]
        return places

    def add(self, slots: SlotArray) -> None:
        """One more holder of each of `slots`."""
        held = self.places(slots)
        self.counts[held] += 1
        if len(held) < len(slots):
            fresh = np.sort(np.setdiff1d(slots, self.slots[held], assume_unique=True))
            at = np.searchsorted(self.slots, fresh)
            self.slots = np.insert(self.slots, at, fresh)
            self.counts = np.insert(self.counts, at, 1)

    def remove(self, slots: SlotArray) -> None:
        """One holder less of each of `slots`, all of which have one."""
        at = self.places(slots)
        self.counts[at] -= 1
        if not self.counts[at].all():
            held = self.counts > 0
            self.slots, self.counts = self.slots[held], self.counts[held]

    def count_absent(self, slots: SlotArray) -> int:
        """How many of `slots` nobody holds."""
        return len(slots) - len(self.places(slots))

    def count_last(self, slots: SlotArray) -> int:
        """How many of `slots` have one holder only."""
        return int(np.count_nonzero(self.counts[self.places(slots)] == 1))
