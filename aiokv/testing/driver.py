"""`Driver`: the way from the machine's steps to a cache. This one takes every step on a `CacheState` itself.

Whoever embeds aiokv overrides the steps that their own code takes. A driver takes a step and reports what came of it;
it checks nothing: what slots really hold, and whether all invariants are kept, is the machine's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol

from aiokv.core.cache import CacheState
from aiokv.core.counters import Closing
from aiokv.core.fences import Fence
from aiokv.core.hint_table import HintRecord
from aiokv.core.hints import HINT_QUOTA
from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import AcquireRequest, LeaseRecord
from aiokv.core.slices import SLICE_BLOCKS
from aiokv.core.store_policy import EAGER_STORES, StoreSettings
from aiokv.model.events import CacheEvent
from aiokv.model.ids import TableArray, Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import Declined, Deferred, Outcome
from aiokv.model.spec import CacheGeometry

__all__ = ["Driver", "Setup", "Step", "WaitingDriver", "Witness"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The cache that a run is about, as drawn."""

    geometry: CacheGeometry
    gpu_blocks: int
    cpu_blocks: int = 0
    watermark: float = 0.0
    slice_blocks: int = SLICE_BLOCKS
    stores: StoreSettings = EAGER_STORES
    world_size: int = 1
    hint_quota: float = HINT_QUOTA


class Step(Enum):
    """Steps that not every driver can take."""

    UNDO_EXTEND = "take back an extension"
    LOSE = "lose a copy"
    REPORT = "report for one rank"
    SPOIL = "find blocks corrupt"


class Witness(Protocol):
    """Who must be told of what happens between two steps. A driver that takes single steps has nothing to tell."""

    def copy_started(self, transfer: Transfer) -> None:
        """A backend has taken this transfer: call it before anything else happens to the cache."""
        ...

    def look(self) -> None:
        """The cache may have changed: a lease may be new, ready or gone."""
        ...


class Driver:
    """Drives one cache, one step a call. All methods raise what the cache raises."""

    steps: ClassVar[frozenset[Step]] = frozenset(Step)
    """Which of the steps that are not for everybody it takes."""

    def __init__(self, setup: Setup, witness: Witness) -> None:
        self.setup = setup
        self.witness = witness
        self.cache = self.open()

    def open(self) -> CacheState:
        """Make the cache. Called once, before every other step."""
        setup = self.setup
        cache = CacheState(
            setup.geometry,
            gpu_blocks=setup.gpu_blocks,
            cpu_blocks=setup.cpu_blocks,
            watermark=setup.watermark,
            slice_blocks=setup.slice_blocks,
            stores=setup.stores,
            world_size=setup.world_size,
            hint_quota=setup.hint_quota,
        )
        cache.events.is_on = True
        return cache

    def close(self) -> None:
        """The run is over, well or not."""

    def has_lease(self, record: LeaseRecord) -> bool:
        """Whether steps can be taken with this lease: it is not somebody else's."""
        return True

    @property
    def waiting(self) -> int:
        """How many requests stand in line."""
        return 0

    # Requests.

    def try_acquire(self, request: AcquireRequest) -> LeaseRecord | Deferred:
        """Admit a request now or not at all."""
        return self.cache.try_acquire(request)

    def fork(self, record: LeaseRecord, *, request_id: str, num_tokens: int) -> LeaseRecord | Deferred:
        """A second lease over the first tokens of a lease, now or not at all."""
        request = self.cache.forks.plan(record, request_id=request_id, num_tokens=num_tokens)
        return self.cache.forks.try_fork(record, request)

    def preempt(self, record: LeaseRecord) -> AcquireRequest:
        """The lease gives its blocks back; the answer asks for all its tokens again."""
        request = record.resumption()
        self.cache.finish(record, how=Closing.PREEMPTED)
        return request

    def try_resume(self, request: AcquireRequest) -> LeaseRecord | Deferred:
        """Admit what was preempted, now or not at all."""
        return self.cache.try_acquire(request)

    def append(self, record: LeaseRecord, token_ids: Sequence[int]) -> None:
        """Tokens generated since. The keys become the lease's own before they grow."""
        if record.keys is record.request.keys:
            record.keys = record.keys.copy()
        record.keys.append(token_ids)

    def try_extend(self, record: LeaseRecord, tokens: int) -> int | Deferred:
        """Room for more tokens, now or not at all."""
        return self.cache.try_extend(record, tokens)

    def undo_extend(self, record: LeaseRecord, capacity: Sequence[int]) -> None:
        """Nobody took the extension that came after `capacity`."""
        self.cache.undo_extend(record, capacity)

    def truncate(self, record: LeaseRecord, num_tokens: int) -> int | Deferred:
        """Forget the tokens from `num_tokens` on."""
        return self.cache.truncations.truncate(record, num_tokens)

    def confirm(
        self,
        record: LeaseRecord,
        num_tokens: int,
        *,
        publish_to: int | None = None,
        states: Sequence[int] = (),
        after: Fence | None = None,
    ) -> None:
        """The KV of the first tokens is written."""
        self.cache.confirm(record, num_tokens, publish_to=publish_to, states=states, after=after)

    def block_ids(self, record: LeaseRecord, *, group: int) -> TableArray:
        """The block table of one group; finishes the naming."""
        return self.cache.block_ids(record, group=group)

    def state_slots(self, record: LeaseRecord, *, group: int) -> tuple[int, int]:
        """A recurrent group's working slot and the one for the next captured state (0: none left)."""
        working, capture = self.cache.state_slots(record, group=group).tolist()
        return working, capture

    def release(self, record: LeaseRecord) -> None:
        """The request leaves."""
        self.cache.release(record)

    def finish(self, record: LeaseRecord) -> None:
        """The request is complete."""
        self.cache.finish(record)

    # Residence hints.

    def keep(self, keys: BlockKeys, *, tenant: str, tier: Tier, align: int = 1) -> HintRecord | Declined:
        """Keep a prefix in a tier."""
        return self.cache.hints.keep(keys, tenant=tenant, tier=tier, align=align)

    def update_hint(self, hint: HintRecord, keys: BlockKeys) -> int | Declined:
        """Keep another prefix instead."""
        return self.cache.hints.update(hint, keys)

    def revoke_hint(self, hint: HintRecord) -> None:
        """An operator takes everything back from a hint."""
        self.cache.hints.revoke(hint)

    def release_hint(self, hint: HintRecord) -> None:
        """The owner of a hint gives it back."""
        self.cache.hints.release(hint)

    # Copies.

    def endable(self, running: Sequence[Transfer]) -> Sequence[Transfer]:
        """Which of the running copies can be the next to end, oldest first; any of them, unless streams are kept."""
        return running

    def take_submissions(self) -> list[Transfer]:
        """Transfers that are to be started step by step; none where a runtime starts them."""
        self.cache.outbox.take_settled()
        return self.cache.outbox.take_submissions()

    def submit(self, transfer: Transfer) -> None:
        """Start a transfer that was taken."""
        self.cache.mark_submitted(transfer)

    def report(self, transfer: Transfer, rank: int, *, outcome: Outcome) -> None:
        """One rank's part of a copy has ended."""
        self.cache.report(transfer.transfer_id, rank, outcome)

    def report_corrupt(self, transfer: Transfer, rank: int, *, copies: Collection[int]) -> None:
        """One rank's part of a load has ended, and the sources of these copies are corrupt there."""
        self.cache.report(transfer.transfer_id, rank, Outcome.CORRUPT, corrupt=copies)

    def complete(self, transfer: Transfer, outcome: Outcome) -> None:
        """A copy has ended, this way on every rank that has not reported it."""
        self.cache.complete(transfer.transfer_id, outcome)

    # Turns and tiers.

    def run_slice(self) -> None:
        """One slice of the work that is left."""
        self.cache.run_slice()

    def retry_replans(self) -> None:
        """Plan leases again that wait for capacity after a failed load."""
        self.cache.retry_replans()

    def progress(self) -> None:
        """Blocks were placed or evicted by hand: carry out what follows from it."""

    def reset(self, tiers: Sequence[Tier]) -> None:
        """Make tiers answer nothing."""
        self.cache.reset(tiers)

    def take_events(self) -> list[CacheEvent]:
        """All cache events since they were last taken, in order."""
        return self.cache.events.take()


class WaitingDriver(Driver, ABC):
    """A driver whose requests can also stand in line. What they are granted later, the witness sees."""

    @abstractmethod
    def turn(self) -> None:
        """Let the world go on a little."""

    @abstractmethod
    def wait_acquire(self, request: AcquireRequest, *, timeout: float | None) -> None:
        """A request stands in line."""

    @abstractmethod
    def wait_resume(self, request: AcquireRequest, *, timeout: float | None) -> None:
        """A preempted request stands in line."""

    @abstractmethod
    def wait_extend(self, record: LeaseRecord, tokens: int, *, timeout: float | None) -> None:
        """A lease stands in line for more room."""

    @abstractmethod
    def give_up(self, pick: int) -> None:
        """One of those who wait is cancelled: for capacity, for loads, or already granted in this turn."""
