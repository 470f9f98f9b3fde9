"""The slots of one tier: which are free, pinned, findable, next to be evicted or out of use.

Duty: account for every slot of a pool, a batch at a time. Every call is one plain synchronous step.

Rules: a refused call changes nothing; a slot with a pin is never evicted, freed or named again; `find` changes nothing,
eviction order included; a key has one slot (a duplicate stays private to whoever holds it). Slots of one batch are
distinct. Counts are O(1); nothing scans the pool save `check_invariants` and `fingerprint`.

State of a slot, derived from its pins and the index:

    free         no pin, no key      on the free stack, or never used yet
    reserved     pinned, no key
    resident     has a key           in the eviction queue iff it has no pin ("evictable")
    quarantined  out of use for good; its pins may still come and go

    free + reserved + resident + quarantined = capacity
    available    free + evictable - claimed: what can still be claimed; a claim is a slot promised but not yet named

Transitions: free -name-> reserved -register-> resident -unpin-> evictable -pin-> resident; evictable -name->
reserved (its key is evicted) or -evict-> free; reserved -unpin-> free; resident -unregister-> reserved;
pinned -quarantine-> quarantined.

`bump_epoch` makes all keys unfindable at once. Their slots are *stale*: they still count as resident (and evictable
when unpinned, so `available` does not change) until `sweep`, eviction, a new registration of their key or their last
unpin takes the old key off. No call reports the keys of stale slots as evicted: they were cleared by the bump.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from aiokv.core.epoch_index import EpochIndex
from aiokv.core.free_list import FreeList
from aiokv.core.lru import EvictionQueue
from aiokv.core.pool_books import PoolBooks
from aiokv.core.pool_values import NOTHING_EVICTED, AnySlots, Evicted, GroupArray, NamedSlots, PoolCounts
from aiokv.errors import ForeignBlock, UsageError
from aiokv.model.ids import BoolArray, DigestArray, IntArray, SlotArray, Tier
from aiokv.model.plan import Found

__all__ = ["Evicted", "NamedSlots", "Pool", "PoolCounts"]

_ONE: Final = np.array(1, np.int32)


@final
class Pool:
    """Slots `[first_slot, first_slot + capacity)` of one tier."""

    __slots__ = (
        "_books", "_capacity", "_claimed", "_cursor", "_first", "_free", "_index", "_pins", "_quarantined",
        "_quarantined_count", "_queue", "_tier",
    )  # fmt: skip

    def __init__(self, tier: Tier, *, capacity: int, first_slot: int = 0) -> None:
        """`capacity` usable slots; `first_slot=1` keeps slot 0, the null block, out of circulation."""
        if capacity < 0 or first_slot < 0:
            raise UsageError(f"a pool cannot have {capacity} slots from {first_slot} on")
        end = first_slot + capacity
        size = max(end, 1)
        self._tier = tier
        self._capacity = capacity
        self._first = first_slot
        self._index = EpochIndex(size)
        self._queue = EvictionQueue(size)
        self._free = FreeList(first=first_slot, end=end)
        self._pins: NDArray[np.int32] = np.zeros(size, np.int32)
        self._quarantined: BoolArray = np.zeros(size, np.bool_)
        self._quarantined_count = 0
        self._claimed = 0
        self._cursor = first_slot
        self._books = PoolBooks(
            first=first_slot, pins=self._pins, quarantined=self._quarantined, index=self._index, queue=self._queue,
            free=self._free,
        )  # fmt: skip

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
        return len(self._free) + len(self._queue) - self._claimed

    def counts(self) -> PoolCounts:
        """All counts as one value; O(1)."""
        return PoolCounts(
            free=self.free_count, reserved=self.reserved_count, resident=self.resident_count,
            quarantined=self._quarantined_count, evictable=self.evictable_count, claimed=self._claimed,
        )  # fmt: skip

    def find(self, keys: DigestArray, group: int) -> Found:
        """Which slots hold `keys` (shape `[n, 4]`) of `group` in this epoch; changes nothing."""
        return self._index.find(keys, group)

    def trim(self, scan_limit: int) -> None:
        """Pass up to `scan_limit` entries at the cold end that stand for nothing; the order stays."""
        self._queue.trim(scan_limit)

    def find_coldest(self, n: int, scan_limit: int) -> SlotArray:
        """Up to `n` evictable slots, coldest first; looks at `scan_limit` entries at most and changes nothing."""
        return self._queue.peek(n, scan_limit)

    def key_of(self, slots: AnySlots) -> DigestArray:
        """The digests of resident `slots`."""
        return self._index.key_of(slots)

    def group_of(self, slots: AnySlots) -> GroupArray:
        """The groups of `slots`; -1 where there is no key."""
        return self._index.group_of(slots)

    def pins_of(self, slots: AnySlots) -> NDArray[np.int32]:
        """How many pins each of `slots` has."""
        return self._pins.take(slots)

    def count_unpinned(self, slots: AnySlots) -> int:
        """How many of these resident `slots` have no pin: by so many a `pin` of them lowers `available`."""
        return len(slots) - int(np.count_nonzero(self._pins.take(slots)))

    def pin(self, slots: AnySlots) -> None:
        """Hold `slots` (distinct, each resident or pinned).

        Raises ForeignBlock for a free slot, and UsageError if claims would outgrow what is left; nothing is changed.
        """
        at = slots.astype(np.int64)
        pins = self._pins.take(at)
        busy = int(np.count_nonzero(pins))
        if busy < len(at):
            idle = at[pins == 0] if busy else at
            self._require(self._queue.is_queued(idle), idle)
            if len(idle) > self.available:
                raise UsageError(f"pinning {len(idle)} evictable slots breaks claims: {self.available} are available")
            self._queue.lift(idle)
        self._pins[at] = pins + _ONE

    def unpin(self, slots: AnySlots) -> None:
        """Let go of `slots` (distinct, pinned) in eviction order: of those that become evictable the first goes first.

        Slots without a current key are free at their last pin. ForeignBlock, nothing changed, if one has no pin.
        """
        if len(idle := self._drop_pins(slots)):
            self._queue.push(self._free_keyless(idle))

    def unpin_in_place(self, slots: AnySlots) -> None:
        """Like `unpin`, but what becomes evictable returns to where it was pinned, or goes first if that has gone."""
        self._queue.restore(self._free_keyless(self._drop_pins(slots)))

    def touch(self, slots: AnySlots) -> None:
        """Recency only: the evictable ones among `slots` (distinct) move to the recent end, in this order."""
        queued = self._queue.is_queued(slots)
        self._queue.renew(slots if np.count_nonzero(queued) == len(slots) else slots[queued])

    def claim(self, n: int) -> None:
        """Promise `n` slots, to be named later; UsageError, nothing changed, if fewer are available."""
        if not 0 <= n <= self.available:
            raise UsageError(f"cannot claim {n} {self._tier.value} slots, {self.available} are available")
        self._claimed += n

    def unclaim(self, n: int) -> None:
        """Give back `n` claims that were not named; UsageError, nothing changed, if there are fewer."""
        if not 0 <= n <= self._claimed:
            raise UsageError(f"cannot give back {n} {self._tier.value} claims, there are {self._claimed}")
        self._claimed -= n

    def name_claimed(self, n: int, scan_limit: int) -> NamedSlots:
        """Turn up to `n` claims into reserved slots, pinned once: free ones first, then the coldest, which are evicted.

        Fewer if there are fewer claims, or once `scan_limit` entries of the eviction queue were looked at.
        """
        n = min(n, self._claimed)
        slots = self._free.take(n)
        evicted = NOTHING_EVICTED
        if len(slots) < n:
            coldest = self._queue.pop(n - len(slots), scan_limit)
            evicted = self._index.remove(coldest)
            slots = np.concatenate((slots, coldest)) if len(slots) else coldest
        self._pins[slots.astype(np.int64)] = _ONE
        self._claimed -= len(slots)
        return NamedSlots(slots, evicted)

    def register(self, slots: AnySlots, keys: DigestArray, group: int) -> BoolArray:  # noqa: PLR0917
        """Make reserved `slots[i]` findable under `keys[i]`; False where the key is resident: that slot stays private.

        Of a key that comes twice in one batch the first slot gets it. A slot becomes evictable when its last pin goes.
        Raises ForeignBlock for a slot without a pin, UsageError for one that has a key of this epoch or is quarantined.
        """
        self._require(self._pins.take(slots), slots)
        if self._quarantined_count and self._quarantined.take(slots).any():
            raise UsageError("a quarantined slot cannot be registered")
        if self._index.stale_count:
            stale = self._index.is_stale(slots)
            if np.array_equal(stale, self._index.is_indexed(slots)):
                self._index.remove(slots[stale])
                self._discard(self._index.find_stale(keys, group))
        return self._index.insert(slots, keys, group=group)

    def evict(self, slots: AnySlots) -> Evicted:
        """Free these evictable `slots` (distinct); ForeignBlock, nothing changed, if one is pinned or has no key."""
        self._require(self._queue.is_queued(slots), slots)
        self._queue.drop(slots)
        evicted = self._index.remove(slots)
        self._free.put(slots)
        return evicted

    def unregister(self, slots: AnySlots) -> Evicted:
        """Take the keys off pinned resident `slots` (distinct): they are reserved again. Else ForeignBlock."""
        self._require(self._pins.take(slots), slots)
        self._require(self._index.is_indexed(slots), slots)
        return self._index.remove(slots)

    def quarantine(self, slots: AnySlots) -> Evicted:
        """Take pinned `slots` (distinct) out of use for good, with their keys. ForeignBlock if one has no pin."""
        self._require(self._pins.take(slots), slots)
        evicted = self._index.remove(slots[self._index.is_indexed(slots)])
        self._quarantined_count += len(slots) - int(np.count_nonzero(self._quarantined.take(slots)))
        self._quarantined[slots] = True
        return evicted

    def bump_epoch(self) -> None:
        """Make every key unfindable at once, in O(1); `sweep` frees the slots afterwards."""
        self._index.bump()
        self._cursor = self._first

    def sweep(self, limit: int) -> int:
        """Look at the next `limit` slots and take old keys off them; unpinned ones are free then.

        The answer is how many stale slots are left: 0 when the sweep is done.
        """
        if self._index.stale_count:
            start, self._cursor = self._cursor, min(self._cursor + max(limit, 1), self._free.fresh)
            self._discard(self._index.stale_between(start, self._cursor))
        return self._index.stale_count

    def warm(self, limit: int) -> int:
        """Touch the memory of the next `limit` index buckets (24 bytes each) early; returns how many are left."""
        return self._index.warm(limit)

    def fingerprint(self) -> str:
        """A digest of pins, keys, eviction order and order of reuse; equal pools print equal. O(capacity)."""
        return self._books.fingerprint(claimed=self._claimed)

    def check_invariants(self) -> list[str]:
        """Violations found by a full recount, in words; O(capacity)."""
        return self._books.check_invariants(self.counts())

    def _require(self, held: NDArray[np.int32] | BoolArray, slots: AnySlots) -> None:
        if np.count_nonzero(held) < len(slots):
            raise ForeignBlock(int(slots[int((held == 0).argmax())]), tier=self._tier.value)

    def _drop_pins(self, slots: AnySlots) -> IntArray:
        at = slots.astype(np.int64)
        pins = self._pins.take(at)
        self._require(pins, at)
        pins -= _ONE
        self._pins[at] = pins
        return at[pins == 0] if np.count_nonzero(pins) else at

    def _free_keyless(self, slots: IntArray) -> IntArray:
        """The last pins of `slots` went: those without a current key are free, the others are to be queued."""
        if self._index.stale_count:
            self._index.remove(slots[self._index.is_stale(slots)])
        if self._index.are_indexed(slots):
            return slots
        resident = self._index.is_indexed(slots)
        is_free = ~resident & ~self._quarantined.take(slots) if self._quarantined_count else ~resident
        self._free.put(slots[is_free])
        return slots[resident]

    def _discard(self, slots: IntArray) -> None:
        """Take the keys off these stale `slots`; the unpinned ones are free then."""
        self._index.remove(slots)
        idle = slots[self._pins.take(slots) == 0]
        self._queue.drop(idle)
        self._free.put(idle)
