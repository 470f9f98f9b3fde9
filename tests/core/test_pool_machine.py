"""The pool against a naive model of it, in any order of calls: exact slots, exact keys, exact order, every count."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiokv.core.pool import Evicted, Pool
from aiokv.errors import ForeignBlock, UsageError
from aiokv.model.ids import DigestArray, SlotArray, Tier

CAPACITY = 14
NO_LIMIT = 1 << 40


def few_keys() -> DigestArray:
    """Eight random keys, and twelve that share every bucket and tag of so small an index."""
    keys = np.random.default_rng(0).integers(0, 2**64, (20, 4), dtype=np.uint64)
    keys[8:] = (np.arange(12, dtype=np.uint64) << np.uint64(16))[:, None] + np.uint64(3)
    return keys


KEYS = few_keys()
ROW_OF = {key.tobytes(): row for row, key in enumerate(KEYS)}

groups = st.integers(0, 1)
numbers = st.integers(0, CAPACITY)

Block = tuple[int, int]
"""Group and row of `KEYS`."""


def array(slots: Iterable[int]) -> SlotArray:
    return np.array(list(slots), dtype=np.int32)


@dataclass
class Model:
    """One slot at a time, with dicts."""

    first: int
    free: list[int] = field(default_factory=list)
    fresh: int = 0
    pins: dict[int, int] = field(default_factory=dict)
    block_of: dict[int, Block] = field(default_factory=dict)
    epoch_of: dict[int, int] = field(default_factory=dict)
    order: OrderedDict[int, None] = field(default_factory=OrderedDict)
    quarantined: set[int] = field(default_factory=set)
    claims: int = 0
    epoch: int = 0
    cursor: int = 0

    @property
    def slots(self) -> range:
        return range(self.first, self.first + CAPACITY)

    @property
    def free_count(self) -> int:
        return len(self.free) + self.first + CAPACITY - self.fresh

    @property
    def available(self) -> int:
        return self.free_count + len(self.order) - self.claims

    def is_stale(self, slot: int) -> bool:
        return slot in self.block_of and self.epoch_of[slot] != self.epoch

    def slot_of(self, block: Block) -> int | None:
        held = [slot for slot, other in self.block_of.items() if other == block and not self.is_stale(slot)]
        return held[0] if held else None

    def take_key(self, slot: int) -> list[Block]:
        """What is told of it: nothing if it was stale."""
        told = [] if self.is_stale(slot) else [self.block_of[slot]]
        del self.block_of[slot]
        return told

    def discard(self, slot: int) -> None:
        del self.block_of[slot]
        if self.pins[slot] == 0:
            del self.order[slot]
            self.free.append(slot)

    def unpin_in_place(self, slots: list[int], *, found: list[int]) -> None:
        """Where exactly they return to is a matter of the queue: all others must keep their order."""
        before = list(self.order)
        self.unpin(slots)
        assert [slot for slot in found if slot in before] == before
        assert set(found) == set(self.order)
        self.order = OrderedDict.fromkeys(found)

    def unpin(self, slots: list[int]) -> None:
        for slot in slots:
            self.pins[slot] -= 1
        for slot in slots:
            if self.pins[slot] == 0:
                if self.is_stale(slot):
                    del self.block_of[slot]
                if slot in self.block_of:
                    self.order[slot] = None
                elif slot not in self.quarantined:
                    self.free.append(slot)

    def name(self, n: int) -> tuple[list[int], list[Block]]:
        slots, told = [], []
        for _ in range(n):
            if self.free:
                slot = self.free.pop()
            elif self.fresh < self.first + CAPACITY:
                slot, self.fresh = self.fresh, self.fresh + 1
            else:
                slot, _ = self.order.popitem(last=False)
                told += self.take_key(slot)
            self.pins[slot] = 1
            slots.append(slot)
        self.claims -= n
        return slots, told

    def register(self, slots: list[int], blocks: list[Block]) -> list[bool]:
        for slot in slots:
            self.block_of.pop(slot, None)
        for slot in sorted(slot for slot in self.block_of if self.is_stale(slot) and self.block_of[slot] in blocks):
            self.discard(slot)
        is_new = []
        for slot, block in zip(slots, blocks, strict=True):
            is_new.append(self.slot_of(block) is None)
            if is_new[-1]:
                self.block_of[slot] = block
                self.epoch_of[slot] = self.epoch
        return is_new

    def sweep(self, limit: int) -> None:
        if any(self.is_stale(slot) for slot in self.block_of):
            stop = min(self.cursor + max(limit, 1), self.fresh)
            for slot in range(self.cursor, stop):
                if self.is_stale(slot):
                    self.discard(slot)
            self.cursor = stop


def blocks_told(evicted: Evicted) -> list[Block]:
    return blocks_in(evicted.keys, evicted.groups.tolist())


def blocks_in(keys: DigestArray, key_groups: list[int]) -> list[Block]:
    return [(group, ROW_OF[key.tobytes()]) for key, group in zip(keys, key_groups, strict=True)]


class PoolMachine(RuleBasedStateMachine):
    """Every rule draws the slots that a call may name; `is_refused` draws those that it may not."""

    @initialize(first=st.integers(0, 1))
    def start(self, first: int) -> None:
        self.model = Model(
            first=first, fresh=first, cursor=first, pins=dict.fromkeys(range(first, first + CAPACITY), 0)
        )
        self.pool = Pool(Tier.GPU, capacity=CAPACITY, first_slot=first)

    def some(self, data: st.DataObject, slots: Iterable[int]) -> list[int]:
        candidates = sorted(slots)
        if not candidates:
            return []
        return data.draw(st.lists(st.sampled_from(candidates), unique=True))

    def pinned(self) -> list[int]:
        return [slot for slot, count in self.model.pins.items() if count]

    def reserved(self) -> list[int]:
        """Those that may be registered: stale ones too."""
        model = self.model
        keyless = [slot for slot in self.pinned() if slot not in model.block_of or model.is_stale(slot)]
        return [slot for slot in keyless if slot not in model.quarantined]

    @rule(n=numbers)
    def claim(self, n: int) -> None:
        if n <= self.model.available:
            self.pool.claim(n)
            self.model.claims += n
        else:
            self.is_refused(lambda: self.pool.claim(n), UsageError)

    @rule(n=numbers)
    def unclaim(self, n: int) -> None:
        if n <= self.model.claims:
            self.pool.unclaim(n)
            self.model.claims -= n
        else:
            self.is_refused(lambda: self.pool.unclaim(n), UsageError)

    @rule(n=numbers, scan_limit=st.sampled_from([0, 1, 3, NO_LIMIT, NO_LIMIT]))
    def name(self, n: int, scan_limit: int) -> None:
        wanted = min(n, self.model.claims)
        named = self.pool.name_claimed(n, scan_limit)
        assert len(named.slots) <= wanted
        assert len(named.slots) >= min(wanted, self.model.free_count)
        assert scan_limit < NO_LIMIT or len(named.slots) == wanted
        slots, told = self.model.name(len(named.slots))
        assert named.slots.tolist() == slots
        assert blocks_in(named.evicted.keys, named.evicted.groups.tolist()) == told

    @rule(data=st.data(), group=groups)
    def register(self, data: st.DataObject, group: int) -> None:
        slots = self.some(data, self.reserved())
        rows = data.draw(st.lists(st.integers(0, len(KEYS) - 1), min_size=len(slots), max_size=len(slots)))
        is_new = self.pool.register(array(slots), KEYS[rows], group)
        assert is_new.tolist() == self.model.register(slots, [(group, row) for row in rows])

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slots = self.some(data, {*self.pinned(), *self.model.order})
        idle = [slot for slot in slots if self.model.pins[slot] == 0]
        if len(idle) > self.model.available:
            self.is_refused(lambda: self.pool.pin(array(slots)), UsageError)
            return
        assert self.pool.count_unpinned(array(slots)) == len(idle)
        self.pool.pin(array(slots))
        for slot in slots:
            self.model.pins[slot] += 1
            self.model.order.pop(slot, None)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slots = self.some(data, self.pinned())
        self.pool.unpin(array(slots))
        self.model.unpin(slots)

    @rule(data=st.data(), times=st.integers(1, 3))
    def unpin_late(self, data: st.DataObject, times: int) -> None:
        """Nobody looks in between: what several let go of is dropped together."""
        for _ in range(times):
            slots = self.some(data, self.pinned())
            self.pool.unpin_late(array(slots).astype(np.int64))
            self.model.unpin(slots)

    @rule(data=st.data())
    def unpin_in_place(self, data: st.DataObject) -> None:
        slots = self.some(data, self.pinned())
        self.pool.unpin_in_place(array(slots))
        self.model.unpin_in_place(slots, found=self.pool.find_coldest(CAPACITY, NO_LIMIT).tolist())

    @rule(limit=st.integers(0, CAPACITY))
    def trim(self, limit: int) -> None:
        self.pool.trim(limit)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        slots = self.some(data, self.model.slots)
        self.pool.touch(array(slots))
        for slot in slots:
            if slot in self.model.order:
                self.model.order.move_to_end(slot)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        slots = self.some(data, self.model.order)
        evicted = self.pool.evict(array(slots))
        told = [block for slot in slots for block in self.model.take_key(slot)]
        for slot in slots:
            del self.model.order[slot]
            self.model.free.append(slot)
        assert blocks_told(evicted) == told

    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        slots = self.some(data, [slot for slot in self.pinned() if slot in self.model.block_of])
        evicted = self.pool.unregister(array(slots))
        assert blocks_told(evicted) == [block for slot in slots for block in self.model.take_key(slot)]

    @precondition(lambda self: len(self.model.quarantined) < 4)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        slots = self.some(data, self.pinned())[:2]
        evicted = self.pool.quarantine(array(slots))
        held = [slot for slot in slots if slot in self.model.block_of]
        assert blocks_told(evicted) == [block for slot in held for block in self.model.take_key(slot)]
        self.model.quarantined.update(slots)

    @rule()
    def bump(self) -> None:
        self.pool.bump_epoch()
        self.model.epoch += 1
        self.model.cursor = self.model.first

    @rule(limit=st.integers(0, CAPACITY))
    def sweep(self, limit: int) -> None:
        left = self.pool.sweep(limit)
        self.model.sweep(limit)
        assert left == sum(self.model.is_stale(slot) for slot in self.model.block_of)

    @rule(data=st.data())
    def name_a_slot_that_is_not_held(self, data: st.DataObject) -> None:
        model = self.model
        loose = [slot for slot in model.slots if model.pins[slot] == 0]
        if loose:
            slots = array({data.draw(st.sampled_from(loose)), *self.some(data, self.pinned())})
            self.is_refused(lambda: self.pool.unpin(slots), ForeignBlock)
            self.is_refused(lambda: self.pool.unregister(slots), ForeignBlock)
            self.is_refused(lambda: self.pool.quarantine(slots), ForeignBlock)
            self.is_refused(lambda: self.pool.register(slots, KEYS[: len(slots)], 0), ForeignBlock)
        fixed = [slot for slot in model.slots if slot not in model.order]
        if fixed:
            slots = array({data.draw(st.sampled_from(fixed)), *self.some(data, model.order)})
            self.is_refused(lambda: self.pool.evict(slots), ForeignBlock)
        free = [slot for slot in loose if slot not in model.order]
        if free:
            slots = array({data.draw(st.sampled_from(free)), *self.some(data, self.pinned())})
            self.is_refused(lambda: self.pool.pin(slots), ForeignBlock)

    def is_refused(self, call: object, error: type[Exception]) -> None:
        assert callable(call)
        before = self.pool.fingerprint(), self.pool.counts()
        with pytest.raises(error):
            call()
        assert (self.pool.fingerprint(), self.pool.counts()) == before

    @invariant()
    def nothing_is_violated(self) -> None:
        assert self.pool.check_invariants() == []

    @invariant()
    def the_states_sum_to_the_capacity(self) -> None:
        model, counts = self.model, self.pool.counts()
        assert counts.free + counts.reserved + counts.resident + counts.quarantined == CAPACITY
        assert counts.free == self.pool.free_count == model.free_count
        assert counts.resident == len(model.block_of)
        assert counts.quarantined == len(model.quarantined)
        assert counts.evictable == len(model.order)
        assert (counts.claimed, self.pool.available) == (model.claims, model.available)
        assert self.pool.epoch == model.epoch

    @invariant()
    def every_key_is_found_where_the_model_has_it(self) -> None:
        before = self.pool.fingerprint()
        for group in (0, 1):
            found = self.pool.find(KEYS, group)
            answer = [s if there else None for s, there in zip(found.slots.tolist(), found.present, strict=True)]
            assert answer == [self.model.slot_of((group, row)) for row in range(len(KEYS))]
            for slot in self.model.slots:
                held = self.pool.holds(array([slot] * len(KEYS)), KEYS, group=group)
                assert held.tolist() == [there == slot for there in answer]
        assert self.pool.fingerprint() == before

    @invariant()
    def pins_and_eviction_order_are_those_of_the_model(self) -> None:
        slots = list(self.model.slots)
        assert self.pool.pins_of(array(slots)).tolist() == [self.model.pins[slot] for slot in slots]
        assert self.pool.find_coldest(CAPACITY, NO_LIMIT).tolist() == list(self.model.order)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=200, stateful_step_count=25)
