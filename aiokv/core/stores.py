"""Stores: what is offered to the CPU tier, what is copied there, and what becomes of it.

Rules
- Only registered blocks of confirmed tokens are offered (invariant 9); a block is copied at most once at a time.
- Offers are planned in later slices, never while a request is admitted; an offer whose lease has left is dropped unless
  the lease finished, which flushes it first.
- A CPU block is findable only after its copy ended well in the current epoch (law 3), under the hashes recorded when
  the store was planned.

State: the backlog of offers, oldest first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import final

import numpy as np

from aiokv.core.inflight import Transfer, digests_at
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.core.planner import AcquirePlan
from aiokv.core.slices import Job
from aiokv.core.world import World
from aiokv.model.ids import Direction, IntArray, SlotArray, Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import DeclineReason, Outcome

__all__ = ["Offer", "Stores"]


@dataclass(slots=True, kw_only=True, eq=False)
class Offer:
    """Registered GPU blocks of one lease and group that have not been considered for the CPU tier yet."""

    record: LeaseRecord
    keys: BlockKeys
    """Those of the lease when it made the offer: it may have been truncated since."""
    group: int
    positions: IntArray
    slots: SlotArray
    after: object = None
    planned: int = 0


@final
class Stores:
    """Plans and completes stores."""

    __slots__ = ("_backlog", "_is_planning", "_world")

    def __init__(self, world: World) -> None:
        self._world = world
        self._backlog: deque[Offer] = deque()
        self._is_planning = False

    def offer_hits(self, record: LeaseRecord, plan: AcquirePlan) -> None:
        """Offer every GPU hit of an admitted lease: its CPU copy is touched, or made."""
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
            self._world.slices.append(self._planning_job())

    def flush(self, record: LeaseRecord) -> Job:
        """Plan everything this lease has offered, slice by slice."""
        mine = [offer for offer in self._backlog if offer.record is record]
        self._backlog = deque(offer for offer in self._backlog if offer.record is not record)
        budget = self._world.slice_blocks
        for offer in mine:
            while offer.planned < len(offer.positions):
                budget -= self._plan_part(offer, limit=budget)
                if budget <= 0:
                    yield
                    budget = self._world.slice_blocks

    def complete(self, transfer: Transfer, outcome: Outcome) -> Job:
        """The copies of a store have ended: register them slice by slice, tail first, and give every pin back."""
        world = self._world
        targets = transfer.bound_targets
        for stop in range(len(transfer), 0, -self._world.slice_blocks):
            start = max(stop - self._world.slice_blocks, 0)
            if outcome is Outcome.OK and world.may_copy(transfer):
                world.register(Tier.CPU, targets[start:stop], **transfer.blocks(start, stop))
            if outcome is Outcome.LOST:
                world.quarantine(transfer, start=start, stop=stop)
            world.end_copies(transfer, start=start, stop=stop)
            if start:
                yield
        world.inflight.remove(transfer)
        world.forget_store(transfer)

    def _planning_job(self) -> Job:
        while self._backlog:
            budget = self._world.slice_blocks
            while self._backlog and budget > 0:
                offer = self._backlog[0]
                budget -= self._plan_part(offer, limit=budget)
                if offer.planned == len(offer.positions):
                    self._backlog.popleft()
            if self._backlog:
                yield
        self._is_planning = False

    def _plan_part(self, offer: Offer, *, limit: int) -> int:
        """Consider up to `limit` blocks of an offer; returns how many."""
        start, stop = offer.planned, min(offer.planned + limit, len(offer.positions))
        offer.planned = stop
        if offer.record.state is LeaseState.RELEASED or not self._may_store(offer.record):
            self._skip(stop - start, DeclineReason.REQUEST_GONE)
            return stop - start
        positions, slots = offer.positions[start:stop], offer.slots[start:stop]
        wanted = self._find_wanted(offer, positions=positions, slots=slots)
        if len(wanted):
            self._queue(offer, positions=positions[wanted], slots=slots[wanted])
        return stop - start

    def _find_wanted(self, offer: Offer, *, positions: IntArray, slots: SlotArray) -> IntArray:
        """Which of these blocks are worth a copy; those that have one are touched."""
        world = self._world
        cpu = world.cpu
        if cpu is None:
            return np.zeros(0, np.int64)
        step = world.geometry.hashes_per_block(offer.group)
        digests = digests_at(offer.keys, step=step, positions=positions)
        on_gpu = world.gpu.find(digests, offer.group)
        is_current = on_gpu.present & (on_gpu.slots == slots)
        on_cpu = cpu.find(digests, offer.group)
        cpu.touch(on_cpu.slots[on_cpu.present][::-1])
        is_storing = world.inflight.is_storing(slots) & is_current & ~on_cpu.present
        self._skip(int(np.count_nonzero(~is_current)), DeclineReason.REQUEST_GONE)
        self._skip(int(np.count_nonzero(on_cpu.present & is_current)), DeclineReason.ALREADY_CACHED)
        self._skip(int(np.count_nonzero(is_storing)), DeclineReason.IN_FLIGHT)
        return np.flatnonzero(is_current & ~on_cpu.present & ~is_storing)

    def _queue(self, offer: Offer, *, positions: IntArray, slots: SlotArray) -> None:
        """Reserve CPU slots for as many blocks as fit, the head of the prefix first, and queue their store.

        Sources that nobody holds are pinned only as far as admitted requests have not been promised their slots.
        """
        world = self._world
        may_pin = np.cumsum(world.gpu.pins_of(slots) == 0) <= world.gpu.available
        positions, slots = positions[may_pin], slots[may_pin]
        self._skip(int(np.count_nonzero(~may_pin)), DeclineReason.BACKPRESSURE)
        targets = world.reserve_cpu(len(positions))
        self._skip(len(positions) - len(targets), DeclineReason.POOL_FULL)
        if not len(targets):
            return
        sources = slots[: len(targets)]
        world.gpu.pin(sources)
        record = offer.record
        transfer = Transfer(
            transfer_id=world.inflight.next_id(),
            direction=Direction.STORE,
            group=offer.group,
            keys=offer.keys,
            positions=positions[: len(targets)],
            sources=sources,
            targets=targets,
            owner=record.lease_id,
            gpu_epoch=record.gpu_epoch,
            cpu_epoch=record.cpu_epoch,
            after=offer.after,
            waiters={record.lease_id},
        )
        world.inflight.add(transfer)
        record.storing.add(transfer.transfer_id)
        world.outbox.submissions.append(transfer)

    def _may_store(self, record: LeaseRecord) -> bool:
        """Whether there is a CPU tier to store into, and no reset since this lease was admitted."""
        return self._world.has_cpu_tier and self._world.may_copy(record)

    def _skip(self, blocks: int, reason: DeclineReason) -> None:
        self._world.counters.store_skipped_blocks[reason] += blocks
