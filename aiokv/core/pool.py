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

from aiokv.core.masks import is_all
from aiokv.core.pool_parts import ONE_PIN
from aiokv.core.pool_values import NOTHING_EVICTED, Evicted, NamedSlots, PoolCounts
from aiokv.core.pool_view import PoolView
from aiokv.errors import ForeignBlock, UsageError
from aiokv.model.ids import BoolArray, DigestArray, IntArray, SlotArray

__all__ = ["Evicted", "NamedSlots", "Pool", "PoolCounts"]


_NO_SLOTS: Final[IntArray] = np.empty(0, np.int64)


@final
class Pool(PoolView):
    """Slots `[first_slot, first_slot + capacity)` of one tier: how they change. What is known of them: `PoolView`."""

    __slots__ = ()

    def trim(self, scan_limit: int) -> None:
        """Pass up to `scan_limit` entries at the cold end that stand for nothing; the order stays."""
        self.settle()
        self._queue.trim(scan_limit)

    def pin(self, slots: SlotArray) -> None:
        """Hold `slots` (distinct, each resident or pinned).

        Raises ForeignBlock for a free slot, and UsageError if claims would outgrow what is left; nothing is changed.
        """
        if self._late:
            self.settle()
        at = slots.astype(np.int64, copy=False)
        pins = self._pins[at]
        busy = int(np.count_nonzero(pins))
        if not busy:
            self._lift(at)
            self._pins[at] = ONE_PIN
        else:
            if busy < len(at):
                self._lift(at[pins == 0])
            pins += ONE_PIN
            self._pins[at] = pins
        self._tell(at)

    def unpin(self, slots: SlotArray, times: NDArray[np.int32] | None = None) -> None:
        """Let go of `slots` (distinct, pinned) in eviction order: of those that become evictable the first goes first.

        Drops one pin of each, or `times[i]` of them. Slots without a current key are free at their last pin.
        ForeignBlock, nothing changed, if one has fewer pins.
        """
        self.settle()
        self._queue_idle(self._drop_pins(slots, times), among=slots)

    def unpin_in_place(self, slots: SlotArray) -> None:
        """Like `unpin`, but what becomes evictable returns to where it was pinned, or goes first if that has gone."""
        self.settle()
        self._queue.restore(self._free_keyless(self._drop_pins(slots)))
        self._tell(slots)

    def touch(self, slots: SlotArray) -> None:
        """Recency only: the evictable ones among `slots` (distinct) move to the recent end, in this order."""
        self.settle()
        queued = self._queue.is_queued(slots)
        touched = slots if is_all(queued) else slots[queued]
        self._queue.renew(touched)
        self.ages.stamp(touched)

    def note_tick(self, tick: int) -> None:
        """It is later now, by the host's clock; what was let go of before was let go of then."""
        self.settle()
        self.ages.set_time(tick)

    def note_use(self, slots: SlotArray) -> None:
        """A request is about to pin these blocks, which it has hit."""
        if not self.ages.is_on:
            return
        reuses, count = self.ages.reuses, len(slots)
        if count < reuses.until_next:
            reuses.until_next -= count
            return
        self.settle()
        slot = reuses.pick(slots)
        if not self._pins.item(slot):
            self.ages.note_reuse(slot)

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
        if self._late:
            self.settle()
        n = min(n, self._claimed)
        slots = self._free.take(n) if self._free.count else _NO_SLOTS
        evicted = NOTHING_EVICTED
        if len(slots) < n:
            coldest = self._queue.pop(n - len(slots), scan_limit)
            self._note_eviction(coldest)
            evicted = self._index.remove(coldest)
            slots = np.concatenate((slots, coldest)) if len(slots) else coldest
        self._pins[slots] = ONE_PIN
        self._claimed -= len(slots)
        self._tell(slots)
        return NamedSlots(slots, evicted)

    def register(  # noqa: PLR0917  # slots by their keys
        self, slots: SlotArray, keys: DigestArray, group: int, *, copies_of: SlotArray | None = None
    ) -> BoolArray:
        """Make reserved `slots[i]` findable under `keys[i]`; False where the key is resident: that slot stays private.

        Of a key that comes twice in one batch the first slot gets it. A slot becomes evictable when its last pin goes.
        Where the blocks were copied from slots of the other tier, naming these saves a search.
        Raises ForeignBlock for a slot without a pin, UsageError for one that has a key of this epoch or is quarantined.
        """
        self.settle()
        self._require(self._pins.take(slots), slots)
        if self._quarantined_count and self._quarantined.take(slots).any():
            raise UsageError("a quarantined slot cannot be registered")
        if self._index.stale_count:
            stale = self._index.is_stale(slots)
            if np.array_equal(stale, self._index.is_indexed(slots)):
                self._index.remove(slots[stale])
                self._discard(self._index.find_stale(keys, group))
        self._tell(slots)
        return self._index.insert(slots, keys, group=group, copies_of=copies_of)

    def evict(self, slots: SlotArray) -> Evicted:
        """Free these evictable `slots` (distinct); ForeignBlock, nothing changed, if one is pinned or has no key."""
        self.settle()
        self._require(self._queue.is_queued(slots), slots)
        self._queue.drop(slots)
        evicted = self._index.remove(slots)
        self._free.put(slots)
        self._tell(slots)
        return evicted

    def unregister(self, slots: SlotArray) -> Evicted:
        """Take the keys off pinned resident `slots` (distinct): they are reserved again. Else ForeignBlock."""
        self.settle()
        self._require(self._pins.take(slots), slots)
        self._require(self._index.is_indexed(slots), slots)
        self._tell(slots)
        return self._index.remove(slots)

    def quarantine(self, slots: SlotArray) -> Evicted:
        """Take pinned `slots` (distinct) out of use for good, with their keys. ForeignBlock if one has no pin."""
        self.settle()
        self._require(self._pins.take(slots), slots)
        evicted = self._index.remove(slots[self._index.is_indexed(slots)])
        self._quarantined_count += len(slots) - int(np.count_nonzero(self._quarantined.take(slots)))
        self._quarantined[slots] = True
        self._tell(slots)
        return evicted

    def bump_epoch(self) -> None:
        """Make every key unfindable at once, in O(1); `sweep` frees the slots afterwards."""
        self.settle()
        self._index.bump()
        self._cursor = self._first

    def sweep(self, limit: int) -> int:
        """Look at the next `limit` slots and take old keys off them; unpinned ones are free then.

        The answer is how many stale slots are left: 0 when the sweep is done.
        """
        self.settle()
        if self._index.stale_count:
            start, self._cursor = self._cursor, min(self._cursor + max(limit, 1), self._free.fresh)
            self._discard(self._index.stale_between(start, self._cursor))
        return self._index.stale_count

    def warm(self, limit: int) -> int:
        """Touch the memory of the next `limit` index buckets (24 bytes each) early; returns how many are left."""
        return self._index.warm(limit)

    def _note_eviction(self, slots: IntArray) -> None:
        """These are being evicted; where some are stale they were forgotten before."""
        if not self.ages.is_on:
            return
        evictions, count = self.ages.evictions, len(slots)
        if count < evictions.until_next:
            evictions.until_next -= count
        elif not self._index.stale_count:
            self.ages.note_eviction(evictions.pick(slots))

    def _lift(self, idle: IntArray) -> None:
        """Take slots without a pin out of the eviction queue. Raises as `pin` does."""
        if len(idle) > self.available:
            self._require(self._queue.is_queued(idle), idle)
            raise UsageError(f"pinning {len(idle)} evictable slots breaks claims: {self.available} are available")
        if not self._queue.try_lift(idle):
            self._require(self._queue.is_queued(idle), idle)

    def _require(self, held: NDArray[np.int32] | BoolArray, slots: SlotArray) -> None:
        if np.count_nonzero(held) < len(slots):
            raise ForeignBlock(int(slots[int((held == 0).argmax())]), tier=self._tier.value)

    def _drop_pins(self, slots: SlotArray, times: NDArray[np.int32] | None = None) -> IntArray:
        at = slots.astype(np.int64, copy=False)
        pins = self._pins[at]
        if times is not None or np.count_nonzero(pins) < len(at):
            self._require(pins if times is None else pins >= times, at)
        return self._take_pins(at, pins, times=times)

    def _discard(self, slots: IntArray) -> None:
        """Take the keys off these stale `slots`; the unpinned ones are free then."""
        self._index.remove(slots)
        idle = slots[self._pins.take(slots) == 0]
        self._queue.drop(idle)
        self._free.put(idle)
        self._tell(slots)
