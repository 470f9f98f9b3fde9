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

Transitions: free -name-> reserved -register-> resident -unpin-> evictable -pin-> resident; evictable -name-> reserved
(its key is evicted) or -evict-> free; reserved -unpin-> free; resident -unregister-> reserved; pinned -quarantine-> out.

`bump_epoch` makes all keys unfindable at once. Their slots are *stale*: they still count as resident (and evictable when
unpinned, so `available` does not change) until `sweep`, eviction, a new registration of their key or their last unpin
takes the old key off. No call reports the keys of stale slots as evicted: they were cleared by the bump.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from aiokv.core.index import GroupArray, SlotIndex
from aiokv.core.lru import EvictionQueue
from aiokv.errors import ForeignBlock, UsageError
from aiokv.model.ids import BoolArray, DigestArray, SlotArray, Tier
from aiokv.model.plan import Found

__all__ = ["Evicted", "NamedSlots", "Pool", "PoolCounts"]

_NO_SLOTS: Final[SlotArray] = np.empty(0, dtype=np.int32)
_NO_KEYS: Final[DigestArray] = np.empty((0, 4), dtype=np.uint64)
_NO_GROUPS: Final[GroupArray] = np.empty(0, dtype=np.int16)


@dataclass(frozen=True, slots=True, eq=False)
class Evicted:
    """Keys that stopped being findable: `keys[i]` (shape `[k, 4]`) of group `groups[i]`."""

    keys: DigestArray
    groups: GroupArray

    def __len__(self) -> int:
        return len(self.groups)


_NOTHING_EVICTED: Final = Evicted(_NO_KEYS, _NO_GROUPS)


@dataclass(frozen=True, slots=True, eq=False)
class NamedSlots:
    """Claims turned into reserved slots, each pinned once, and the keys that were evicted for them."""

    slots: SlotArray
    evicted: Evicted

    @property
    def evicted_keys(self) -> DigestArray:
        """Digests of the evicted keys, shape `[k, 4]`."""
        return self.evicted.keys

    @property
    def evicted_groups(self) -> GroupArray:
        """Groups of the evicted keys, shape `[k]`."""
        return self.evicted.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """How many slots are in each state; the first four sum to the capacity."""

    free: int
    reserved: int
    resident: int
    quarantined: int
    evictable: int
    claimed: int


@final
class Pool:
    """Slots `[first_slot, first_slot + capacity)` of one tier."""

    __slots__ = (
        "_capacity",
        "_claimed",
        "_cursor",
        "_epoch",
        "_first",
        "_fresh",
        "_index",
        "_pins",
        "_quarantined",
        "_quarantined_count",
        "_queue",
        "_returned",
        "_returned_count",
        "_slot_epoch",
        "_stale",
        "_tier",
    )

    def __init__(self, tier: Tier, capacity: int, first_slot: int = 0) -> None:
        """`capacity` usable slots; `first_slot=1` keeps slot 0, the null block, out of circulation."""
        if capacity < 0 or first_slot < 0:
            raise UsageError(f"a pool cannot have {capacity} slots from {first_slot} on")
        size = max(capacity + first_slot, 1)
        self._tier = tier
        self._capacity = capacity
        self._first = first_slot
        self._index = SlotIndex(size)
        self._queue = EvictionQueue(size)
        self._pins: NDArray[np.int32] = np.zeros(size, dtype=np.int32)
        self._slot_epoch: NDArray[np.int32] = np.zeros(size, dtype=np.int32)
        self._quarantined: BoolArray = np.zeros(size, dtype=np.bool_)
        self._quarantined_count = 0
        self._returned: SlotArray = np.empty(size, dtype=np.int32)
        self._returned_count = 0
        self._fresh = first_slot
        self._claimed = 0
        self._epoch = 0
        self._stale = 0
        self._cursor = first_slot

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
        return self._epoch

    @property
    def free_count(self) -> int:
        """Slots without pin and key."""
        return self._returned_count + self._first + self._capacity - self._fresh

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
        return self._capacity - self.free_count - len(self._index) - self._quarantined_count

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
        return self._stale

    @property
    def available(self) -> int:
        """How many slots can still be claimed."""
        return self.free_count + len(self._queue) - self._claimed

    def counts(self) -> PoolCounts:
        """All counts as one value; O(1)."""
        return PoolCounts(
            free=self.free_count,
            reserved=self.reserved_count,
            resident=self.resident_count,
            quarantined=self._quarantined_count,
            evictable=self.evictable_count,
            claimed=self._claimed,
        )

    def find(self, keys: DigestArray, group: int) -> Found:
        """Which slots hold `keys` (shape `[n, 4]`) of `group` in this epoch; changes nothing."""
        found = self._index.find(keys, group)
        if self._stale:
            current = self._slot_epoch.take(found.slots) == self._epoch
            return Found(found.present & current, found.slots)
        return found

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
        """How many of `slots` have no pin: by so many a `pin` of them lowers `available`."""
        return len(slots) - int(np.count_nonzero(self._pins.take(slots)))

    def find_coldest(self, n: int, scan_limit: int) -> SlotArray:
        """Up to `n` evictable slots, coldest first; looks at `scan_limit` entries at most and changes nothing."""
        return self._queue.peek(n, scan_limit)

    def pin(self, slots: SlotArray) -> None:
        """Hold `slots` (distinct, each resident or pinned).

        Raises ForeignBlock for a free slot, and UsageError if claims would outgrow what is left; nothing is changed.
        """
        pins = self._pins.take(slots)
        if pins.all():
            self._pins[slots] = pins + 1
            return
        idle = slots[pins == 0]
        if len(idle) > self.available:
            raise UsageError(f"pinning {len(idle)} evictable slots would break claims: {self.available} are available")
        self._require(self._queue.is_queued(idle), idle)
        self._queue.drop(idle)
        self._pins[slots] = pins + 1

    def unpin(self, slots: SlotArray) -> None:
        """Let go of `slots` (distinct, pinned) in eviction order: of those that become evictable the first goes first.

        Slots without a current key are free at their last pin. ForeignBlock, nothing changed, if one has no pin.
        """
        pins = self._pins.take(slots)
        self._require(pins, slots)
        pins -= 1
        self._pins[slots] = pins
        idle = slots if not pins.any() else slots[pins == 0]
        if len(idle) == 0:
            return
        if self._stale:
            self._unregister(idle[self._is_stale(idle)])
        resident = self._index.is_indexed(idle)
        if resident.all():
            self._queue.push(idle)
            return
        self._queue.push(idle[resident])
        self._free(idle[~resident])

    def touch(self, slots: SlotArray) -> None:
        """Recency only: the evictable ones among `slots` (distinct) move to the recent end, in this order."""
        queued = self._queue.is_queued(slots)
        self._queue.renew(slots if queued.all() else slots[queued])

    def claim(self, n: int) -> None:
        """Promise `n` slots, to be named later; UsageError, nothing changed, if fewer are available."""
        if not 0 <= n <= self.available:
            raise UsageError(f"cannot claim {n} {self._tier.value} slots, {self.available} are available")
        self._claimed += n

    def unclaim(self, n: int) -> None:
        """Give back `n` claims that were not named."""
        if not 0 <= n <= self._claimed:
            raise UsageError(f"cannot give back {n} claims, there are {self._claimed}")
        self._claimed -= n

    def name_claimed(self, n: int, scan_limit: int) -> NamedSlots:
        """Turn up to `n` claims into reserved slots, pinned once: free ones first, then the coldest, which are evicted.

        Fewer if there are fewer claims, or once `scan_limit` entries of the eviction queue were looked at.
        """
        n = min(n, self._claimed)
        slots = self._take_free(min(n, self.free_count))
        evicted = _NOTHING_EVICTED
        if len(slots) < n:
            coldest = self._queue.pop(n - len(slots), scan_limit)
            evicted = self._unregister(coldest)
            slots = np.concatenate((slots, coldest)) if len(slots) else coldest
        self._pins[slots] = 1
        self._claimed -= len(slots)
        return NamedSlots(slots, evicted)

    def register(self, slots: SlotArray, keys: DigestArray, group: int) -> BoolArray:
        """Make reserved `slots[i]` findable under `keys[i]`; False where the key is resident: that slot stays private.

        Of a key that comes twice in one batch the first slot gets it. A slot becomes evictable when its last pin goes.
        Raises ForeignBlock for a slot without a pin, UsageError for one that has a key of this epoch.
        """
        self._require(self._pins.take(slots), slots)
        if self._stale:
            self._unregister(slots[self._is_stale(slots)])
            same = self._index.find(keys, group)
            old = np.unique(same.slots[same.present])
            self._discard(old[self._is_stale(old)])
        registered = self._index.insert(slots, keys, group)
        self._slot_epoch[slots] = self._epoch
        return registered

    def evict(self, slots: SlotArray) -> Evicted:
        """Free these evictable `slots` (distinct); ForeignBlock, nothing changed, if one is pinned or has no key."""
        self._require(self._queue.is_queued(slots), slots)
        self._queue.drop(slots)
        evicted = self._unregister(slots)
        self._free(slots)
        return evicted

    def unregister(self, slots: SlotArray) -> Evicted:
        """Take the keys off pinned resident `slots` (distinct): they are reserved again. Else ForeignBlock."""
        self._require(self._pins.take(slots), slots)
        self._require(self._index.is_indexed(slots), slots)
        return self._unregister(slots)

    def quarantine(self, slots: SlotArray) -> Evicted:
        """Take pinned `slots` (distinct) out of use for good, with their keys. ForeignBlock if one has no pin."""
        self._require(self._pins.take(slots), slots)
        evicted = self._unregister(slots[self._index.is_indexed(slots)])
        self._quarantined_count += len(slots) - int(np.count_nonzero(self._quarantined.take(slots)))
        self._quarantined[slots] = True
        return evicted

    def bump_epoch(self) -> None:
        """Make every key unfindable at once, in O(1); `sweep` frees the slots afterwards."""
        self._epoch += 1
        self._stale = len(self._index)
        self._cursor = self._first

    def sweep(self, limit: int) -> int:
        """Look at the next `limit` slots and take old keys off them; unpinned ones are free then.

        The answer is how many stale slots are left: 0 when the sweep is done.
        """
        if self._stale:
            start, stop = self._cursor, min(self._cursor + max(limit, 1), self._fresh)
            self._cursor = stop
            stale = self._index.indexed_between(start, stop)
            stale &= self._slot_epoch[start:stop] != self._epoch
            self._discard(stale.nonzero()[0].astype(np.int32) + np.int32(start))
        return self._stale

    def fingerprint(self) -> str:
        """A digest of pins, keys, eviction order and order of reuse; equal pools print equal. O(capacity)."""
        end = self._fresh
        indexed = self._index.indexed_between(0, end).nonzero()[0].astype(np.int32)
        parts = (
            self._pins[:end],
            self._quarantined[:end],
            self._slot_epoch.take(indexed),
            indexed,
            self._index.key_of(indexed),
            self._index.group_of(indexed),
            self._queue.peek(len(self._queue), 1 << 62),
            self._returned[: self._returned_count],
        )
        digest = hashlib.sha256(repr((self._fresh, self._claimed, self._epoch)).encode())
        for part in parts:
            digest.update(part.tobytes())
        return digest.hexdigest()

    def check_invariants(self) -> list[str]:
        """Violations found by a full recount, in words; O(capacity)."""
        found = self._index.check_invariants() + self._queue.check_invariants()
        end = self._fresh
        pins = self._pins[:end]
        indexed = self._index.indexed_between(0, end)
        out = self._quarantined[:end]
        queued = self._queue.queued_between(0, end)
        free = np.zeros(end, dtype=np.bool_)
        returned = self._returned[: self._returned_count]
        free[returned] = True
        reserved = (pins > 0) & ~indexed & ~out
        stale = indexed & (self._slot_epoch[:end] != self._epoch)
        null = np.arange(end) < self._first
        checks = {
            "a pin count is negative": not (pins < 0).any(),
            "a slot is twice on the free stack": int(free.sum()) == len(returned),
            "a free slot has a pin or a key": not (free & ((pins > 0) | indexed | out)).any(),
            "a quarantined slot has a key": not (out & indexed).any(),
            "the eviction queue is not the unpinned resident slots": bool((queued == (indexed & (pins == 0))).all()),
            "a slot is in no state": bool((free | reserved | indexed | out | null).all()),
            "the null block is in use": not ((free | reserved | indexed | out) & null).any(),
            "the reserved count is wrong": int(reserved.sum()) == self.reserved_count,
            "the quarantined count is wrong": int(out.sum()) == self._quarantined_count,
            "the stale count is wrong": int(stale.sum()) == self._stale,
            "there are more claims than slots": 0 <= self._claimed <= self.free_count + self.evictable_count,
            "a slot that was never used has a pin": not self._pins[end:].any(),
        }
        return found + [text for text, holds in checks.items() if not holds]

    def _require(self, held: NDArray[np.int32] | BoolArray, slots: SlotArray) -> None:
        if not held.all():
            raise ForeignBlock(int(slots[int((held == 0).argmax())]), tier=self._tier.value)

    def _is_stale(self, slots: SlotArray) -> BoolArray:
        return self._index.is_indexed(slots) & (self._slot_epoch.take(slots) != self._epoch)

    def _take_free(self, n: int) -> SlotArray:
        """The last `n` returned slots, latest first, then slots never used."""
        returned = min(n, self._returned_count)
        self._returned_count -= returned
        slots = self._returned[self._returned_count : self._returned_count + returned][::-1].copy()
        if returned == n:
            return slots
        fresh = np.arange(self._fresh, self._fresh + n - returned, dtype=np.int32)
        self._fresh += n - returned
        return np.concatenate((slots, fresh)) if returned else fresh

    def _free(self, slots: SlotArray) -> None:
        if self._quarantined_count:
            slots = slots[~self._quarantined.take(slots)]
        self._returned[self._returned_count : self._returned_count + len(slots)] = slots
        self._returned_count += len(slots)

    def _unregister(self, slots: SlotArray) -> Evicted:
        """Take indexed `slots` out of the index; the answer leaves stale ones out."""
        if len(slots) == 0:
            return _NOTHING_EVICTED
        told = slots
        if self._stale:
            current = self._slot_epoch.take(slots) == self._epoch
            told = slots[current]
            self._stale -= len(slots) - len(told)
        evicted = Evicted(self._index.key_of(told), self._index.group_of(told))
        self._index.remove(slots)
        return evicted

    def _discard(self, slots: SlotArray) -> None:
        """Take the keys off these stale `slots`; the unpinned ones are free then."""
        self._unregister(slots)
        idle = slots[self._pins.take(slots) == 0]
        self._queue.drop(idle)
        self._free(idle)
