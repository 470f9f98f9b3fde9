"""Who holds what: frozen pictures of a cache, for tests, operators and the audit. Changes nothing.

Times are numbers of the host's own clock, as it wrote them down; the core knows none. `None` where it wrote none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from aiokv.core.hint_table import HintRecord
from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import LeaseRecord
from aiokv.core.pool import PoolCounts
from aiokv.core.world import World
from aiokv.model.ids import Tier

__all__ = [
    "Audit", "AuditClock", "HintView", "HolderKind", "Holding", "LeaseView", "Snapshot", "TransferView",
    "take_snapshot", "view_hint", "view_lease",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """One live lease. `since` and `is_overdue` belong to audits: a snapshot has no times."""

    lease_id: int
    request_id: str
    state: str
    prefix_tokens: int
    gpu_blocks: int
    unnamed_claims: int
    since: float | None = None
    """When it was admitted."""
    is_overdue: bool = False
    """Older than the host allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferView:
    """One unfinished transfer."""

    transfer_id: int
    direction: str
    group: str
    state: str
    blocks: int
    waiters: int
    reported_by: tuple[int, ...]
    """Ranks that have reported it, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintView:
    """One residence hint that holds blocks, or waits for some; revoked ones are about to give theirs back."""

    hint_id: int
    tenant: str
    tier: Tier
    state: str
    held_tokens: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole state, without counters and times: equal states print equal.

    `gpu_order` and `cpu_order` are fingerprints of what is findable, of pins and of the eviction order.
    """

    gpu: PoolCounts
    cpu: PoolCounts | None
    gpu_order: str
    cpu_order: str
    leases: tuple[LeaseView, ...]
    transfers: tuple[TransferView, ...]
    hints: tuple[HintView, ...]


class HolderKind(Enum):
    """What can hold slots: a lease, a transfer by its direction, or a residence hint."""

    LEASE = "lease"
    LOAD = "load"
    STORE = "store"
    HINT = "hint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The pins, or the claims without a slot, that one holder has in one tier."""

    kind: HolderKind
    holder_id: int
    """Of the lease, the transfer or the hint."""
    request_id: str
    """Whose lease it is, or who asked for the copies; empty once that one has left."""
    tier: Tier
    blocks: int
    since: float | None = None
    """When the lease was admitted or the transfer came to the host."""
    waiters: tuple[str, ...] = ()
    """The requests that wait for a transfer; without any it is an orphan, which its holder has left behind."""
    tenant: str = ""
    """Whose hint it is; a hint is of no request."""

    @property
    def holder(self) -> str:
        """The holder in words."""
        return f"{self.kind.value} {self.holder_id}" + (f" of {self.tenant}" if self.tenant else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Who holds what, and which invariants do not hold."""

    leases: tuple[LeaseView, ...]
    pins: tuple[Holding, ...]
    reservations: tuple[Holding, ...]
    violations: tuple[str, ...]
    taken_at: float | None = None
    """When the audit began."""
    hints: tuple[HintView, ...] = ()

    @property
    def overdue(self) -> tuple[LeaseView, ...]:
        """The leases that are older than the host allows."""
        return tuple(lease for lease in self.leases if lease.is_overdue)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditClock:
    """When the audit began, and how old a lease may be then; by the host's clock, `None` where it told none."""

    now: float | None = None
    lease_age_limit: float | None = None

    def is_overdue(self, since: float | None) -> bool:
        """Whether a lease admitted `since` then is overdue."""
        if self.now is None or self.lease_age_limit is None or since is None:
            return False
        return self.now - since > self.lease_age_limit


def take_snapshot(world: World) -> Snapshot:
    """The state as one frozen value."""
    return Snapshot(
        gpu=world.gpu.counts(),
        cpu=world.cpu.counts() if world.cpu is not None else None,
        gpu_order=world.gpu.fingerprint(),
        cpu_order=world.cpu.fingerprint() if world.cpu is not None else "",
        leases=tuple(
            view_lease(record, gpu_blocks=len(record.held_slots()) + len(record.leaving)) for record in world.leases
        ),
        transfers=tuple(_view_transfer(world, transfer) for transfer in world.inflight),
        hints=tuple(view_hint(record) for record in world.hints),
    )


def view_hint(record: HintRecord) -> HintView:
    """One residence hint as a value."""
    return HintView(
        hint_id=record.hint_id,
        tenant=record.tenant,
        tier=record.tier,
        state=record.state.value,
        held_tokens=record.length,
        blocks=len(record.slots),
    )


def view_lease(
    record: LeaseRecord, *, gpu_blocks: int, since: float | None = None, is_overdue: bool = False
) -> LeaseView:
    """One lease as a value."""
    return LeaseView(
        lease_id=record.lease_id,
        request_id=record.request.request_id,
        state=record.state.value,
        prefix_tokens=record.length,
        gpu_blocks=gpu_blocks,
        unnamed_claims=record.unnamed_claims,
        since=since,
        is_overdue=is_overdue,
    )


def _view_transfer(world: World, transfer: Transfer) -> TransferView:
    return TransferView(
        transfer_id=transfer.transfer_id,
        direction=transfer.direction.value,
        group=world.geometry.groups[transfer.group].name,
        state=transfer.state.value,
        blocks=len(transfer),
        waiters=len(transfer.waiters),
        reported_by=tuple(sorted(transfer.reports)),
    )
