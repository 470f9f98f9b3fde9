"""Who holds what: frozen pictures of a cache, for tests, operators and the audit. Changes nothing, raises nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from aiokv.core.hint_table import HintRecord
from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import LeaseRecord
from aiokv.core.pool import Pool, PoolCounts
from aiokv.core.world import World
from aiokv.model.ids import NULL_SLOT, Direction, SlotArray, Tier

__all__ = ["Audit", "HintView", "Holding", "LeaseView", "Snapshot", "TransferView", "take_audit", "take_snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """One live lease."""

    lease_id: int
    request_id: str
    state: str
    prefix_tokens: int
    gpu_blocks: int
    unnamed_claims: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One holder of pins: a lease, a transfer or a residence hint, which is of no request."""

    holder: str
    request_id: str
    tier: Tier
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Who holds what, and which invariants do not hold."""

    leases: tuple[LeaseView, ...]
    pins: tuple[Holding, ...]
    reservations: tuple[Holding, ...]
    violations: tuple[str, ...]
    hints: tuple[HintView, ...]


def take_snapshot(world: World) -> Snapshot:
    """The state as one frozen value."""
    return Snapshot(
        gpu=world.gpu.counts(),
        cpu=world.cpu.counts() if world.cpu is not None else None,
        gpu_order=world.gpu.fingerprint(),
        cpu_order=world.cpu.fingerprint() if world.cpu is not None else "",
        leases=tuple(_lease_view(record) for record in world.leases),
        transfers=tuple(_transfer_view(world, transfer) for transfer in world.inflight),
        hints=tuple(_hint_view(record) for record in world.hints),
    )


def take_audit(world: World) -> Audit:
    """Every pin and reservation by holder, and all violated invariants in words."""
    pins = [_lease_pins(record) for record in world.leases]
    pins += [holding for transfer in world.inflight for holding in _transfer_pins(world, transfer)]
    pins += [_hint_pins(record) for record in world.hints]
    reservations = [
        Holding(
            holder=f"lease {record.lease_id}",
            request_id=record.request.request_id,
            tier=Tier.GPU,
            blocks=record.unnamed_claims,
        )
        for record in world.leases
        if record.unnamed_claims
    ]
    return Audit(
        leases=tuple(_lease_view(record) for record in world.leases),
        pins=tuple(pin for pin in pins if pin.blocks),
        reservations=tuple(reservations),
        violations=tuple(_violations(world)),
        hints=tuple(_hint_view(record) for record in world.hints),
    )


def _violations(world: World) -> list[str]:
    found = world.gpu.check_invariants()
    leased = [_held(record) for record in world.leases]
    found += _pin_violations(world.gpu, leased + _transfer_slots(world, Tier.GPU) + _hint_slots(world, Tier.GPU))
    found += world.hints.check_invariants()
    claimed = sum(record.unnamed_claims for record in world.leases)
    if claimed != world.gpu.claimed_count:
        found.append(f"the leases claim {claimed} GPU slots, the pool counts {world.gpu.claimed_count}")
    if world.cpu is not None:
        found += world.cpu.check_invariants()
        found += _pin_violations(world.cpu, _transfer_slots(world, Tier.CPU) + _hint_slots(world, Tier.CPU))
    return found


def _pin_violations(pool: Pool, holdings: list[SlotArray]) -> list[str]:
    """Invariant 2: a slot has as many pins as live leases, transfers and hints hold it."""
    holders: Counter[int] = Counter()
    for slots in holdings:
        holders.update(slots.tolist())
    first = NULL_SLOT + 1 if pool.tier is Tier.GPU else 0
    slots = np.arange(first, first + pool.capacity, dtype=np.int32)
    pins = pool.pins_of(slots)
    wrong = [slot for slot, count in zip(slots.tolist(), pins.tolist(), strict=True) if count != holders[slot]]
    return [f"{pool.tier.value} slot {slot} has {pins[slot - first]} pins, {holders[slot]} holders" for slot in wrong]


def _transfer_slots(world: World, tier: Tier) -> list[SlotArray]:
    held = []
    for transfer in world.inflight:
        reads_tier = (tier is Tier.CPU) == (transfer.direction is Direction.LOAD)
        if reads_tier:
            held.append(transfer.sources[: transfer.open_copies])
        elif transfer.targets is not None:
            held.append(transfer.targets[: transfer.open_copies])
    return held


def _hint_slots(world: World, tier: Tier) -> list[SlotArray]:
    return [record.slots for record in world.hints if record.tier is tier]


def _held(record: LeaseRecord) -> SlotArray:
    return record.held_slots()


def _lease_pins(record: LeaseRecord) -> Holding:
    return Holding(
        holder=f"lease {record.lease_id}",
        request_id=record.request.request_id,
        tier=Tier.GPU,
        blocks=len(record.held_slots()),
    )


def _transfer_pins(world: World, transfer: Transfer) -> list[Holding]:
    owner = world.leases.find(transfer.owner).request.request_id if transfer.owner in world.leases else ""
    source, target = (Tier.CPU, Tier.GPU) if transfer.direction is Direction.LOAD else (Tier.GPU, Tier.CPU)
    name = f"{transfer.direction.value} {transfer.transfer_id}"
    pins = [Holding(holder=name, request_id=owner, tier=source, blocks=transfer.open_copies)]
    if transfer.targets is not None:
        pins.append(Holding(holder=name, request_id=owner, tier=target, blocks=transfer.open_copies))
    return pins


def _hint_pins(record: HintRecord) -> Holding:
    name = f"hint {record.hint_id} of {record.tenant}"
    return Holding(holder=name, request_id="", tier=record.tier, blocks=len(record.slots))


def _hint_view(record: HintRecord) -> HintView:
    return HintView(
        hint_id=record.hint_id,
        tenant=record.tenant,
        tier=record.tier,
        state=record.state.value,
        held_tokens=record.length,
        blocks=len(record.slots),
    )


def _lease_view(record: LeaseRecord) -> LeaseView:
    return LeaseView(
        lease_id=record.lease_id,
        request_id=record.request.request_id,
        state=record.state.value,
        prefix_tokens=record.length,
        gpu_blocks=len(record.held_slots()),
        unnamed_claims=record.unnamed_claims,
    )


def _transfer_view(world: World, transfer: Transfer) -> TransferView:
    return TransferView(
        transfer_id=transfer.transfer_id,
        direction=transfer.direction.value,
        group=world.geometry.groups[transfer.group].name,
        state=transfer.state.value,
        blocks=len(transfer),
        waiters=len(transfer.waiters),
        reported_by=tuple(sorted(transfer.reports)),
    )
