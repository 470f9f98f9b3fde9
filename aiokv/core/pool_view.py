"""What is known of a pool: its parts, its counts, and what each slot holds. See `aiokv.core.pool` for what they mean.

Duty: everything about a pool that changes nothing. Counts are O(1); only `check_invariants` and `fingerprint` scan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aiokv.core.epoch_index import EpochIndex
from aiokv.core.free_list import FreeList
from aiokv.core.index import FoundInBoth, SlotIndex
from aiokv.core.lru import EvictionQueue
from aiokv.core.pool_books import PoolBooks
from aiokv.core.pool_values import GroupArray, PoolCounts
from aiokv.core.slot_memory import zeros
from aiokv.core.watching import SlotWatch
from aiokv.errors import UsageError
from aiokv.model.ids import BoolArray, DigestArray, SlotArray, Tier
from aiokv.model.plan import Found

__all__ = ["PoolView"]


class PoolView:
    """The readable side of a `Pool`: slots `[first_slot, first_slot + capacity)` of one tier."""

    __slots__ = (
        "_books", "_capacity", "_claimed", "_cursor", "_first", "_free", "_index", "_pins", "_quarantined",
        "_quarantined_count", "_queue", "_tier", "watchers",
    )  # fmt: skip

    def __init__(self, tier: Tier, *, capacity: int, first_slot: int = 0, index: SlotIndex | None = None) -> None:
        """`capacity` usable slots; `first_slot=1` keeps slot 0, the null block, out of circulation.

        An empty `index` of all slots may be given, which shares its table with that of the other tier.
        """
        if capacity < 0 or first_slot < 0:
            raise UsageError(f"a pool cannot have {capacity} slots from {first_slot} on")
        end = first_slot + capacity
        size = max(end, 1)
        self._tier = tier
        self._capacity = capacity
        self._first = first_slot
        self._index = EpochIndex(size, index=index)
        self._queue = EvictionQueue(size)
        self._free = FreeList(first=first_slot, end=end)
        self._pins: NDArray[np.int32] = zeros(size, np.int32)
        self._quarantined: BoolArray = zeros(size, np.bool_)
        self._quarantined_count = 0
        self._claimed = 0
        self._cursor = first_slot
        self.watchers: list[SlotWatch] = []
        """Each is told which slots have changed."""
        self._books = PoolBooks(
            first=first_slot, pins=self._pins, quarantined=self._quarantined, index=self._index, queue=self._queue,
            free=self._free,
        )  # fmt: skip

    @property
    def books(self) -> PoolBooks:
        """What an audit reads; valid for the life of the pool."""
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
        return len(self._free)

    @property
    def resident_count(self) -> int:
        """Slots with a key, pinned or not, stale ones included."""
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
        return self._capacity - len(self._free) - len(self._index) - self._quarantined_count

    @property
    def evictable_count(self) -> int:
        """Unpinned slots with a key, stale ones included."""
        return len(self._queue)

    @property
    def claimed_count(self) -> int:
        """Claims that have no slot yet."""
        return self._claimed

    @property
    def stale_count(self) -> int:
        """Slots with a key of an older epoch, not swept yet."""
        return self._index.stale_count

    @property
    def available(self) -> int:
        """How many slots can still be claimed."""
        return self._free.count + self._queue.count - self._claimed

    def counts(self) -> PoolCounts:
        """All counts as one value; O(1)."""
        return PoolCounts(
            free=self.free_count, reserved=self.reserved_count, resident=self.resident_count,
            quarantined=self._quarantined_count, evictable=self.evictable_count, claimed=self._claimed,
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
        return self._queue.peek(n, scan_limit)

    def key_of(self, slots: SlotArray) -> DigestArray:
        """The digests of resident `slots`."""
        return self._index.key_of(slots)

    def group_of(self, slots: SlotArray) -> GroupArray:
        """The groups of `slots`; -1 where there is no key."""
        return self._index.group_of(slots)

    def pins_of(self, slots: SlotArray) -> NDArray[np.int32]:
        """How many pins each of `slots` has."""
        return self._pins.take(slots)

    def count_unpinned(self, slots: SlotArray) -> int:
        """How many of these resident `slots` have no pin: by so many a `pin` of them lowers `available`."""
        return len(slots) - int(np.count_nonzero(self._pins.take(slots)))

    def fingerprint(self) -> str:
        """A digest of pins, keys, eviction order and order of reuse; equal pools print equal. O(capacity)."""
        return self._books.fingerprint(claimed=self._claimed)

    def check_invariants(self) -> list[str]:
        """Violations found by a full recount, in words; O(capacity)."""
        return self._books.check_invariants(self.counts())
