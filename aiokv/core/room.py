"""Room for tokens to come: claimed while a lease is held, and given back when nobody takes it.

Rules
- Capacity is checked before anything changes (law 2). The watermark does not bind: what runs must be able to end.
- An extension claims whole blocks of every group and never looks anything up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from aiokv.core.admission import Admission
from aiokv.core.block_table import ClaimSegment
from aiokv.core.lease_table import LeaseRecord
from aiokv.core.revocations import make_room, plan_room
from aiokv.core.world import World
from aiokv.errors import CapacityError, UsageError
from aiokv.model.ids import NULL_SLOT, IntArray
from aiokv.model.plan import DeferReason, Deferred

__all__ = ["Room"]


@final
class Room:
    """Extends leases."""

    __slots__ = ("_admission", "_world")

    def __init__(self, world: World, *, admission: Admission) -> None:
        self._world = world
        self._admission = admission

    def plan(self, record: LeaseRecord, tokens: int) -> list[IntArray]:
        """Per group the positions to claim for `tokens` more tokens; `CapacityError` if they can never fit."""
        if tokens < 0:
            raise UsageError(f"cannot extend by {tokens} tokens")
        target = min(record.capacity_tokens) + tokens
        usable = self._world.usable_gpu_slots
        held = len(record.held_slots()) + record.unnamed_claims
        least = _new_blocks(record, target=target)
        if least > usable:  # before so many positions are written down
            raise CapacityError(record.request.request_id, needed=held + least, capacity=usable)
        growth = [self._growth(record, index, target=target) for index in range(len(record.tables))]
        claims = sum(map(len, growth))
        if held + claims > usable and not plan_room(self._world, self._lacking(claims)).is_enough:
            raise CapacityError(record.request.request_id, needed=held + claims, capacity=usable)
        return growth

    def try_extend(self, record: LeaseRecord, tokens: int) -> int | Deferred:
        """Claim room for `tokens` more tokens in every group; returns the new room of the lease in tokens."""
        world = self._world
        growth = self.plan(record, tokens)
        claims = sum(map(len, growth))
        lacking = self._lacking(claims)
        if lacking > 0 and not make_room(world, lacking):
            return world.defer(DeferReason.CAPACITY)
        target = min(record.capacity_tokens) + tokens
        world.gpu.claim(claims)
        for index, positions in enumerate(growth):
            self._grow(record, index, positions=positions, target=target)
        self._admission.start_naming(record)
        return target

    def undo_extend(self, record: LeaseRecord, capacity: Sequence[int]) -> None:
        """Give back what each group has beyond `capacity[group]` tokens, where nothing has been written yet.

        There may be less than that already: a lease that was planned again meanwhile counts its first chunk anew.
        """
        for index, table in enumerate(record.tables):
            record.capacity_tokens[index] = min(record.capacity_tokens[index], capacity[index])
            stop = -(-record.capacity_tokens[index] // record.block_sizes[index])
            for segment in record.claims:
                if segment.table is table:
                    self._cut_claim(segment, stop=stop)
            self._world.give_back(record, table.cut(stop)[::-1])

    def _lacking(self, claims: int) -> int:
        """How many slots are missing for so many claims."""
        return claims - self._world.gpu.available

    def _growth(self, record: LeaseRecord, index: int, *, target: int) -> IntArray:
        """The positions that group `index` must claim for room of `target` tokens."""
        if index in record.state_slots:
            states = record.state_slots[index]
            if record.has_unnamed(states, stop=len(states)):
                return np.zeros(0, np.int64)
            return np.flatnonzero(states.view() == NULL_SLOT).astype(np.int64, copy=False)
        block = record.block_sizes[index]
        return np.arange(-(-record.capacity_tokens[index] // block), -(-target // block), dtype=np.int64)

    def _grow(self, record: LeaseRecord, index: int, *, positions: IntArray, target: int) -> None:
        record.capacity_tokens[index] = max(record.capacity_tokens[index], target)
        record.tables[index].grow(-(-target // record.block_sizes[index]))
        table = record.state_slots.get(index, record.tables[index])
        if len(positions):
            record.claims.append(ClaimSegment(table=table, positions=positions))

    def _cut_claim(self, segment: ClaimSegment, *, stop: int) -> None:
        """Positions from `stop` on are not claimed any more; those that have a name already are in the table."""
        kept = max(int(np.searchsorted(segment.positions, stop)), segment.named)
        self._world.unclaim_gpu(len(segment.positions) - kept)
        segment.positions = segment.positions[:kept]


def _new_blocks(record: LeaseRecord, *, target: int) -> int:
    """How many blocks room of `target` tokens takes at least: those of recurrent groups are not counted."""
    sizes = enumerate(record.block_sizes)
    rooms = [(record.capacity_tokens[index], block) for index, block in sizes if index not in record.state_slots]
    return sum(max(-(-target // block) - -(-room // block), 0) for room, block in rooms)
