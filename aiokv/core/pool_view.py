"""What is known of a pool: its parts, its counts, and what each slot holds. See `aiokv.core.pool` for what they mean.

Duty: everything about a pool that changes nothing. Counts are O(1); only `check_invariants` and `fingerprint` scan.
Whatever pins that wait to be dropped could change is told once they are.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from aiokv.core.index import FoundInBoth
from aiokv.core.pool_books import PoolBooks
from aiokv.core.pool_parts import PoolParts
from aiokv.core.pool_values import GroupArray, PoolCounts
from aiokv.model.ids import BoolArray, DigestArray, SlotArray, Tier
from aiokv.model.plan import Found

__all__ = ["PoolView"]

_READ_TRIES: Final = 5


class PoolView(PoolParts):
    """The readable side of a `Pool`."""

    __slots__ = ()

    @property
    def books(self) -> PoolBooks:
        """What an audit reads; valid for the life of the pool."""
        self.settle()
        return self._books

    @property
    def peeked_books(self) -> PoolBooks:
        """The same for any thread: what was let go of a moment ago may still have its pins."""
        return self._books

    @property
    def tier(self) -> Tier:
        """Which tier the slots belong to."""
        return self._tier

    @property
    def capacity(self) -> int:
        """Usable slots: the null block is none of them."""
        return self._capacity

    @property
    def epoch(self) -> int:
        """How often the pool was reset."""
        return self._index.epoch

    @property
    def free_count(self) -> int:
        """Slots without pin and key."""
        self.settle()
        return len(self._free)

    @property
    def resident_count(self) -> int:
        """Slots with a key, pinned or not, stale ones included."""
        self.settle()
        return len(self._index)

    @property
    def quarantined_count(self) -> int:
        """Slots out of use for good."""
        return self._quarantined_count

    @property
    def usable_count(self) -> int:
        """Slots that are not out of use."""
        return self._capacity - self._quarantined_count

    @property
    def reserved_count(self) -> int:
        """Pinned slots without a key."""
        return self.counts().reserved

    @property
    def evictable_count(self) -> int:
        """Unpinned slots with a key, stale ones included."""
        self.settle()
        return len(self._queue)

    @property
    def claimed_count(self) -> int:
        """Claims that have no slot yet."""
        return self._claimed

    @property
    def stale_count(self) -> int:
        """Slots with a key of an older epoch, not swept yet."""
        self.settle()
        return self._index.stale_count

    @property
    def available(self) -> int:
        """How many slots can still be claimed."""
        if self._late:
            self.settle()
        return self._free.count + self._queue.count - self._claimed

    def counts(self) -> PoolCounts:
        """All counts as one value; O(1)."""
        self.settle()
        return self._read_counts()

    def peek_counts(self) -> PoolCounts:
        """The same from any thread: it changes nothing, so what was let go of a moment ago may still count as held.

        Counts that the loop's thread changes between the first one and the last one are those of no moment, and a state
        may then have less than no slot: they are read again until two readings agree.
        """
        counts = self._read_counts()
        for _ in range(_READ_TRIES):
            before, counts = counts, self._read_counts()
            if counts == before:
                break
        return counts

    def _read_counts(self) -> PoolCounts:
        free, resident, out = len(self._free), len(self._index), self._quarantined_count
        return PoolCounts(
            free=free, reserved=self._capacity - free - resident - out, resident=resident, quarantined=out,
            evictable=len(self._queue), claimed=self._claimed,
        )  # fmt: skip

    def find(self, keys: DigestArray, group: int) -> Found:
        """Which slots hold `keys` (shape `[n, 4]`) of `group` in this epoch; changes nothing."""
        return self._index.find(keys, group)

    def holds(self, slots: SlotArray, keys: DigestArray, *, group: int) -> BoolArray:
        """Which of `slots` hold `keys[i]` (shape `[n, 4]`) of `group` in this epoch; changes nothing."""
        return self._index.holds(slots, keys, group=group)

    def find_in_both(self, keys: DigestArray, group: int, *, second: PoolView) -> FoundInBoth:
        """The same, and which slots of the second tier's pool hold those that this one lacks; changes nothing."""
        return self._index.find_in_both(keys, group, second=second._index)

    def find_copies(self, slots: SlotArray, *, among: PoolView) -> Found:
        """Which of these resident slots have a copy in the other tier, and where; changes nothing."""
        return self._index.find_copies(slots, among=among._index)

    def begin_moment(self) -> int:
        """The moment that ends now, for `may_have_come`; what is known of the pool does not change."""
        return self._index.begin_moment()

    def may_have_come(self, keys: DigestArray, *, since: int) -> BoolArray:
        """Which of `keys`, missing at that moment, may be there now: the others are missing still."""
        return self._index.may_have_come(keys, since=since)

    def find_coldest(self, n: int, scan_limit: int) -> SlotArray:
        """Up to `n` evictable slots, coldest first; looks at `scan_limit` entries at most and changes nothing."""
        self.settle()
        return self._queue.peek(n, scan_limit)

    def key_of(self, slots: SlotArray) -> DigestArray:
        """The digests of resident `slots`."""
        self.settle()
        return self._index.key_of(slots)

    def group_of(self, slots: SlotArray) -> GroupArray:
        """The groups of `slots`; -1 where there is no key."""
        self.settle()
        return self._index.group_of(slots)

    def pins_of(self, slots: SlotArray) -> NDArray[np.int32]:
        """How many pins each of `slots` has."""
        self.settle()
        return self._pins.take(slots)

    def count_unpinned(self, slots: SlotArray) -> int:
        """How many of these resident `slots` have no pin: by so many a `pin` of them lowers `available`."""
        if self._late:
            self.settle()
        return len(slots) - int(np.count_nonzero(self._pins.take(slots)))

    def fingerprint(self) -> str:
        """A digest of pins, keys, eviction order and order of reuse; equal pools print equal. O(capacity)."""
        return self.books.fingerprint(claimed=self._claimed)

    def check_invariants(self) -> list[str]:
        """Violations found by a full recount, in words; O(capacity)."""
        return self.books.check_invariants(self.counts())
