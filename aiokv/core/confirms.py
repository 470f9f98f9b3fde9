"""Confirmation: blocks whose KV a forward pass has written become findable, and what is no longer needed is given back.

Rules
- Only full blocks of confirmed tokens are registered, at most up to what the caller publishes (invariant 9).
- A duplicate of a resident block stays private to its lease; it is never swapped into a table.
- A lease of an older epoch registers nothing (invariant 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from aiokv.core.admission import Admission
from aiokv.core.block_names import KeyedBlocks
from aiokv.core.counters import Closing
from aiokv.core.coverage import coverage_start
from aiokv.core.fences import Fence
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.core.masks import is_all
from aiokv.core.offers import Offer
from aiokv.core.revocations import make_room
from aiokv.core.slices import Job
from aiokv.core.store_policy import Strategy
from aiokv.core.world import World
from aiokv.errors import UsageError
from aiokv.model.ids import NULL_SLOT, IntArray, SlotArray, Tier
from aiokv.model.plan import DeclineReason

__all__ = ["Confirms"]


@final
class Confirms:
    """Registers what has been computed."""

    __slots__ = ("_admission", "_stores", "_world")

    def __init__(self, world: World, *, admission: Admission, stores: Strategy) -> None:
        self._world = world
        self._admission = admission
        self._stores = stores

    def confirm(
        self,
        record: LeaseRecord,
        num_tokens: int,
        *,
        publish_to: int | None = None,
        states: Sequence[int] = (),
        after: Fence | None = None,
    ) -> None:
        """The KV of the first `num_tokens` tokens is written; no more than is confirmed already is a no-op."""
        self._check(record, num_tokens, publish_to=publish_to)
        if num_tokens <= record.confirmed:
            return
        self._check_states(record, states, num_tokens=num_tokens)
        if self._has_unnamed(record, num_tokens=num_tokens, states=states):
            self._admission.finish_naming(record)
        written_from, record.confirmed = record.confirmed, num_tokens
        record.fence(after)
        published = num_tokens if publish_to is None else min(num_tokens, publish_to)
        record.publish_limit = max(record.publish_limit, published)
        for length in states:
            self._register_states(record, length)
        if record.fenced:
            self._fence_written(record, start=written_from)
        self._world.slices.start(self.registration(record))

    def finishing(self, record: LeaseRecord, *, how: Closing) -> Job:
        """Register and store what is left of a lease, then give everything back."""
        yield from self.registration(record)
        yield from self._stores.flush(record)
        self._count_unhashed(record)
        if self._admission.is_long_to_release(record):
            yield
        if record.state is not LeaseState.RELEASED:
            self._admission.release(record, how=how)

    def _count_unhashed(self, record: LeaseRecord) -> None:
        """What was written and ends with its lease, as it has no hash: blocks that are not full, or not published."""
        if record.state is LeaseState.READY and self._world.has_cpu_tier and self._world.may_copy(record):
            blocks = sum(
                -(-record.confirmed // size) - registered
                for index, (size, registered) in enumerate(zip(record.block_sizes, record.registered, strict=True))
                if index not in record.state_slots
            )
            self._world.counters.store_skipped_blocks[DeclineReason.UNHASHED] += blocks

    def registration(self, record: LeaseRecord) -> Job:
        """Register what is confirmed and published, slice by slice, then give back what no query will read again."""
        budget = self._world.slice_blocks
        for index in range(len(record.tables)):
            while _is_ready(record) and self._unregistered(record, index):
                budget -= self._register_some(record, index, limit=budget)
                if budget <= 0:
                    yield
                    budget = self._world.slice_blocks
        if _is_ready(record):
            self._give_back(record)

    def _fence_written(self, record: LeaseRecord, *, start: int) -> None:
        """Whoever reads what was confirmed from token `start` on, copies and other streams, waits for its fence."""
        for table, block in zip(record.tables, record.block_sizes, strict=True):
            slots = table.view()[start // block : -(-record.confirmed // block)]
            self._world.fences.note(slots, record.fenced)

    def _check(self, record: LeaseRecord, num_tokens: int, *, publish_to: int | None) -> None:
        record.check_ready("be confirmed")
        room = min(record.capacity_tokens)
        if not 0 <= num_tokens <= min(record.keys.num_tokens, room):
            known = record.keys.num_tokens
            raise UsageError(f"cannot confirm {num_tokens} tokens: {known} are known and there is room for {room}")
        if publish_to is not None and publish_to < 0:
            raise UsageError(f"publish_to must not be negative: {publish_to}")

    def _check_states(self, record: LeaseRecord, states: Sequence[int], *, num_tokens: int) -> None:
        """A state is new, confirmed, at the end of a block, and was captured into the one slot there is for it."""
        if record.state_slots and len(states) > 1:
            raise UsageError(f"states of {list(states)} tokens: there is one slot for a captured state at a time")
        for length in states:
            if not record.confirmed < length <= num_tokens:
                raise UsageError(f"a state of {length} tokens is not among those that are confirmed now")
            for index, table in record.state_slots.items():
                if length % record.block_sizes[index]:
                    raise UsageError(f"a state of {length} tokens is not at the end of a block")
                if table.view()[1] == NULL_SLOT and not record.has_unnamed(table, stop=len(table)):
                    raise UsageError("no slot is left for another captured state: extend the lease first")

    @staticmethod
    def _has_unnamed(record: LeaseRecord, *, num_tokens: int, states: Sequence[int]) -> bool:
        """Whether what was computed lies in slots whose naming is still under way."""
        blocks = [-(-num_tokens // size) for size in record.block_sizes]
        if any(record.has_unnamed(table, stop=stop) for table, stop in zip(record.tables, blocks, strict=True)):
            return True
        return bool(states) and any(record.has_unnamed(t, stop=len(t)) for t in record.state_slots.values())

    def _unregistered(self, record: LeaseRecord, index: int) -> int:
        """Blocks of one group that are published and not registered yet; recurrent groups register states only."""
        if index in record.state_slots:
            return 0
        return record.publish_limit // record.block_sizes[index] - record.registered[index]

    def _register_some(self, record: LeaseRecord, index: int, *, limit: int) -> int:
        start = record.registered[index]
        stop = start + min(limit, self._unregistered(record, index))
        record.registered[index] = stop
        slots = record.tables[index].view()[start:stop]
        positions = np.not_equal(slots, NULL_SLOT).nonzero()[0] + start
        if len(positions):
            self._register(record, index, positions=positions)
        return stop - start

    def _register(self, record: LeaseRecord, index: int, *, positions: IntArray) -> None:
        if not self._world.may_register(record):
            return
        world = self._world
        slots = record.tables[index].view()[positions].astype(np.int64)
        blocks = KeyedBlocks(keys=record.keys, group=index, positions=positions)
        is_new = world.register(Tier.GPU, slots, blocks=blocks)
        if not is_all(is_new):
            positions, slots = positions[is_new], slots[is_new]
        if len(positions):
            world.capacity_generation += 1  # who waits for slots may hit these, and so need fewer
        self._stores.offer(Offer(record=record, keys=record.keys, group=index, positions=positions, slots=slots))

    def _register_states(self, record: LeaseRecord, length: int) -> None:
        """The captured states become findable under their exact length, and the next capture gets a slot of its own."""
        if length > record.publish_limit:
            return
        for index, states in record.state_slots.items():
            position = np.array([length // record.block_sizes[index] - 1], np.int64)
            record.tables[index].put(position, states.view()[1:].copy())
            self._register(record, index, positions=position)
            states.put(np.array([1]), self._claim_capture())

    def _claim_capture(self) -> SlotArray:
        """A slot for the next state; the null block when there is none to be had."""
        world = self._world
        if not make_room(world, 1 - world.gpu.available):
            return np.zeros(1, np.int32)
        world.gpu.claim(1)
        slots = world.name_gpu(1)
        if not len(slots):
            world.unclaim_gpu(1)
            return np.zeros(1, np.int32)
        return slots

    def _give_back(self, record: LeaseRecord) -> None:
        """Let go of blocks that fell out of every coverage of what is confirmed."""
        for index, table in enumerate(record.tables):
            start = coverage_start(self._world.geometry, index, record.confirmed)
            if start > record.given_back[index]:
                slots = table.take_range(record.given_back[index], start)
                record.given_back[index] = start
                self._world.give_back(record, slots[::-1])


def _is_ready(record: LeaseRecord) -> bool:
    """Whether registration goes on: also while the lease finishes, until it is released."""
    return record.state is LeaseState.READY
