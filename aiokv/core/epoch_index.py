"""Which slot of a pool holds which key, with epochs: a bump makes every key unfindable at once.

Duty: keep apart the keys of this epoch, which are found, and those of older epochs, which wait to be taken off.

Rules: `find` never answers with a stale slot; no call reports a stale key as evicted, since the bump cleared it. While
there are no stale slots nothing here costs more than the index beneath.

State: the epoch, the epoch in which each slot got its key, and how many slots are stale (indexed in an older epoch).
"""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

from aiokv.core.arrivals import Arrivals
from aiokv.core.index import FoundInBoth, SlotIndex
from aiokv.core.pool_values import NOTHING_EVICTED, Evicted, GroupArray
from aiokv.core.slot_memory import zeros
from aiokv.model.ids import BoolArray, DigestArray, IntArray, SlotArray
from aiokv.model.plan import Found

__all__ = ["EpochIndex"]


@final
class EpochIndex:
    """A `SlotIndex` whose entries belong to epochs; `len` counts stale ones too."""

    __slots__ = ("_arrivals", "_epoch", "_index", "_slot_epoch", "_stale")

    def __init__(self, capacity: int, *, index: SlotIndex | None = None) -> None:
        """`capacity` is one more than the largest slot; an `index` that shares its table has to be given."""
        self._index = SlotIndex(capacity) if index is None else index
        self._arrivals = Arrivals(capacity)
        self._slot_epoch: NDArray[np.int32] = zeros(capacity, np.int32)
        self._epoch = 0
        self._stale = 0

    def __len__(self) -> int:
        """How many slots hold a key."""
        return len(self._index)

    @property
    def epoch(self) -> int:
        """How many bumps there were."""
        return self._epoch

    @property
    def stale_count(self) -> int:
        """How many slots hold a key of an older epoch."""
        return self._stale

    def find(self, keys: DigestArray, group: int) -> Found:
        """Which slots hold `keys` of `group` in this epoch; changes nothing."""
        return self._current(self._index.find(keys, group))

    def find_in_both(self, keys: DigestArray, group: int, *, second: EpochIndex) -> FoundInBoth:
        """Which slots of this tier hold `keys`, and which of the `second` those that this one lacks, each in its epoch.

        The two share a table. What is stale here may be there.
        """
        if self._stale:
            first, other = self.find(keys, group), second.find(keys, group)
            return FoundInBoth(first, Found(np.greater(other.present, first.present), other.slots))
        found = self._index.find_in_both(keys, group)
        if found.second is None or second._stale == 0:
            return found
        return FoundInBoth(found.first, second._current(found.second))

    def find_copies(self, slots: SlotArray, *, among: EpochIndex) -> Found:
        """Which of these indexed slots have a slot with the same key `among` those of the other tier, in its epoch.

        The two share a table.
        """
        return among._current(self._index.find_copies(slots))

    def find_stale(self, keys: DigestArray, group: int) -> IntArray:
        """The slots that hold any of `keys` from an older epoch, each once."""
        if self._stale == 0:
            return np.empty(0, np.int64)
        found = self._index.find(keys, group)
        slots = np.unique(found.slots[found.present]).astype(np.int64)
        return slots[self.is_stale(slots)]

    def is_stale(self, slots: SlotArray) -> BoolArray:
        """Which of `slots` hold a key of an older epoch."""
        stale = self._index.is_indexed(slots)
        stale &= self._slot_epoch.take(slots) != self._epoch
        return stale

    def stale_between(self, start: int, stop: int) -> IntArray:
        """The stale slots of `[start, stop)`."""
        stale = self._index.indexed_between(start, stop)
        stale &= self._slot_epoch[start:stop] != self._epoch
        slots: IntArray = stale.nonzero()[0]
        slots += start
        return slots

    def is_indexed(self, slots: SlotArray) -> BoolArray:
        """Which of `slots` hold a key, stale or not."""
        return self._index.is_indexed(slots)

    def find_indexed(self, slots: SlotArray) -> IntArray:
        """Where among `slots` those stand that hold a key, stale or not."""
        return self._index.find_indexed(slots)

    def find_keyless(self, slots: SlotArray) -> IntArray:
        """Where among `slots` the others stand."""
        return self._index.find_keyless(slots)

    def indexed_between(self, start: int, stop: int) -> BoolArray:
        """Which slots of `[start, stop)` hold a key, stale or not."""
        return self._index.indexed_between(start, stop)

    def key_of(self, slots: SlotArray) -> DigestArray:
        """The digests of `slots`, a copy."""
        return self._index.key_of(slots)

    def group_of(self, slots: SlotArray) -> GroupArray:
        """The groups of `slots`; -1 where there is no key."""
        return self._index.group_of(slots)

    def holds(self, slots: SlotArray, keys: DigestArray, *, group: int) -> BoolArray:
        """As `SlotIndex.holds`, in this epoch."""
        is_held = self._index.holds(slots, keys, group=group)
        if self._stale:
            is_held &= self._slot_epoch.take(slots) == self._epoch
        return is_held

    def begin_moment(self) -> int:
        """As `Arrivals.begin_moment`."""
        return self._arrivals.begin_moment()

    def may_have_come(self, keys: DigestArray, *, since: int) -> BoolArray:
        """Which of `keys`, missing at that moment, may be there now. What has not come is missing in any epoch."""
        return self._arrivals.may_have_come(keys, since=since)

    def insert(
        self, slots: SlotArray, keys: DigestArray, *, group: int, copies_of: SlotArray | None = None
    ) -> BoolArray:
        """As `SlotIndex.insert`, in this epoch; of `keys` none may be held by a stale slot (see `find_stale`).

        Slots of the other tier that should hold these keys may be named; then as `SlotIndex.insert_copies`.
        """
        if copies_of is None:
            inserted = self._index.insert(slots, keys, group=group)
        else:
            inserted = self._index.insert_copies(slots, keys, group=group, of=copies_of)
        self._arrivals.note(keys)
        if self._epoch:  # before the first bump all are of this one
            self._slot_epoch[slots] = self._epoch
        return inserted

    def remove(self, slots: SlotArray) -> Evicted:
        """Take `slots` (distinct, indexed) out; tells the keys of those that were not stale."""
        if len(slots) == 0:
            return NOTHING_EVICTED
        keys, groups = self._index.key_of(slots), self._index.remove(slots)
        if self._stale:
            is_told = self._slot_epoch.take(slots) == self._epoch
            keys, groups = keys[is_told], groups[is_told]
            self._stale -= len(slots) - len(groups)
        return Evicted(keys, groups)

    def bump(self) -> None:
        """Begin a new epoch: every key is stale; O(1)."""
        self._epoch += 1
        self._stale = len(self._index)

    def warm(self, limit: int) -> int:
        """As `SlotIndex.warm`."""
        return self._index.warm(limit)

    @property
    def num_buckets(self) -> int:
        """As `SlotIndex.num_buckets`."""
        return self._index.num_buckets

    def is_astray(self, slots: SlotArray) -> BoolArray:
        """Which of `slots` hold a key, stale or not, and are not found under it."""
        return self._index.is_astray(slots)

    def count_stray_entries(self, start: int, stop: int) -> int:
        """As `SlotIndex.count_stray_entries`."""
        return self._index.count_stray_entries(start, stop)

    def check_invariants(self) -> list[str]:
        """Violations found by a full recount; O(capacity)."""
        found = self._index.check_invariants()
        stale = len(self.stale_between(0, len(self._slot_epoch)))
        if stale != self._stale:
            found.append(f"{stale} slots are stale, counted {self._stale}")
        return found

    def _current(self, found: Found) -> Found:
        """What was found, without what is stale."""
        if self._stale == 0:
            return found
        return Found(found.present & (self._slot_epoch.take(found.slots) == self._epoch), found.slots)
