"""The audit of the holders in slices: what every lease, unfinished transfer and hint holds, as they say themselves.

Duty: visit each holder once, and again those that have changed, and tell the pools' audits what each one holds.

State: per holder what it held when it was visited, as arrays, and what the audit will tell of it, ready made: the end
only has to put it in order. The ids of those that are due. A visit costs about what has changed, beside one comparison
of the lease's tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final, final

import numpy as np

from aiokv.core.audit import AuditClock, HolderKind, Holding, LeaseView, view_lease
from aiokv.core.hint_audit import HintAudit
from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import LeaseRecord
from aiokv.core.pool_audit import CHANGES_PER_COST, VISIT_COST, PoolAudit
from aiokv.core.world import World
from aiokv.model.ids import SlotArray, Tier

__all__ = ["HolderAudit"]

_POSITIONS_PER_COST: Final = 64
"""So many compared positions of a table cost as much as looking at one slot."""
_NO_SLOTS: Final[SlotArray] = np.empty(0, np.int32)


@dataclass(slots=True, kw_only=True, eq=False)
class _Lease:
    """A lease as of its last visit."""

    tables: list[SlotArray]
    view: LeaseView
    pins: tuple[Holding, ...]
    reservations: tuple[Holding, ...]
    transfers: set[int]
    """Those that it waits for or owns: who waits for them changes with it."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Copies:
    """A transfer as of its last visit: its direction, and the slots that it held."""

    transfer: Transfer | None = None
    open_copies: int = 0
    has_targets: bool = False
    pins: tuple[Holding, ...] = ()

    def sources(self, tier: Tier) -> SlotArray:
        """Those that it read in this tier."""
        if self.transfer is None or self.transfer.direction.source_tier is not tier:
            return _NO_SLOTS
        return self.transfer.sources[: self.open_copies]

    def targets(self, tier: Tier) -> SlotArray:
        """Those that it wrote in this tier, once they were named."""
        if self.transfer is None or not self.has_targets or self.transfer.direction.target_tier is not tier:
            return _NO_SLOTS
        return self.transfer.bound_targets[: self.open_copies]


@final
class HolderAudit:
    """What an audit knows of leases and transfers. `close` it, or the tables go on telling it of changes."""

    __slots__ = (
        "_claimed", "_clock", "_copies", "_due_leases", "_due_transfers", "_leases", "_pools", "_world", "hints",
    )  # fmt: skip

    def __init__(self, world: World, *, pools: Mapping[Tier, PoolAudit], clock: AuditClock) -> None:
        self._world = world
        self._pools = pools
        self._clock = clock
        self._leases: dict[int, _Lease] = {}
        self._copies: dict[int, _Copies] = {}
        self._claimed = 0
        self._due_leases = {record.lease_id for record in world.leases}
        self._due_transfers = {transfer.transfer_id for transfer in world.inflight}
        world.leases.watchers.append(self._due_leases)
        world.inflight.watchers.append(self._due_transfers)
        self.hints = HintAudit(world.hints, pools=pools)

    def close(self) -> None:
        """Be told of no more changes. Idempotent."""
        self.hints.close()
        for watchers, mine in (
            (self._world.leases.watchers, self._due_leases),
            (self._world.inflight.watchers, self._due_transfers),
        ):
            watchers[:] = [changed for changed in watchers if changed is not mine]

    @property
    def due_count(self) -> int:
        """How many holders are still to be visited."""
        return len(self._due_leases) + len(self._due_transfers) + self.hints.due_count

    @property
    def is_due(self) -> bool:
        """Whether a holder is still to be visited."""
        return self.due_count > 0

    def visit_some(self, limit: int) -> int:
        """Visit holders for about as much work as looking at `limit` slots is; returns how much it was."""
        done = 0
        while self._due_leases and done < limit:
            done += self._visit_lease(self._due_leases.pop())
        while self._due_transfers and done < limit:
            done += self._visit_transfer(self._due_transfers.pop())
        return done + self.hints.visit_some(limit - done)

    def leases(self) -> tuple[LeaseView, ...]:
        """The live leases, oldest first."""
        return tuple([lease.view for lease in self._by_age()])

    def pins(self) -> tuple[Holding, ...]:
        """Every holder of pins: leases, then transfers, then hints, oldest first."""
        leases = chain.from_iterable([lease.pins for lease in self._by_age()])
        copies = chain.from_iterable([self._copies[transfer_id].pins for transfer_id in sorted(self._copies)])
        return (*leases, *copies, *self.hints.pins())

    def reservations(self) -> tuple[Holding, ...]:
        """Every holder of claims that have no slot yet."""
        return tuple(chain.from_iterable([lease.reservations for lease in self._by_age()]))

    def find_violations(self) -> list[str]:
        """What is wrong with the holders as of now, in words. Meaningful when nobody is due."""
        counters, claimed, live = self._world.counters, self._world.gpu.claimed_count, len(self._leases)
        found = []
        if self._claimed != claimed:
            found.append(f"the leases claim {self._claimed} GPU slots, the pool counts {claimed}")
        if counters.leases_opened - sum(counters.leases_closed.values()) != live:
            found.append(f"{live} leases live, which is not what was opened less what was closed")
        return found

    def _by_age(self) -> list[_Lease]:
        """The live leases, oldest first."""
        return list(map(self._leases.__getitem__, sorted(self._leases)))

    def _visit_lease(self, lease_id: int) -> int:
        record = self._world.leases.find(lease_id) if lease_id in self._world.leases else None
        before = self._leases.pop(lease_id, None)
        old = before.tables if before is not None else []
        new = _copy_tables(record) if record is not None else []
        done = VISIT_COST
        for index in range(max(len(old), len(new))):
            was = old[index] if index < len(old) else _NO_SLOTS
            now = new[index] if index < len(new) else _NO_SLOTS
            done += self._pools[Tier.GPU].exchange(was, now) // CHANGES_PER_COST + len(now) // _POSITIONS_PER_COST
        if before is not None:
            self._claimed -= before.view.unnamed_claims
            self._due_transfers.update(before.transfers)
        if record is not None:
            view = view_lease(
                record,
                gpu_blocks=sum(int(np.count_nonzero(table)) for table in new),
                since=record.opened_at,
                is_overdue=self._clock.is_overdue(record.opened_at),
            )
            self._claimed += view.unnamed_claims
            transfers = record.waiting | record.storing
            self._due_transfers.update(transfers)
            self._leases[lease_id] = _Lease(
                tables=new,
                view=view,
                pins=_held_by(view, view.gpu_blocks),
                reservations=_held_by(view, view.unnamed_claims),
                transfers=transfers,
            )
        return done

    def _visit_transfer(self, transfer_id: int) -> int:
        transfer = self._world.inflight.find(transfer_id) if transfer_id in self._world.inflight else None
        before = self._copies.pop(transfer_id, None) or _Copies()
        now = _Copies()
        if transfer is not None:
            way = transfer.direction
            tiers = (way.source_tier, way.target_tier) if transfer.targets is not None else (way.source_tier,)
            now = _Copies(
                transfer=transfer,
                open_copies=transfer.open_copies,
                has_targets=transfer.targets is not None,
                pins=tuple(self._copied_by(transfer, tier) for tier in tiers if transfer.open_copies),
            )
            self._copies[transfer_id] = now
            for lease_id in {transfer.owner, *transfer.waiters} & self._leases.keys():
                self._leases[lease_id].transfers.add(transfer_id)  # begun since the lease was visited
        changes = 0
        for tier, pool in self._pools.items():
            changes += pool.exchange(before.sources(tier), now.sources(tier))
            changes += pool.exchange_targets(before.targets(tier), now.targets(tier))
        return VISIT_COST + changes // CHANGES_PER_COST

    def _copied_by(self, transfer: Transfer, tier: Tier) -> Holding:
        leases = self._world.leases
        owner = leases.find(transfer.owner) if transfer.owner in leases else None
        since = transfer.since
        if since is None and owner is not None:
            since = owner.opened_at
        return Holding(
            kind=HolderKind(transfer.direction.value),
            holder_id=transfer.transfer_id,
            request_id=owner.request.request_id if owner is not None else "",
            tier=tier,
            blocks=transfer.open_copies,
            since=since,
            waiters=tuple(leases.find(who).request.request_id for who in sorted(transfer.waiters) if who in leases),
        )


def _copy_tables(record: LeaseRecord) -> list[SlotArray]:
    tables = [table.view().copy() for table in (*record.tables, *record.state_slots.values())]
    return [*tables, record.leaving]


def _held_by(view: LeaseView, blocks: int) -> tuple[Holding, ...]:
    """What a lease has so many GPU blocks of; nothing of none."""
    if not blocks:
        return ()
    holding = Holding(
        kind=HolderKind.LEASE,
        holder_id=view.lease_id,
        request_id=view.request_id,
        tier=Tier.GPU,
        blocks=blocks,
        since=view.since,
    )
    return (holding,)
