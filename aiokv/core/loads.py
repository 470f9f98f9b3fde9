"""Loads: what becomes of their targets, and what a lease does when one has failed.

Rules
- A target is registered only when its copy ended well in the current epoch (law 3).
- A failed load is planned again once, atomically: the failed keys count as missing in the CPU tier, the old pins are
  held, a failed target is bound again only if there is no other slot. A second failure takes the best prefix without
  loads.
- A load with corrupt blocks has failed as a whole, and nothing that it wrote is used. The corrupt blocks have left the
  CPU tier by then; the others are hits there as before.
- Nothing is looked up again for any other reason (law 1).
- The plan, its pins and its claims are one step; the claims are named in slices, load targets first. Until all have
  names the lease keeps its pins on what it dropped.
- A lease that waits for capacity holds no failed target; one behind another takes no more than it gives back. So leases
  that wait for each other's slots do not stop each other where one of them could go on. Where none could, and there
  is no other lease, the last of them gives all back, then the one before it: the first goes on.

State: leases whose loads have failed and that are to be planned again; those whose new plan waits for capacity. Oldest
first; one that was released meanwhile is passed over.
"""

from __future__ import annotations

from collections import deque
from typing import Final, final

import numpy as np

from aiokv.core.admission import Admission
from aiokv.core.attribution import find_sources
from aiokv.core.block_table import ClaimSegment
from aiokv.core.coverage import covered_range
from aiokv.core.failed_loads import failed_masks, failed_positions, missing_masks, worst_outcome
from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import FailedLoad, LeaseEvent, LeaseRecord, LeaseState
from aiokv.core.lookup import find_residency
from aiokv.core.planner import AcquirePlan, plan_acquire
from aiokv.core.prefix_changes import PrefixChange, plan_change
from aiokv.core.revocations import make_room
from aiokv.core.slices import Job
from aiokv.core.world import World
from aiokv.model.ids import BoolArray, SlotArray, Tier
from aiokv.model.plan import Outcome
from aiokv.model.spec import FullAttention, RecurrentState

__all__ = ["Loads"]

_BESIDE_A_PLAN: Final = 4
"""The part of a slice that is named in one hold with a plan, which may take most of a slice itself: a quarter."""

_NOTICE_COST: Final = 8
"""Telling one lease how its load ended takes as long as so many blocks of a slice do."""
_POSITIONS_PER_COST: Final = 64
"""So many blocks of a failed load take, for each lease that waited for it, as long as one block of a slice."""


@final
class Loads:
    """Completes loads and plans failed ones again."""

    __slots__ = ("_admission", "_failed", "_is_replanning", "_is_retrying", "_must_retry", "_world", "replans")

    def __init__(self, world: World, *, admission: Admission) -> None:
        self._world = world
        self._admission = admission
        self._failed: deque[LeaseRecord] = deque()
        self.replans: deque[LeaseRecord] = deque()
        """Those that wait for capacity, and some that have left: read it, never write."""
        self._is_replanning = False
        self._is_retrying = False
        self._must_retry = False

    @property
    def waits_for_capacity(self) -> bool:
        """Whether a lease waits to be planned again; nobody may be admitted before it."""
        waiting = (*self.replans, *self._failed)
        return bool(waiting) and any(record.state is not LeaseState.RELEASED for record in waiting)

    def complete(self, transfer: Transfer, outcome: Outcome) -> Job:
        """The copies of a load have ended: register slice by slice, give every pin back, then tell who waits."""
        world = self._world
        if outcome is not Outcome.OK:
            world.inflight.hide(transfer)
        yield from world.ending(transfer, outcome)
        yield from self._notifying(transfer, outcome)
        world.inflight.remove(transfer)
        if self._failed or self.replans:
            yield from self._replanning()

    def _notifying(self, transfer: Transfer, outcome: Outcome) -> Job:
        """Tell who waits for a load how it ended, oldest first and half a slice at a time: in the first hold copies
        end as well, in the last one a lease is planned again. Who has left meanwhile is passed over.
        """
        cost = _NOTICE_COST + (len(transfer) // _POSITIONS_PER_COST if outcome is not Outcome.OK else 0)
        at_once = max(self._world.slice_blocks // (2 * cost), 1)
        for count, lease_id in enumerate(sorted(transfer.waiters)):
            if count and count % at_once == 0:
                yield
            if lease_id in transfer.waiters:
                self._notify(self._world.leases.find(lease_id), transfer, outcome=outcome)

    def retry_replans(self) -> None:
        """Plan waiting leases again, oldest first, one a slice."""
        self._must_retry = bool(self.replans)
        if self._must_retry and not self._is_retrying:
            self._is_retrying = True
            self._world.slices.start(self._retrying())

    def _replanning(self) -> Job:
        """Plan leases again whose loads have just failed, one a slice; what is long to name, in slices of its own."""
        if self._is_replanning:
            return
        self._is_replanning = True
        while self._failed:
            record = self._failed[0]
            if self._is_long_to_name(record):
                yield from self._admission.naming_job(record)
                yield
            self._failed.popleft()
            if record.state is LeaseState.LOADING:
                if self._replan(record):
                    yield from self._naming(record)
                else:
                    record.advance(LeaseEvent.REPLAN)
                    self.replans.append(record)
                    self._drop_failed(record)
            if self._failed:
                yield
        self._is_replanning = False
        if self._is_standstill():
            self.retry_replans()

    def _retrying(self) -> Job:
        """Go through all that wait; once more if capacity changed meanwhile, so that no change is missed."""
        while self._must_retry:
            self._must_retry = False
            for record in tuple(self.replans):
                if record.state is not LeaseState.HELD:
                    self.replans.remove(record)
                elif self._replan(record):
                    self.replans.remove(record)
                    yield from self._naming(record)
                yield
            self._must_retry = self._must_retry or self._break_standstill()
        self._is_retrying = False

    def _naming(self, record: LeaseRecord) -> Job:
        """Name what a new plan claims: in this slice, unless that is long."""
        if self._is_long_to_name(record):
            yield
        yield from self._admission.naming_job(record)

    def _is_long_to_name(self, record: LeaseRecord) -> bool:
        return record.unnamed_claims > self._world.slice_blocks // _BESIDE_A_PLAN

    def _is_standstill(self) -> bool:
        """Whether all leases that there are wait for each other's slots: none gives any back by itself."""
        waiting = sum(record.state is LeaseState.HELD for record in self.replans)
        return waiting > 1 and waiting == len(self._world.leases)

    def _break_standstill(self) -> bool:
        """The one that came last gives back what it holds, and waits for all of it. False if nobody needs to or can."""
        if not self._is_standstill():
            return False
        _, *others = (record for record in self.replans if record.state is LeaseState.HELD)
        last = next((record for record in reversed(others) if not record.is_bare), None)
        if last is None:
            return False
        self._admission.finish_naming(last)
        for table in last.tables:
            self._world.take_back(last, table.take_range(0, len(table))[::-1])
        last.is_bare = True
        return True

    def _is_first(self, record: LeaseRecord) -> bool:
        """Whether no other lease has waited for capacity longer."""
        return next((r for r in self.replans if r.state is LeaseState.HELD), record) is record

    def _notify(self, record: LeaseRecord, transfer: Transfer, *, outcome: Outcome) -> None:
        record.waiting.discard(transfer.transfer_id)
        record.loaded_at = transfer.ended
        if outcome is not Outcome.OK:
            positions = failed_positions(record, transfer)
            record.failed.append(FailedLoad(group=transfer.group, positions=positions, outcome=outcome))
        if record.waiting:
            return
        if record.failed:
            self._failed.append(record)
        else:
            self._settle(record)

    def _settle(self, record: LeaseRecord) -> None:
        record.advance(LeaseEvent.SETTLE)
        self._admission.attribute(record)
        self._world.outbox.settled.append(record.lease_id)

    def _replan(self, record: LeaseRecord) -> bool:
        """Plan a lease with failed loads again, its claims still to be named.

        False, and nothing but names has changed, without capacity.
        """
        world = self._world
        self._admission.finish_naming(record)
        failed = failed_masks(record)
        residency = find_residency(
            world.geometry,
            record.keys,
            gpu=world.gpu,
            cpu=world.usable_cpu if record.replans == 0 else None,
            num_tokens=record.request.prompt_tokens,
            align=record.request.align,
            longest=record.length,
            without=missing_masks(record),
        )
        plan = plan_acquire(
            world.geometry,
            record.request,
            residency=residency,
            inflight=world.inflight,
            capacity=world.usable_gpu_slots,
        )
        changes = [
            plan_change(record, index=i, plan=group, room=self._room_after(record, plan, index=i))
            for i, group in enumerate(plan.groups)
        ]
        needed = self._count_needed(changes)
        spare = sum(world.count_last_pins(change.dropped_slots) for change in changes)
        if not self._make_room(record, changes, lacking=needed - spare):
            return False
        dropped = np.concatenate([change.dropped_slots[::-1] for change in changes])
        if needed <= world.gpu.available:  # old slots are free to be named when the new ones have names
            self._take(record, plan, changes=changes)
            self._put_off(record, dropped)
        else:  # there are no others
            world.take_back(record, dropped)
            self._take(record, plan, changes=changes)
        self._revise(record, plan, failed=failed)
        return True

    def _room_after(self, record: LeaseRecord, plan: AcquirePlan, *, index: int) -> int:
        """Tokens that a group has room for then; a first chunk is counted anew from the shorter prefix on."""
        room = record.capacity_tokens[index]
        spec = self._world.geometry.groups[index]
        if record.request.first_chunk is None or isinstance(spec, FullAttention | RecurrentState):
            return room
        return max(plan.groups[index].capacity_tokens, room - (record.length - plan.length))

    def _make_room(self, record: LeaseRecord, changes: list[PrefixChange], *, lacking: int) -> bool:
        """Have `lacking` slots beside those that the changes free; behind another lease, only those that hints hold
        among what the changes drop.
        """
        world, is_first = self._world, self._is_first(record)
        lacking -= world.gpu.available if is_first else 0
        if lacking <= 0:
            return True
        fresh = np.concatenate([change.fresh_slots for change in changes])
        dropped = np.concatenate([change.dropped_slots for change in changes])
        if is_first:
            return make_room(world, lacking, kept=fresh, leaving=dropped)
        others = np.setdiff1d(world.hints.held[Tier.GPU].slots, dropped)
        return make_room(world, lacking, kept=np.concatenate((fresh, others)), leaving=dropped)

    def _count_needed(self, changes: list[PrefixChange]) -> int:
        """By how much the changes lower what is available, before anything is given back."""
        fresh = np.concatenate([change.fresh_slots for change in changes])
        return sum(change.claims for change in changes) + self._world.gpu.count_unpinned(fresh)

    def _take(self, record: LeaseRecord, plan: AcquirePlan, *, changes: list[PrefixChange]) -> None:
        """Pin and claim what the new prefix has and the old one had not; the tables are bound anew."""
        world = self._world
        world.pin_hits(np.concatenate([change.fresh_slots for change in changes]))
        world.pin_sources(plan.load_sources)
        world.gpu.claim(sum(change.claims for change in changes))
        self._rebind(record, plan, changes=changes)

    def _put_off(self, record: LeaseRecord, dropped: SlotArray) -> None:
        """Let go of what has left the tables once nothing is left to be named."""
        record.put_off(dropped)
        if not record.claims:
            self._world.take_back(record, record.take_leaving())

    def _drop_failed(self, record: LeaseRecord) -> None:
        """Let go of targets that hold nothing: a lease that waits must not keep them from whom it waits for."""
        for table, failed in zip(record.tables, failed_masks(record), strict=True):
            self._world.take_back(record, table.take(np.flatnonzero(failed).astype(np.int64, copy=False))[::-1])

    def _rebind(self, record: LeaseRecord, plan: AcquirePlan, *, changes: list[PrefixChange]) -> None:
        """Fill the prefix of every table anew."""
        for index, (group, change) in enumerate(zip(plan.groups, changes, strict=True)):
            table = record.tables[index]
            table.take_range(0, change.old_blocks)
            table.cut(max(change.stop, change.old_blocks))
            record.capacity_tokens[index] = change.room
            table.put(group.hit_positions, group.hit_slots)
            if len(change.recomputed):
                record.claims.append(ClaimSegment(table=table, positions=change.recomputed))
            self._admission.start_loads(record, index=index, plan=group)

    def _revise(self, record: LeaseRecord, plan: AcquirePlan, *, failed: list[BoolArray]) -> None:
        """Write down the new outcome and move on: load again, or be ready. Those who come after may be let in."""
        world = self._world
        world.capacity_generation += 1
        spans = [covered_range(world.geometry, i, plan.length) for i in range(len(plan.groups))]
        for index, (group, span) in enumerate(zip(plan.groups, spans, strict=True)):
            arrived = (record.loaded[index] & ~failed[index])[: span.stop]
            record.loaded[index] = group.is_loaded | arrived
            record.registered[index] = plan.length // record.block_sizes[index]
        world.counters.load_failed_tokens[worst_outcome(record)] += record.length - plan.length
        record.length = record.confirmed = record.publish_limit = plan.length
        record.delivered = find_sources(
            world.geometry,
            num_tokens=record.request.prompt_tokens,
            length=plan.length,
            loads=record.loaded,
            covered=spans,
        ).hit
        record.replans += 1
        record.loaded_at = None
        record.is_bare = False
        record.failed.clear()
        if not record.waiting:
            self._settle(record)
        elif record.state is LeaseState.HELD:
            record.advance(LeaseEvent.LOAD)
