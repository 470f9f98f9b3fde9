"""Admission and release: the one place where a request's pins and claims come to be, and the one where they end.

Rules
- Capacity is checked before anything changes (law 2); the check counts claims and the evictable slots a hit would pin.
- Sources are pinned before any claim is named, so that naming never evicts what the plan relies on (law 1).
- Claims are named in slices, see `naming.py`; load targets go first, so that copies start early.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np

from aiokv.core.block_names import KeyedBlocks
from aiokv.core.block_table import ClaimSegment
from aiokv.core.counters import Closing, LookupResult
from aiokv.core.foresight import find_guesses, remember
from aiokv.core.inflight import Transfer, TransferEvent, TransferState
from aiokv.core.lease_table import AcquireRequest, LeaseEvent, LeaseRecord, LeaseState
from aiokv.core.lookup import Residency, find_residency
from aiokv.core.naming import Naming
from aiokv.core.planner import AcquirePlan, GroupPlan, empty_pool_claims, most_claims, plan_acquire
from aiokv.core.revocations import make_room, plan_room
from aiokv.core.slices import Job
from aiokv.core.store_policy import Strategy
from aiokv.core.world import World
from aiokv.errors import CapacityError
from aiokv.model.ids import Direction
from aiokv.model.plan import DeferReason, Deferred, Outcome
from aiokv.model.spec import CacheGeometry

__all__ = ["Admission"]

_FLUSHED: Final = (Closing.FINISHED, Closing.PREEMPTED)
"""Endings that keep what the lease has queued to be stored."""


@final
class Admission:
    """Lets requests in and out."""

    __slots__ = ("_naming", "_stores", "_world")

    def __init__(self, world: World, *, stores: Strategy) -> None:
        self._world = world
        self._naming = Naming(world)
        self._stores = stores

    def check(self, request: AcquireRequest) -> None:
        """`CapacityError` for what can never fit, `UsageError` for keys of another geometry."""
        world = self._world
        world.check_keys(request.keys)
        if most_claims(world.geometry, request) <= world.usable_gpu_slots:
            return
        needed = empty_pool_claims(world.geometry, request)
        if needed > world.usable_gpu_slots:
            raise CapacityError(request.request_id, needed=needed, capacity=world.usable_gpu_slots)

    def try_acquire(self, request: AcquireRequest) -> LeaseRecord | Deferred:
        """Look up, check capacity, pin and claim in one step; `check` comes before."""
        world = self._world
        residency = find_residency(
            world.geometry,
            request.keys,
            gpu=world.gpu,
            cpu=world.usable_cpu,
            num_tokens=request.prompt_tokens,
            align=request.align,
            guesses=find_guesses(world, request.keys),
            joint=world,
        )
        return self.try_admit(request, residency)

    def try_admit(self, request: AcquireRequest, residency: Residency) -> LeaseRecord | Deferred:
        """Admit a request with what it is to hit, found in this same step."""
        world = self._world
        plan = plan_acquire(
            world.geometry,
            request,
            residency=residency,
            inflight=world.inflight,
            capacity=world.usable_gpu_slots,
        )
        refusal = self._make_room(plan)
        if refusal is not None:
            remember(world, request.keys, residency=residency)
            world.counters.lookups[LookupResult.DEFERRED] += 1
            return world.defer(refusal)
        return self._admit(request, plan)

    def name_some(self, record: LeaseRecord, *, limit: int) -> int:
        """Name up to `limit` claims of a lease; returns how many were looked at."""
        return self._naming.name_some(record, limit=limit)

    def finish_naming(self, record: LeaseRecord) -> None:
        """Name every claim of a lease now."""
        while record.claims:
            self.name_some(record, limit=self._world.slice_blocks)

    def is_long_to_release(self, record: LeaseRecord) -> bool:
        """Whether the release of a lease should be a slice of its own. With unfinished loads it leaves at once."""
        return record.state is LeaseState.READY and sum(map(len, record.tables)) > self._world.slice_blocks

    def release(self, record: LeaseRecord, *, how: Closing) -> None:
        """Drop every pin and claim of a lease.

        Running copies keep their own; queued ones that nobody waits for are dropped.
        """
        world = self._world
        record.advance(LeaseEvent.RELEASE)
        if record.claims:
            self._naming.finish_for_others(record)
            world.unclaim_gpu(record.unnamed_claims)
            record.claims.clear()
        self.attribute(record)
        unwanted = record.waiting if how in _FLUSHED else record.waiting | record.storing
        for transfer_id in sorted(unwanted):
            self._leave(world.inflight.find(transfer_id), lease_id=record.lease_id)
        record.waiting.clear()
        if len(record.leaving):
            world.give_back(record, record.take_leaving())
        world.give_back_all(record, record.held_slots())
        world.capacity_generation += 1  # also for one that held nothing: it may have stood before others
        world.leases.remove(record.lease_id)
        world.counters.leases_closed[how] += 1

    def attribute(self, record: LeaseRecord) -> None:
        """Count the prompt of an admitted request by source, once (law 7)."""
        if not record.attributed:
            record.attributed = True
            tokens = self._world.geometry.hash_block_size
            self._world.counters.count_delivered(record.delivered, phase=record.request.phase, block_tokens=tokens)

    def _make_room(self, plan: AcquirePlan) -> DeferReason | None:
        """Have room for a plan, from residence hints if need be; why there is none, and nothing changed, else."""
        world, hits = self._world, plan.hit_slots
        watermark = world.watermark_blocks if len(world.leases) else 0
        lacking = plan.claims - world.gpu.available
        if lacking + len(hits) + watermark <= 0:  # whoever pins them
            return None
        lacking += world.gpu.count_unpinned(hits)
        if lacking + watermark <= 0 or make_room(world, lacking + watermark, kept=hits):
            return None
        is_enough = plan_room(world, lacking, kept=hits).is_enough
        return DeferReason.WATERMARK if is_enough else DeferReason.CAPACITY

    def _admit(self, request: AcquireRequest, plan: AcquirePlan) -> LeaseRecord:
        world = self._world
        record = _new_record(world, request, plan=plan)
        if len(plan.hit_slots):
            world.pin_hits(plan.hit_slots)
        if plan.hit.cpu_tokens:
            world.pin_sources(plan.load_sources)
        world.gpu.claim(plan.claims)
        world.leases.add(record)
        for index, group in enumerate(plan.groups):
            if len(group.hit_positions):
                record.tables[index].put(group.hit_positions, group.hit_slots)
            self.start_loads(record, index=index, plan=group)
        is_short = plan.claims <= world.slice_blocks and not record.claims
        claim_compute = self._name_compute if is_short else self._claim_compute
        for index, group in enumerate(plan.groups):
            if group.claim_stop > group.claim_start:
                claim_compute(record, index=index, plan=group)
            if group.state_claims:
                positions = np.arange(group.state_claims, dtype=np.int64)
                record.claims.append(ClaimSegment(table=record.state_slots[index], positions=positions))
        self._count(record, plan)
        record.advance(LeaseEvent.LOAD if record.waiting else LeaseEvent.SETTLE)
        if not record.waiting:
            self.attribute(record)
        if record.claims:
            self.start_naming(record)
        self._stores.admitted(record, plan)
        return record

    def start_loads(self, record: LeaseRecord, *, index: int, plan: GroupPlan) -> None:
        """Queue the loads of one group and join those that are under way.

        Sources are pinned and targets claimed already.
        """
        world = self._world
        if len(plan.load_positions):
            transfer = Transfer(
                transfer_id=world.inflight.next_id(),
                direction=Direction.LOAD,
                names=KeyedBlocks(keys=record.keys, group=index, positions=plan.load_positions),
                sources=plan.load_sources,
                targets=None,
                owner=record.lease_id,
                epochs=record.epochs,
                waiters={record.lease_id},
            )
            world.inflight.add(transfer)
            record.waiting.add(transfer.transfer_id)
            segment = ClaimSegment(
                table=record.tables[index], positions=plan.load_positions, transfer_id=transfer.transfer_id
            )
            record.claims.append(segment)
        if len(plan.join_positions):
            self._naming.join(record, index=index, plan=plan)

    def _claim_compute(self, record: LeaseRecord, *, index: int, plan: GroupPlan) -> None:
        positions = np.arange(plan.claim_start, plan.claim_stop)
        record.claims.append(ClaimSegment(table=record.tables[index], positions=positions))

    def _name_compute(self, record: LeaseRecord, *, index: int, plan: GroupPlan) -> None:
        """The same, named at once, as far as one scan of the eviction queue goes."""
        slots = self._world.name_gpu(plan.claim_stop - plan.claim_start)
        named = plan.claim_start + len(slots)
        record.tables[index].put_run(plan.claim_start, slots)
        if named < plan.claim_stop:
            record.claims.append(ClaimSegment(table=record.tables[index], positions=np.arange(named, plan.claim_stop)))

    def start_naming(self, record: LeaseRecord) -> None:
        """Name the claims of a lease: a slice of them now, what is left in later slices."""
        self.name_some(record, limit=self._world.slice_blocks)
        if record.claims:
            self._world.slices.append(self.naming_job(record))

    def naming_job(self, record: LeaseRecord) -> Job:
        """Name the claims of a lease, a slice at a time."""
        while record.claims and record.state is not LeaseState.RELEASED:
            self.name_some(record, limit=self._world.slice_blocks)
            if record.claims:
                yield

    def _leave(self, transfer: Transfer, *, lease_id: int) -> None:
        self._world.inflight.leave(transfer, lease_id)
        if not transfer.waiters and transfer.state is TransferState.QUEUED:
            self.drop(transfer)

    def drop(self, transfer: Transfer) -> None:
        """Forget a queued transfer: its pins go back and nothing is copied."""
        world = self._world
        transfer.advance(TransferEvent.DROP)
        world.counters.transferred_blocks[transfer.direction, Outcome.DROPPED] += len(transfer)
        world.end_copies(transfer, start=0, stop=len(transfer))
        world.inflight.remove(transfer)
        if transfer in world.outbox.submissions:
            world.outbox.submissions.remove(transfer)

    def _count(self, record: LeaseRecord, plan: AcquirePlan) -> None:
        counters = self._world.counters
        counters.leases_opened += 1
        counters.record_switches(plan.switches)
        counters.lookups[_lookup_result(self._world.geometry, record)] += 1


def _lookup_result(geometry: CacheGeometry, record: LeaseRecord) -> LookupResult:
    """A HIT is the longest prefix that there can be: up to the last token, which is always computed."""
    if not record.length:
        return LookupResult.MISS
    longest = record.request.prompt_tokens - 1
    longest -= longest % geometry.alignment(record.request.align)
    return LookupResult.HIT if record.length >= longest else LookupResult.PARTIAL


def _new_record(world: World, request: AcquireRequest, *, plan: AcquirePlan) -> LeaseRecord:
    return LeaseRecord(
        world.leases.next_id(),
        request,
        plan=plan,
        block_sizes=world.geometry.block_sizes,
        epochs=world.epochs,
        watchers=world.leases.watchers,
    )
