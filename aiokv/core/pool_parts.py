"""What a pool is made of, and the pins that wait to be dropped.

Duty: let a lease that leaves say so in the time of one `append`. Dropping the pins of one short request takes numpy as
long as those of ten, so what is let go of is written down and dropped together, once somebody wants to know or change
what depends on it: whatever reads a pin, the eviction order, the free slots or a count calls `settle` first. Nobody can
tell that it was not done at once, save a scrape in another thread, which reads counts as they stand: for its sake a
host settles in its next turn (`Meters.drop_pins`).

Rules: what waits is bounded (`_LATE_SLOTS`), so that no call pays for many others (law 8); pins are dropped in the
order in which they were let go of, so the eviction order is the same.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from aiokv.core.block_ages import BlockAges
from aiokv.core.epoch_index import EpochIndex
from aiokv.core.free_list import FreeList
from aiokv.core.index import SlotIndex
from aiokv.core.lru import EvictionQueue
from aiokv.core.pool_books import PoolBooks
from aiokv.core.slot_counts import SlotTimes
from aiokv.core.slot_memory import zeros
from aiokv.core.watching import SlotWatch
from aiokv.errors import UsageError
from aiokv.model.ids import BoolArray, IntArray, SlotArray, Tier

__all__ = ["ONE_PIN", "PoolParts"]

ONE_PIN: Final = np.array(1, np.int32)
"""Of the pins' own type and no Python number, which numpy would convert at each call."""
_NO_PIN: Final = np.array(0, np.int32)
_LATE_SLOTS: Final = 1024
"""So many slots at most wait for their pins to be dropped: some ten microseconds."""
_SINGLE_PINS: Final = np.ones(_LATE_SLOTS, np.int32).tobytes()


class PoolParts:
    """The state of a `Pool`: slots `[first_slot, first_slot + capacity)` of one tier."""

    __slots__ = (
        "_books", "_capacity", "_claimed", "_cursor", "_first", "_free", "_index", "_late", "_late_count", "_pins",
        "_quarantined", "_quarantined_count", "_queue", "_tier", "ages", "watchers",
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
        self.ages = BlockAges(size)
        """How long its blocks lie idle: read it, never write."""
        self._free = FreeList(first=first_slot, end=end)
        self._pins: NDArray[np.int32] = zeros(size, np.int32)
        self._quarantined: BoolArray = zeros(size, np.bool_)
        self._quarantined_count = 0
        self._claimed = 0
        self._cursor = first_slot
        self._late: list[IntArray] = []
        self._late_count = 0
        self.watchers: list[SlotWatch] = []
        """Each is told which slots have changed."""
        self._books = PoolBooks(
            first=first_slot, pins=self._pins, quarantined=self._quarantined, index=self._index, queue=self._queue,
            free=self._free,
        )  # fmt: skip

    def unpin_late(self, slots: IntArray) -> None:
        """Let go of `slots` (distinct, pinned by the caller, who changes this array no more) in eviction order.

        Like `Pool.unpin`, but done with others of its like, before anybody can see that it was not.
        """
        if self._late_count + len(slots) > _LATE_SLOTS:
            self.settle()
        self._late.append(slots)
        self._late_count += len(slots)
        if self._late_count > _LATE_SLOTS:
            self.settle()

    @property
    def has_late(self) -> bool:
        """Whether pins wait to be dropped."""
        return len(self._late) > 0

    def settle(self) -> None:
        """Drop the pins that wait for it."""
        if not self._late:
            return
        batches, self._late, self._late_count = self._late, [], 0
        if len(batches) > 1:
            slots = np.concatenate(batches)
            pins = self._pins[slots].tobytes()
            if pins == _SINGLE_PINS[: len(pins)]:  # all are the last ones, and so no slot is in two batches
                self._pins[slots] = _NO_PIN
                self._queue_idle(slots, among=slots)
                return
        for batch in batches:
            self._queue_idle(self._take_pins(batch, self._pins[batch]), among=batch)

    def _take_pins(self, slots: IntArray, pins: SlotTimes, *, times: SlotTimes | None = None) -> IntArray:
        """One pin less of each of `slots`, which have `pins`, or `times[i]` less; those that have none now."""
        pins -= ONE_PIN if times is None else times
        self._pins[slots] = pins
        return slots[pins == 0] if np.count_nonzero(pins) else slots

    def _queue_idle(self, slots: IntArray, *, among: SlotArray) -> None:
        """The last pins of these `among` others went: those without a current key are free, the others are queued."""
        if len(slots):
            idle = self._free_keyless(slots)
            self._queue.push(idle)
            self.ages.stamp(idle)
        self._tell(among)

    def _free_keyless(self, slots: IntArray) -> IntArray:
        """The last pins of `slots` went: those without a current key are free, the others are to be queued."""
        if self._index.stale_count:
            self._index.remove(slots[self._index.is_stale(slots)])
        resident = self._index.find_indexed(slots)
        keyless = len(slots) - len(resident)
        if keyless == 0:
            return slots
        if not self._quarantined_count and (not len(resident) or resident.item(0) == keyless):
            self._free.put(slots[:keyless])  # the unconfirmed tail of a lease, which comes first
            return slots[keyless:]
        free = slots[self._index.find_keyless(slots)]
        if self._quarantined_count:
            free = free[~self._quarantined.take(free)]
        self._free.put(free)
        return slots[resident]

    def _tell(self, slots: SlotArray) -> None:
        """These have changed, or are about to within this call."""
        for watch in self.watchers:
            watch.note(slots)
