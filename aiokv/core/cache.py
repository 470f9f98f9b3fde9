"""`CacheState`: the whole core behind one synchronous façade.

Every method is one atomic step of the host's loop. What the core wants done afterwards is in `outbox` (transfers to
submit, leases whose waiters must be told) and in slices (work that goes on in later turns). A host that steps itself
calls `run_slices()` once a turn, hands `outbox.take_submissions()` to its copier, and tells the end of each by
`complete`, or rank by rank by `report`.

Rules: the core never waits, never copies, and knows no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, final

import numpy as np

from aiokv.core.admission import Admission
from aiokv.core.audit import Audit, AuditClock, Snapshot, take_snapshot
from aiokv.core.audit_run import SLICE_SLOTS, AuditRun, take_audit
from aiokv.core.confirms import Confirms
from aiokv.core.counters import Closing, Counters
from aiokv.core.event_log import EventLog
from aiokv.core.fences import Fence
from aiokv.core.foresight import Foresight
from aiokv.core.forks import Forks
from aiokv.core.hints import HINT_QUOTA, Hints
from aiokv.core.inflight import Transfer, TransferEvent
from aiokv.core.lease_table import AcquireRequest, LeaseRecord, LeaseState
from aiokv.core.loads import Loads
from aiokv.core.meters import Meters
from aiokv.core.peek import Peek
from aiokv.core.placement import Placement
from aiokv.core.pool_values import PoolCounts
from aiokv.core.ranks import Ranks
from aiokv.core.resets import Resets
from aiokv.core.room import Room
from aiokv.core.slices import SLICE_BLOCKS
from aiokv.core.store_gate import StoreGate
from aiokv.core.store_policy import EAGER_STORES, StoreSettings, choose_strategy
from aiokv.core.store_queue import StoreQueue
from aiokv.core.truncations import Truncations
from aiokv.core.world import Outbox, World
from aiokv.errors import ConfigError
from aiokv.model.ids import TableArray, Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import DeferReason, Deferred, Found, Outcome
from aiokv.model.spec import CacheGeometry

__all__ = ["CacheState"]

_WARM_BUCKETS: Final = 65_536


@final
class CacheState:
    """Pools, leases and transfers of one model on one machine.

    `gpu_blocks` includes the null block; `cpu_blocks=0` means no CPU tier; `watermark` is the fraction of the GPU pool
    that admissions keep free while another lease is held; `stores` says what is copied to the CPU tier and when;
    sliced work does `slice_blocks` blocks at a time. Every block lies in parts on `world_size` ranks; a transfer has
    ended when all of them have copied theirs. The residence hints of one tenant hold `hint_quota` of a pool at most.
    """

    __slots__ = (
        "_admission", "_confirms", "_loads", "_ranks", "_resets", "_room", "_stores", "_world", "fences", "foresight",
        "forks", "hints", "meters", "peek", "placement", "store_gate", "truncations",
    )  # fmt: skip

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        gpu_blocks: int,
        cpu_blocks: int = 0,
        watermark: float = 0.0,
        slice_blocks: int = SLICE_BLOCKS,
        stores: StoreSettings = EAGER_STORES,
        world_size: int = 1,
        hint_quota: float = HINT_QUOTA,
    ) -> None:
        if gpu_blocks < 2 or cpu_blocks < 0 or not 0.0 <= watermark < 1.0:
            raise ConfigError(f"gpu_blocks={gpu_blocks}, cpu_blocks={cpu_blocks}, watermark={watermark} make no cache")
        self._world = World(
            geometry, gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks, watermark=watermark, slice_blocks=slice_blocks,
            world_size=world_size,
        )  # fmt: skip
        store_queue = StoreQueue(self._world)
        self._stores = choose_strategy(stores, world=self._world, queue=store_queue)
        self._admission = Admission(self._world, stores=self._stores)
        self._room = Room(self._world, admission=self._admission)
        self._loads = Loads(self._world, admission=self._admission)
        self._ranks = Ranks(self._world, loads=self._loads, stores=store_queue)
        self._confirms = Confirms(self._world, admission=self._admission, stores=self._stores)
        self.fences = self._world.fences
        self.foresight = Foresight(self._world)
        self.forks = Forks(self._world, admission=self._admission, loads=self._loads)
        self.truncations = Truncations(self._world, admission=self._admission)
        self.peek = Peek(self._world)
        self.placement = Placement(self._world)
        self.store_gate = StoreGate(self._world)
        self.hints = Hints(self._world, quota=hint_quota)
        self.meters = Meters(self._world)
        self._resets = Resets(self._world, hints=self.hints)

    @property
    def geometry(self) -> CacheGeometry:
        """The groups that are cached."""
        return self._world.geometry

    @property
    def outbox(self) -> Outbox:
        """What the host has to do now."""
        return self._world.outbox

    @property
    def events(self) -> EventLog:
        """Cache events since they were last taken, while the log is on."""
        return self._world.events

    @property
    def counters(self) -> Counters:
        """Everything that has been counted; read it, never write."""
        return self._world.counters

    @property
    def world_size(self) -> int:
        """How many ranks have to end a transfer."""
        return self._world.world_size

    @property
    def partly_reported(self) -> int:
        """Transfers that some ranks have reported and others have not."""
        return self._ranks.partly_reported

    @property
    def capacity_generation(self) -> int:
        """Changes whenever a deferred request is worth another try: capacity came back, or blocks it may share did."""
        return self._world.capacity_generation

    @property
    def has_work(self) -> bool:
        """Whether sliced work is left."""
        return bool(self._world.slices.jobs) or self._stores.is_due or self.hints.is_due

    @property
    def unfinished_transfers(self) -> int:
        """Transfers that are queued or running."""
        return len(self._world.inflight)

    @property
    def live_leases(self) -> int:
        """Leases that have not been released."""
        return len(self._world.leases)

    @property
    def is_sweeping(self) -> bool:
        """Whether slots of a tier that was reset are still to be given back."""
        return self._resets.is_sweeping

    @property
    def is_backend_lost(self) -> bool:
        """Whether no copy can be made any more: the CPU tier answers nothing and takes nothing."""
        return self._world.is_backend_lost

    @property
    def waits_for_capacity(self) -> bool:
        """Whether an admitted lease waits for slots after a failed load; it goes before every admission."""
        return self._loads.waits_for_capacity

    @property
    def has_replans(self) -> bool:
        """Whether `retry_replans` has anything to do."""
        return bool(self._loads.replans)

    def warm(self) -> None:
        """Touch the memory of the indexes, so that no admission pays for it later: seconds for ten million slots."""
        while self._world.gpu.warm(_WARM_BUCKETS):  # the tiers share a table
            pass

    def find_lease(self, lease_id: int) -> LeaseRecord | None:
        """The live lease with this id, if there is one."""
        return self._world.leases.find(lease_id) if lease_id in self._world.leases else None

    def leases(self) -> tuple[LeaseRecord, ...]:
        """All live leases, oldest first."""
        return tuple(self._world.leases)

    def transfers(self) -> tuple[Transfer, ...]:
        """All unfinished transfers, oldest first."""
        return tuple(self._world.inflight)

    def check(self, request: AcquireRequest) -> None:
        """`CapacityError` for what can never fit, whoever waits; `UsageError` for keys of another geometry."""
        self._admission.check(request)

    def try_acquire(self, request: AcquireRequest) -> LeaseRecord | Deferred:
        """Look up, check capacity, pin and claim, all or nothing. `CapacityError` for what can never fit."""
        self._admission.check(request)
        if self._loads.waits_for_capacity:
            return self.defer_queued()
        return self._admission.try_acquire(request)

    def defer_queued(self) -> Deferred:
        """The answer to whom somebody precedes."""
        return self._world.defer(DeferReason.QUEUED)

    def try_extend(self, record: LeaseRecord, tokens: int) -> int | Deferred:
        """Room for `tokens` more tokens: the lease's new room in tokens, or `Deferred` and nothing changed."""
        record.check_open()
        return self._room.try_extend(record, tokens)

    def check_extend(self, record: LeaseRecord, tokens: int) -> None:
        """`CapacityError` if room for `tokens` more tokens can never be had, whoever waits."""
        record.check_open()
        self._room.plan(record, tokens)

    def undo_extend(self, record: LeaseRecord, capacity: Sequence[int]) -> None:
        """Nobody took an extension: give back what each group has beyond `capacity[group]` tokens."""
        record.check_open()
        self._room.undo_extend(record, capacity)

    def block_ids(self, record: LeaseRecord, *, group: int, start: int = 0) -> TableArray:
        """The block table from position `start` on, read-only, until the lease is extended; finishes the naming."""
        record.check_open()
        self._admission.finish_naming(record)
        return record.tables[group].view(start)

    def name_slice(self, record: LeaseRecord) -> bool:
        """Name some of the claims of a lease, one slice, before other work; True while some are left."""
        self._admission.name_some(record, limit=self._world.slice_blocks)
        return len(record.claims) > 0

    def state_slots(self, record: LeaseRecord, *, group: int) -> TableArray:
        """A recurrent group's working slot and the one for the next captured state (0: none left)."""
        record.check_open()
        self._admission.finish_naming(record)
        return record.state_slots[group].view()

    def confirm(
        self,
        record: LeaseRecord,
        num_tokens: int,
        *,
        publish_to: int | None = None,
        states: Sequence[int] = (),
        after: Fence | None = None,
    ) -> None:
        """The KV of the first `num_tokens` tokens is written, as of the fence `after`."""
        record.check_open()
        self._confirms.confirm(record, num_tokens, publish_to=publish_to, states=states, after=after)

    def release(self, record: LeaseRecord, *, how: Closing = Closing.RELEASED, after: Fence | None = None) -> None:
        """Give everything back now, behind the fence `after`; what is not submitted yet is dropped. Idempotent."""
        if record.state is not LeaseState.RELEASED:
            record.fence(after)
            self._admission.release(record, how=how)

    def finish(self, record: LeaseRecord, *, how: Closing = Closing.FINISHED, after: Fence | None = None) -> None:
        """Flush what is to be registered and stored, then give all back as `release` does. Idempotent. A preempted
        request goes on with what `record.resumption()` asked for before."""
        if record.is_open:
            record.is_finishing = True
            record.fence(after)
            self._world.slices.start(self._confirms.finishing(record, how=how))

    def mark_submitted(self, transfer: Transfer) -> None:
        """The backend has taken this transfer; from now on only `complete` and `report` end it."""
        transfer.advance(TransferEvent.SUBMIT)
        self.counters.submitted_blocks[transfer.direction] += len(transfer)

    def complete(self, transfer_id: int, outcome: Outcome, *, corrupt: Collection[int] = ()) -> None:
        """All copies of a transfer have ended: this way on every rank that has not reported it, the worst one decides.
        `corrupt` as in `report`. `UsageError` where there is no such transfer or it has ended.
        """
        self._ranks.complete(transfer_id, outcome, corrupt=corrupt)

    def report(  # noqa: PLR0917  # as in the contract
        self, transfer_id: int, rank: int, outcome: Outcome, *, corrupt: Collection[int] = ()
    ) -> None:
        """One rank's copies of a submitted transfer have ended; the last rank ends it, the worst report decides how.

        With CORRUPT, which only a load can be, `corrupt` names the copies (places in the batch, from 0 on) whose block
        is not as it was stored: these leave the CPU tier at once. The same report again changes nothing. `UsageError`,
        and nothing has changed, for an unknown rank, transfer or copy, a transfer that has ended, and for something
        else than the rank reported before.
        """
        self._ranks.report(transfer_id, rank=rank, outcome=outcome, corrupt=corrupt)

    def lose_rank(self, rank: int) -> None:
        """A rank is gone: what it has not reported of submitted transfers is LOST, and no copy can be made any more."""
        self._ranks.lose_rank(rank)

    def missing_ranks(self, transfer: Transfer) -> tuple[int, ...]:
        """Which ranks have not reported a transfer, ascending."""
        return self._ranks.missing(transfer)

    def lose_backend(self) -> None:
        """No copy can be started any more: from now on the CPU tier answers nothing and takes nothing."""
        self._world.is_backend_lost = True

    def retry_replans(self) -> None:
        """Capacity has changed: plan leases again that wait for it after a failed load."""
        self._world.gpu.settle()
        self._loads.retry_replans()

    def run_slice(self) -> bool:
        """Run one slice of pending work; True while some is left."""
        self._world.gpu.settle()
        for worker in (self.hints, self._stores):
            if worker.is_due:
                self._world.slices.append(worker.work())
        self._world.slices.step()
        return self.has_work

    def run_slices(self) -> None:
        """Run all pending work, for hosts without an event loop to protect."""
        while self.run_slice():
            pass

    def reset(self, tiers: Sequence[Tier] = (Tier.GPU, Tier.CPU)) -> None:
        """Make the tiers answer nothing, at once. Their slots come back in slices."""
        self._resets.reset(tiers)

    def find_blocks(self, keys: BlockKeys, *, group: int, tier: Tier) -> Found:
        """Which full blocks of these tokens are findable in a tier, by block position; changes nothing."""
        self._world.check_keys(keys)
        pool, step = self._world.pool(tier), self.geometry.hashes_per_block(group)
        blocks = keys.num_blocks // step
        if pool is None:
            return Found(np.zeros(blocks, np.bool_), np.zeros(blocks, np.int64))
        return pool.find(keys.digests(step, 0, blocks), group)

    def snapshot(self) -> Snapshot:
        """The state as a frozen value, without counters and times. Looks at every slot: for tests and operators."""
        return take_snapshot(self._world)

    def audit(self, clock: AuditClock | None = None) -> Audit:
        """Who holds what, and which invariants are violated. Looks at every slot; raises nothing."""
        return take_audit(self._world, clock=clock)

    def audit_in_slices(self, *, slice_slots: int = SLICE_SLOTS, clock: AuditClock | None = None) -> AuditRun:
        """The same by hand: call its `run_slice` between other steps until it answers False, then read its `result`."""
        return AuditRun(self._world, slice_slots=slice_slots, clock=clock)

    def pools(self) -> dict[Tier, PoolCounts]:
        """Slots by state, per configured tier."""
        return {tier: pool.counts() for tier, pool in self._world.pools().items()}
