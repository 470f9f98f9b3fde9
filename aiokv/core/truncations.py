"""Truncation: the last tokens of a lease are forgotten, and others will be computed in their place.

Rules
- A block that anybody could read is never written again: one that is findable, or that somebody else holds, leaves the
  table, and the position gets a slot of its own. What left stays in the cache, under its own hash.
- Copies in flight and offers keep the keys they were made with: the lease goes on with keys of its own.
- Where the last block cannot be written on, the confirmed tokens shrink to its beginning; the rest is computed again.
- Capacity is checked before anything changes (law 2); slots that come back count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from aiokv.core.admission import Admission
from aiokv.core.block_table import ClaimSegment
from aiokv.core.coverage import coverage_start
from aiokv.core.fences import Fence
from aiokv.core.lease_table import LeaseRecord
from aiokv.core.revocations import make_room
from aiokv.core.world import World
from aiokv.errors import CapacityError, UsageError
from aiokv.model.ids import NULL_SLOT, BoolArray, IntArray, SlotArray
from aiokv.model.plan import DeferReason, Deferred

__all__ = ["Truncations"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Cut:
    """What changes in one group's table. Block positions, ascending."""

    dropped: IntArray
    slots: SlotArray
    """Those of `dropped`."""
    claimed: IntArray


@final
class Truncations:
    """Shortens leases."""

    __slots__ = ("_admission", "_world")

    def __init__(self, world: World, *, admission: Admission) -> None:
        self._world = world
        self._admission = admission

    def truncate(self, record: LeaseRecord, num_tokens: int, *, after: Fence | None = None) -> int | Deferred:
        """Keep the first `num_tokens` tokens; returns how many of them are still confirmed.

        What is given back was last read and written before the fence `after`.

        `Deferred`, and nothing has changed, when there are no slots for positions that must be written again.
        """
        _check(record, num_tokens)
        record.fence(after)
        keys = record.keys.copy()
        keys.truncate(num_tokens)
        if num_tokens < record.confirmed:
            confirmed = self._writable_from(record, num_tokens)
            self._check_readable(record, confirmed)
            cuts = [self._cut(record, index, confirmed=confirmed) for index in range(len(record.tables))]
            if not self._make_room(record, cuts):
                return self._world.defer(DeferReason.CAPACITY)
            self._exchange(record, cuts)
            self._rewind(record, confirmed)
            self._fence_kept(record)
        record.keys = keys
        return record.confirmed

    def _writable_from(self, record: LeaseRecord, num_tokens: int) -> int:
        """The last length up to `num_tokens` from which on every group can write, in own blocks or at their edge."""
        length = num_tokens
        while True:
            edges = [
                length - length % block
                for index, block in enumerate(record.block_sizes)
                if index not in record.state_slots and length % block and not self._may_write(record, index, at=length)
            ]
            if not edges:
                return length
            length = min(edges)

    def _may_write(self, record: LeaseRecord, index: int, *, at: int) -> bool:
        """Whether the block that holds token `at` may be written."""
        position = at // record.block_sizes[index]
        return bool(self._are_writable(record.tables[index].view()[position : position + 1]).all())

    def _are_writable(self, slots: SlotArray) -> BoolArray:
        """Which slots nobody else holds, no lookup has ever found, and no lost copy may still read."""
        gpu = self._world.gpu
        writable: BoolArray = (gpu.pins_of(slots) == 1) & (gpu.group_of(slots) < 0) & ~self._world.are_lost(slots)
        return writable

    def _check_readable(self, record: LeaseRecord, confirmed: int) -> None:
        """What queries from `confirmed` on read is still held; `UsageError` else."""
        for index, (spec, block) in enumerate(zip(self._world.geometry.groups, record.block_sizes, strict=True)):
            stop = confirmed // block
            if index in record.state_slots:
                if confirmed and (confirmed % block or record.tables[index].view()[stop - 1] == NULL_SLOT):
                    raise UsageError(f"group {spec.name!r} holds no state of exactly {confirmed} tokens")
            elif coverage_start(self._world.geometry, index, confirmed) < min(record.given_back[index], stop):
                raise UsageError(f"group {spec.name!r} has given back blocks that queries from {confirmed} on read")

    def _cut(self, record: LeaseRecord, index: int, *, confirmed: int) -> _Cut:
        first = confirmed // record.block_sizes[index]
        after = record.tables[index].view(first)
        held = np.flatnonzero(after != NULL_SLOT).astype(np.int64, copy=False)
        if index in record.state_slots:
            return _Cut(dropped=held + first, slots=after[held], claimed=np.zeros(0, np.int64))
        held = held[~self._are_writable(after[held])]
        given_back = np.arange(first, max(record.given_back[index], first), dtype=np.int64)
        return _Cut(dropped=held + first, slots=after[held], claimed=np.concatenate((given_back, held + first)))

    def _make_room(self, record: LeaseRecord, cuts: Sequence[_Cut]) -> bool:
        """Whether the claims of all cuts can be had now; `CapacityError` if they never can."""
        gpu = self._world.gpu
        slots = np.concatenate([cut.slots for cut in cuts])
        claims = sum(len(cut.claimed) for cut in cuts)
        coming = int(np.count_nonzero((gpu.pins_of(slots) == 1) & (gpu.group_of(slots) >= 0)))
        if make_room(self._world, claims - gpu.available - coming, leaving=slots):
            return True
        needed = len(record.held_slots()) - len(slots) + record.unnamed_claims + claims
        if needed > self._world.usable_gpu_slots:
            raise CapacityError(record.request.request_id, needed=needed, capacity=self._world.usable_gpu_slots)
        return False

    def _exchange(self, record: LeaseRecord, cuts: Sequence[_Cut]) -> None:
        """Let go first: what is given back here may be what is claimed."""
        world = self._world
        for table, cut in zip(record.tables, cuts, strict=True):
            world.give_back(record, table.take(cut.dropped)[::-1])
        world.gpu.claim(sum(len(cut.claimed) for cut in cuts))
        for table, cut in zip(record.tables, cuts, strict=True):
            if len(cut.claimed):
                record.claims.append(ClaimSegment(table=table, positions=cut.claimed))
        self._admission.start_naming(record)

    def _fence_kept(self, record: LeaseRecord) -> None:
        """Blocks that stay and are written again: other streams may still read what was there (law 5)."""
        if record.fenced:
            for table, block in zip(record.tables, record.block_sizes, strict=True):
                slots = table.view()[record.confirmed // block :]
                self._world.fences.note(slots[slots != NULL_SLOT], record.fenced)

    def _rewind(self, record: LeaseRecord, confirmed: int) -> None:
        self._world.counters.truncated_tokens += record.confirmed - confirmed
        record.confirmed = confirmed
        record.publish_limit = min(record.publish_limit, confirmed)
        for index, block in enumerate(record.block_sizes):
            record.registered[index] = min(record.registered[index], confirmed // block)
            start = coverage_start(self._world.geometry, index, confirmed)
            record.given_back[index] = min(record.given_back[index], start)


def _check(record: LeaseRecord, num_tokens: int) -> None:
    record.check_open()
    record.check_ready("be truncated")
    least = max(record.length, 1)
    if not least <= num_tokens <= record.keys.num_tokens:
        raise UsageError(f"cannot keep {num_tokens} tokens: {least} to {record.keys.num_tokens} can be kept")
