"""The store policies that copy what requests offer: all of it (EAGER), or what was seen often enough (SELECTIVE).

Rules
- Offered are blocks as they are confirmed and the GPU hits of admitted requests; they are planned in later slices,
  never while a request is admitted.
- An offer whose lease has left is dropped, unless the lease finished, which flushes it first.
- A *hole*, a block of a running request whose copy was evicted from the CPU tier, is offered again when any request
  finishes, and with the next offer of any request once enough copies have gone to be looked at together. It takes free
  slots and those of blocks that no running request holds: what is held in both tiers never drives out its like, so
  holes end.

State: the backlog of offers, oldest first. Holes wait in `World.gone_copies`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol, final

import numpy as np

from aiokv.core.block_names import KeyedBlocks, digests_at
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.core.masks import has_any, is_all
from aiokv.core.planner import AcquirePlan
from aiokv.core.pool import Evicted, Pool
from aiokv.core.pool_values import take_joined
from aiokv.core.slices import SLICE_PARTS, Job
from aiokv.core.store_queue import Sifted, StoreOrder, StoreQueue
from aiokv.core.world import SCAN_LIMIT, World
from aiokv.model.ids import BoolArray, DigestArray, IntArray, SlotArray
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import DeclineReason

__all__ = ["Choice", "Offer", "Offers"]

_FEW_GONE: Final = 512
"""Where so many copies have gone, holes among them are looked for with the next offer."""
_SMALL_PART: Final = 64
"""In a small CPU tier it is so many times less than its slots."""


@dataclass(slots=True, kw_only=True, eq=False)
class Offer:
    """Registered GPU blocks of one lease and group that have not been considered for the CPU tier yet."""

    record: LeaseRecord
    keys: BlockKeys
    """Those of the lease when it made the offer: it may have been truncated since."""
    group: int
    positions: IntArray
    slots: SlotArray
    planned: int = 0
    chosen: int = 0
    """The first so many have been found worth a copy already, which is asked once only; they wait for slots."""

    def put_back(self, later: KeyedBlocks, slots: SlotArray) -> None:
        """These of the blocks that were planned last come first once more."""
        self.positions = np.concatenate((later.positions, self.positions[self.planned :]))
        self.slots = np.concatenate([part.astype(np.int64, copy=False) for part in (slots, self.slots[self.planned :])])
        self.planned, self.chosen = 0, len(slots) + max(self.chosen - self.planned, 0)


class Choice(Protocol):
    """Which offered blocks are worth a copy."""

    def choose(self, digests: DigestArray) -> BoolArray:
        """One answer for each of these distinct blocks, which were offered once more; may count them."""
        ...


@final
class Offers:
    """Plans what is offered, oldest first."""

    __slots__ = ("_backlog", "_choice", "_is_planning", "_queue", "_world")

    def __init__(self, world: World, *, queue: StoreQueue, choice: Choice) -> None:
        self._world = world
        self._queue = queue
        self._choice = choice
        self._backlog: deque[Offer] = deque()
        self._is_planning = False

    @property
    def is_due(self) -> bool:
        """Never: offers start their own planning."""
        return False

    def admitted(self, record: LeaseRecord, plan: AcquirePlan) -> None:
        """Offer every GPU hit of a request that was let in: its CPU copy is touched, or made."""
        for index, group in enumerate(plan.groups):
            positions, slots = group.hit_positions, group.hit_slots
            self.offer(Offer(record=record, keys=record.keys, group=index, positions=positions, slots=slots))

    def offer(self, offer: Offer) -> None:
        """Put blocks into the backlog; they are planned in later slices."""
        if not len(offer.positions) or not self._may_store(offer.record):
            return
        self._backlog.append(offer)
        if not self._is_planning:
            self._is_planning = True
            self._world.slices.append(self._planning())

    def flush(self, record: LeaseRecord) -> Job:
        """Plan everything this lease has offered, and all holes, slice by slice."""
        mine = [offer for offer in self._backlog if offer.record is record]
        self._backlog = deque(offer for offer in self._backlog if offer.record is not record)
        budget = self._world.slice_blocks
        for offer in mine:
            while offer.planned < len(offer.positions):
                budget -= self._cost_of(self._plan_part(offer, limit=budget))
                if not self._is_worth_a_part(budget):
                    yield
                    budget = self._world.slice_blocks
        yield from self._filling()

    def work(self) -> Job:
        """Nothing beside the planning of offers."""
        yield from ()

    def _planning(self) -> Job:
        while self._backlog:
            budget = self._world.slice_blocks
            while self._backlog and self._is_worth_a_part(budget):
                offer = self._backlog[0]
                budget -= self._cost_of(self._plan_part(offer, limit=budget))
                if offer.planned == len(offer.positions):
                    self._backlog.popleft()
            if self._backlog:
                yield
        self._is_planning = False
        if self._have_many_gone():
            yield from self._filling()

    def _have_many_gone(self) -> bool:
        """Whether so many copies have gone that looking for holes among them is cheap for each."""
        world = self._world
        capacity = world.cpu.capacity if world.cpu is not None else 0
        return sum(map(len, world.gone_copies)) >= min(_FEW_GONE, capacity // _SMALL_PART)

    def _cost_of(self, blocks: int) -> int:
        """What one part takes of a slice: a transfer of its own costs as much before its first block as many blocks."""
        return max(blocks + self._world.slice_blocks // SLICE_PARTS - 1, 1)

    def _is_worth_a_part(self, budget: int) -> bool:
        """Whether what is left of a slice is enough for one more transfer, and not for the crumbs of one."""
        return budget > 0 and budget >= self._world.slice_blocks // SLICE_PARTS

    def _plan_part(self, offer: Offer, *, limit: int) -> int:
        """Consider up to `limit` blocks of an offer; returns how many that are, or cost as much."""
        start, stop = offer.planned, min(offer.planned + limit, len(offer.positions))
        offer.planned = stop
        positions, slots = offer.positions[start:stop], offer.slots[start:stop]
        step = self._world.geometry.hashes_per_block(offer.group)
        digests = digests_at(offer.keys, step=step, positions=positions)
        is_chosen = self._choose(digests, chosen=offer.chosen - start)
        if offer.record.state is LeaseState.RELEASED or not self._may_store(offer.record):
            self._queue.skip(stop - start, DeclineReason.REQUEST_GONE)
            return stop - start
        found = self._queue.sift(digests, group=offer.group, slots=slots)
        if not found.are_wanted or not is_all(is_chosen):
            self._pass_by(offer, found, slots=slots, is_chosen=is_chosen)
            wanted = found.is_wanted & is_chosen
            positions, slots = positions[wanted], slots[wanted]
        if len(slots) and self._put(offer, positions=positions, slots=slots):
            return limit  # a slice looks for slots as far as it may once
        return stop - start

    def _choose(self, digests: DigestArray, *, chosen: int) -> BoolArray:
        """Which blocks are worth a copy: the first `chosen` of them are, as the policy has said before."""
        if chosen <= 0:
            return self._choice.choose(digests)
        return np.concatenate((np.ones(len(digests[:chosen]), np.bool_), self._choice.choose(digests[chosen:])))

    def _pass_by(self, offer: Offer, found: Sifted, *, slots: SlotArray, is_chosen: BoolArray) -> None:
        """Count why blocks are not copied, and join the copies that are being made."""
        if len(storing := slots[found.is_storing & is_chosen]):
            self._queue.join(offer.record, storing)
        self._queue.skip(np.count_nonzero(~found.is_current), DeclineReason.REQUEST_GONE)
        self._queue.skip(np.count_nonzero(found.is_cached), DeclineReason.ALREADY_CACHED)
        self._queue.skip(np.count_nonzero(found.is_storing), DeclineReason.IN_FLIGHT)
        self._queue.skip(np.count_nonzero(found.is_wanted & ~is_chosen), DeclineReason.SEEN_TOO_SELDOM)

    def _put(self, offer: Offer, *, positions: IntArray, slots: SlotArray) -> bool:
        """Queue stores; whether some of them wait for a later slice."""
        record = offer.record
        blocks = KeyedBlocks(keys=offer.keys.copy(), group=offer.group, positions=positions)
        order = StoreOrder(
            blocks=blocks,
            sources=slots,
            epochs=record.epochs,
            owner=record.lease_id,
        )
        later = self._queue.put(order)
        if len(later.sources):
            offer.put_back(blocks.select(np.isin(slots, later.sources)), later.sources)
        return len(later.sources) > 0

    def _filling(self) -> Job:
        """Offer every hole there is now again, a slice of what was evicted at a time."""
        world = self._world
        left = len(world.gone_copies)
        while left > 0 and world.gone_copies and world.usable_cpu is not None:
            before = len(world.gone_copies)
            gone = take_joined(world.gone_copies, limit=world.slice_blocks)
            left -= before - len(world.gone_copies)
            self._fill(gone, world.usable_cpu)
            if left > 0:
                yield

    def _fill(self, lost: Evicted, cpu: Pool) -> None:
        for group, digests in lost.by_group():
            on_gpu = self._world.gpu.find(digests, group)
            if not has_any(on_gpu.present):
                continue
            is_held = on_gpu.present & (self._world.gpu.pins_of(on_gpu.slots) > 0)
            if has_any(is_held):  # a block whose copy went, came again and went is one hole
                held = is_held.nonzero()[0]
                once = held[np.sort(np.unique(on_gpu.slots[held], return_index=True)[1])]
                self._fill_some(digests[once], group=group, slots=on_gpu.slots[once], cpu=cpu)

    def _fill_some(self, digests: DigestArray, *, group: int, slots: SlotArray, cpu: Pool) -> None:
        """Copy those of these blocks that want a copy, as far as there is room at nobody's cost."""
        holes = self._queue.sift(digests, group=group, slots=slots).is_wanted.nonzero()[0]
        room = self._room_for(len(holes), cpu) if len(holes) else 0
        self._queue.skip(len(holes) - len(holes[:room]), DeclineReason.POOL_FULL)
        if room:
            self._put_holes(digests[holes[:room]], group=group, slots=slots[holes[:room]])

    def _put_holes(self, digests: DigestArray, *, group: int, slots: SlotArray) -> None:
        order = StoreOrder(
            blocks=self._queue.hashed(digests, group=group, slots=slots),
            sources=slots,
            epochs=self._world.epochs,
        )
        self._queue.skip(len(self._queue.put(order).sources), DeclineReason.POOL_FULL)

    def _room_for(self, count: int, cpu: Pool) -> int:
        """CPU slots for up to `count` blocks, at nobody's cost who runs.

        The coldest CPU blocks that running requests hold on the GPU are touched, so that others are evicted before.
        """
        cpu.trim(SCAN_LIMIT)
        coldest = cpu.find_coldest(max(count - cpu.free_count, 0), SCAN_LIMIT)
        digests, groups = cpu.key_of(coldest), cpu.group_of(coldest)
        is_held = np.zeros(len(coldest), np.bool_)
        for group in np.unique(groups).tolist():
            mine = groups == group
            found = self._world.gpu.find(digests[mine], group)
            is_held[mine] = found.present & (self._world.gpu.pins_of(found.slots) > 0)
        cpu.touch(coldest[is_held])
        return min(count, cpu.free_count + int(np.count_nonzero(~is_held)))

    def _may_store(self, record: LeaseRecord) -> bool:
        """Whether there is a CPU tier to store into, and no reset since this lease was admitted."""
        return self._world.has_cpu_tier and self._world.may_copy(record)
