"""Loads: what becomes of their targets, and what a lease does when one has failed.

Rules
- A target is registered only when its copy ended well in the current epoch (law 3).
- A failed load is planned again once, atomically: the failed keys count as missing in the CPU tier, the old pins are held,
  a failed target is never bound again by that plan. A second failure takes the best prefix without loads.
- Nothing is looked up again for any other reason (law 1).

State: leases whose new plan waits for capacity, oldest first.
"""

from __future__ import annotations

from collections import deque
from typing import final

import numpy as np

from aiokv.core.admission import Admission
from aiokv.core.attribution import attribute
from aiokv.core.block_table import ClaimSegment
from aiokv.core.coverage import covered_range
from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import LeaseEvent, LeaseRecord, LeaseState
from aiokv.core.lookup import GroupResidency, Residency, find_residency, longest_valid
from aiokv.core.planner import AcquirePlan, GroupPlan, plan_acquire
from aiokv.core.slices import SLICE_BLOCKS, Job
from aiokv.core.world import World
from aiokv.model.ids import NULL_SLOT, BoolArray, SlotArray
from aiokv.model.plan import Outcome

__all__ = ["Loads"]


@final
class Loads:
    """Completes loads and plans failed ones again."""

    __slots__ = ("_admission", "_replans", "_world")

    def __init__(self, world: World, *, admission: Admission) -> None:
        self._world = world
        self._admission = admission
        self._replans: deque[LeaseRecord] = deque()

    @property
    def waits_for_capacity(self) -> bool:
        """Whether a lease waits to be planned again; nobody may be admitted before it."""
        return bool(self._replans)

    def complete(self, transfer: Transfer, outcome: Outcome) -> Job:
        """The copies of a load have ended: register slice by slice, give every pin back, then tell who waits."""
        world = self._world
        targets = transfer.bound_targets
        if outcome is not Outcome.OK:
            world.inflight.hide(transfer)
        for stop in range(len(transfer), 0, -SLICE_BLOCKS):
            start = max(stop - SLICE_BLOCKS, 0)
            if outcome is Outcome.OK and world.may_register_gpu(transfer):
                world.gpu.register(targets[start:stop], transfer.digests(start, stop), transfer.group)
            if outcome is Outcome.LOST:
                self._quarantine(transfer, start=start, stop=stop)
            world.inflight.unmark(transfer, start=start, stop=stop)
            world.unpin_gpu(targets[start:stop][::-1])
            world.unpin_cpu(transfer.sources[start:stop][::-1])
            if start:
                yield
        world.inflight.remove(transfer)
        for lease_id in sorted(transfer.waiters):
            self._notify(world.leases.find(lease_id), transfer, outcome)

    def retry_replans(self) -> None:
        """Plan waiting leases again, oldest first, until one still lacks capacity."""
        while self._replans:
            record = self._replans[0]
            if record.state is LeaseState.HELD and not self._replan(record):
                return
            self._replans.popleft()

    def _quarantine(self, transfer: Transfer, *, start: int, stop: int) -> None:
        """Nobody knows what the copies still do: neither side is used again."""
        self._world.gpu.quarantine(transfer.bound_targets[start:stop])
        if self._world.cpu is not None:
            self._world.cpu.quarantine(transfer.sources[start:stop])

    def _notify(self, record: LeaseRecord, transfer: Transfer, outcome: Outcome) -> None:
        record.waiting.discard(transfer.transfer_id)
        if outcome is not Outcome.OK:
            failed = np.zeros_like(record.loaded[transfer.group])
            failed[transfer.positions[transfer.positions < len(failed)]] = True
            record.failed.append((transfer.group, failed & record.loaded[transfer.group]))
        if record.waiting:
            return
        if not record.failed:
            self._settle(record)
        elif self._replans or not self._replan(record):
            record.advance(LeaseEvent.REPLAN)
            self._replans.append(record)

    def _settle(self, record: LeaseRecord) -> None:
        record.advance(LeaseEvent.SETTLE)
        self._admission.attribute(record)
        self._world.outbox.settled.append(record.lease_id)

    def _replan(self, record: LeaseRecord) -> bool:
        """Plan a lease with failed loads again. False, and nothing changed, without capacity."""
        world = self._world
        failed = _failed_masks(record)
        residency = self._residency_without(record, failed)
        plan = plan_acquire(world.geometry, record.request, residency=residency, inflight=world.inflight)
        changes = [_PrefixChange(record, index=i, plan=group) for i, group in enumerate(plan.groups)]
        claims = sum(change.claims for change in changes)
        needed = claims + world.gpu.count_unpinned(np.concatenate([change.fresh_slots for change in changes]))
        gives_back_first = len(record.held_slots()) + record.unnamed_claims + needed > world.gpu.capacity
        spare = sum(self._count_private(change.dropped_slots) for change in changes) if gives_back_first else 0
        if needed > world.gpu.available + spare:
            return False
        self._pin_sources(plan, changes)
        if gives_back_first:
            self._drop(changes)
        world.gpu.claim(claims)
        self._rebind(record, plan, changes=changes)
        if not gives_back_first:
            self._drop(changes)
        self._revise(record, plan, failed=failed)
        return True

    def _count_private(self, slots: SlotArray) -> int:
        """How many slots become free or evictable when this lease lets go of them."""
        return int(np.count_nonzero(self._world.gpu.pins_of(slots) == 1))

    def _pin_sources(self, plan: AcquirePlan, changes: list[_PrefixChange]) -> None:
        self._world.gpu.pin(np.concatenate([change.fresh_slots for change in changes]))
        if self._world.cpu is not None:
            self._world.cpu.pin(plan.load_sources)

    def _drop(self, changes: list[_PrefixChange]) -> None:
        for change in changes:
            self._world.unpin_gpu(change.dropped_slots[::-1])

    def _rebind(self, record: LeaseRecord, plan: AcquirePlan, *, changes: list[_PrefixChange]) -> None:
        """Fill the prefix of every table anew; new slots are named before old ones can be, so none is bound again."""
        for index, (group, change) in enumerate(zip(plan.groups, changes, strict=True)):
            table = record.tables[index]
            table.take_before(change.old_blocks, start=0)
            table.put(group.hit_positions, group.hit_slots)
            if len(change.recomputed):
                record.claims.append(ClaimSegment(table=table, positions=change.recomputed))
            self._admission.start_loads(record, index=index, plan=group)
        self._admission.finish_naming(record)

    def _revise(self, record: LeaseRecord, plan: AcquirePlan, *, failed: list[BoolArray]) -> None:
        """Write down the new outcome and move on: load again, or be ready."""
        world = self._world
        spans = [covered_range(world.geometry, i, plan.length) for i in range(len(plan.groups))]
        for index, (group, span) in enumerate(zip(plan.groups, spans, strict=True)):
            arrived = (record.loaded[index] & ~failed[index])[: span.stop]
            record.loaded[index] = group.is_loaded | arrived
            record.registered[index] = plan.length // record.block_sizes[index]
        world.counters.load_failed_tokens += record.length - plan.length
        record.length = record.confirmed = record.publish_limit = plan.length
        record.delivered = attribute(
            world.geometry,
            num_tokens=record.request.prompt_tokens,
            length=plan.length,
            loads=record.loaded,
            covered=[(span.start, span.stop) for span in spans],
        )
        record.replans += 1
        record.failed.clear()
        if not record.waiting:
            self._settle(record)
        elif record.state is LeaseState.HELD:
            record.advance(LeaseEvent.LOAD)

    def _residency_without(self, record: LeaseRecord, failed: list[BoolArray]) -> Residency:
        """What is resident now, the failed keys taken as missing in the CPU tier; at most the old prefix."""
        world, request = self._world, record.request
        found = find_residency(
            world.geometry,
            record.keys,
            gpu=world.gpu,
            cpu=world.cpu_index if record.replans == 0 else None,
            num_tokens=request.prompt_tokens,
            align=request.align,
        )
        groups = tuple(_without(group, mask) for group, mask in zip(found.groups, failed, strict=True))
        length = longest_valid(
            world.geometry,
            num_tokens=request.prompt_tokens,
            present=[group.present for group in groups],
            align=request.align,
            limit=record.length,
        )
        return Residency(length=length, groups=groups)


@final
class _PrefixChange:
    """How one group's table changes below the old prefix when a lease is planned again."""

    __slots__ = ("dropped_slots", "fresh_slots", "loads", "old_blocks", "recomputed")

    def __init__(self, record: LeaseRecord, *, index: int, plan: GroupPlan) -> None:
        self.old_blocks = record.length // record.block_sizes[index]
        before = record.tables[index].view()[: self.old_blocks].copy()
        kept = before[plan.hit_positions] == plan.hit_slots
        self.fresh_slots = plan.hit_slots[~kept]
        before[plan.hit_positions[kept]] = NULL_SLOT
        self.dropped_slots = before[before != NULL_SLOT]
        first = self.old_blocks if plan.state_claims else plan.claim_start
        self.recomputed = np.arange(first, self.old_blocks, dtype=np.int64)
        self.loads = len(plan.load_positions)

    @property
    def claims(self) -> int:
        """New slots: load targets and positions that must be computed now."""
        return self.loads + len(self.recomputed)


def _failed_masks(record: LeaseRecord) -> list[BoolArray]:
    """Per group, over the blocks of the prefix: the copy of this position failed."""
    masks = [np.zeros_like(loaded) for loaded in record.loaded]
    for group, failed in record.failed:
        masks[group] |= failed
    return masks


def _without(group: GroupResidency, failed: BoolArray) -> GroupResidency:
    """The same residency, the failed positions gone from the CPU tier."""
    on_cpu = group.on_cpu.copy()
    known = min(len(on_cpu), len(failed))
    on_cpu[:known] &= ~failed[:known]
    return GroupResidency(on_gpu=group.on_gpu, gpu_slots=group.gpu_slots, on_cpu=on_cpu, cpu_slots=group.cpu_slots)
