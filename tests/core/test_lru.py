"""The eviction queue against an ordered dict: the order of pushes, exactly, in a ring that never overflows."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv.core.lru import EvictionQueue
from aiokv.errors import UsageError
from aiokv.model.ids import SlotArray

NO_LIMIT = 1 << 40


def array(slots: list[int]) -> SlotArray:
    return np.array(slots, dtype=np.int32)


class NaiveQueue:
    """What the queue should do, one slot at a time."""

    def __init__(self) -> None:
        self.order: OrderedDict[int, None] = OrderedDict()

    def push(self, slots: list[int]) -> None:
        for slot in slots:
            assert slot not in self.order
            self.order[slot] = None

    def restore(self, slots: list[int], *, lifted: dict[int, list[int]], found: list[int]) -> None:
        """Take the order that was `found`, if no slot is warmer than before and the others are as they were."""
        assert [slot for slot in found if slot not in slots] == list(self.order)
        for slot in slots:
            colder = set(found[: found.index(slot)]) & set(self.order)
            assert colder <= set(lifted.get(slot, [])), "nothing that was behind it is before it now"
        self.order = OrderedDict.fromkeys(found)

    def drop(self, slots: list[int]) -> None:
        for slot in slots:
            del self.order[slot]

    def pop(self, n: int) -> list[int]:
        return [self.order.popitem(last=False)[0] for _ in range(min(n, len(self.order)))]


def assert_same(queue: EvictionQueue, naive: NaiveQueue, *, capacity: int) -> None:
    assert queue.peek(capacity, NO_LIMIT).tolist() == list(naive.order)
    assert len(queue) == len(naive.order)
    assert queue.used <= 3 * capacity
    assert queue.check_invariants() == []


def test_slots_leave_in_the_order_of_their_pushes() -> None:
    queue = EvictionQueue(8)
    queue.push(array([5, 1, 7]))
    queue.push(array([0]))
    assert queue.pop(2, NO_LIMIT).tolist() == [5, 1]
    assert queue.pop(5, NO_LIMIT).tolist() == [7, 0]
    assert queue.pop(5, NO_LIMIT).tolist() == []


def test_a_dropped_slot_is_passed_over() -> None:
    queue = EvictionQueue(8)
    queue.push(array([0, 1, 2, 3]))
    queue.drop(array([0, 2]))
    assert queue.is_queued(array([0, 1, 2, 3])).tolist() == [False, True, False, True]
    queue.push(array([0]))
    assert queue.pop(8, NO_LIMIT).tolist() == [1, 3, 0]


def test_a_renewed_slot_goes_last() -> None:
    queue = EvictionQueue(8)
    queue.push(array([0, 1, 2, 3]))
    queue.renew(array([2, 0]))
    assert len(queue) == 4
    assert queue.pop(8, NO_LIMIT).tolist() == [1, 3, 2, 0]


def test_renewing_every_slot_again_and_again_keeps_the_order() -> None:
    queue = EvictionQueue(4)
    queue.push(array([0, 1, 2, 3]))
    for _ in range(200):
        queue.renew(array([3, 2, 1, 0]))
        assert queue.peek(4, NO_LIMIT).tolist() == [3, 2, 1, 0]
        assert queue.check_invariants() == []


def test_a_lifted_slot_returns_to_its_place() -> None:
    queue = EvictionQueue(8)
    queue.push(array([0, 1, 2, 3, 4]))
    queue.try_lift(array([1, 3]))
    assert queue.is_queued(array([0, 1, 2, 3])).tolist() == [True, False, True, False]
    assert queue.peek(8, NO_LIMIT).tolist() == [0, 2, 4]
    queue.push(array([5]))
    queue.restore(array([3, 1]))
    assert queue.pop(8, NO_LIMIT).tolist() == [0, 1, 2, 3, 4, 5]


def test_lifting_a_slot_that_is_not_queued_lifts_none() -> None:
    queue = EvictionQueue(8)
    queue.push(array([0, 1, 2]))
    assert queue.try_lift(array([1]))
    for away in (1, 5):
        assert not queue.try_lift(array([0, away, 2]))
        assert queue.peek(8, NO_LIMIT).tolist() == [0, 2]
        assert len(queue) == 2
    assert queue.check_invariants() == []


def test_a_lifted_slot_returns_to_the_cold_end_behind_which_eviction_has_gone() -> None:
    queue = EvictionQueue(8)
    queue.push(array([0, 1, 2, 3]))
    queue.try_lift(array([0, 1]))
    queue.trim(8)
    assert queue.pop(1, NO_LIMIT).tolist() == [2]
    queue.restore(array([1]))
    queue.restore(array([0]))
    assert queue.pop(8, NO_LIMIT).tolist() == [0, 1, 3], "in the order in which they were"


def test_lifting_and_restoring_again_and_again_keeps_the_order() -> None:
    queue = EvictionQueue(5)
    queue.push(array([0, 1, 2, 3, 4]))
    for _ in range(200):
        queue.try_lift(array([1, 2]))
        queue.renew(array([4]))
        queue.restore(array([2, 1]))
        assert sorted(queue.peek(5, NO_LIMIT).tolist()) == [0, 1, 2, 3, 4]
        assert queue.peek(5, NO_LIMIT).tolist()[-1] == 4
        assert queue.check_invariants() == []
    assert queue.used <= 15


def test_a_trim_lets_peek_begin_behind_dead_entries() -> None:
    queue = EvictionQueue(1000)
    queue.push(np.arange(1000, dtype=np.int32))
    queue.drop(np.arange(500, dtype=np.int32))
    queue.trim(600)
    assert queue.peek(10, 10).tolist() == list(range(500, 510))


def test_peek_changes_nothing() -> None:
    queue = EvictionQueue(8)
    queue.push(array([3, 4, 5]))
    assert queue.peek(2, NO_LIMIT).tolist() == [3, 4]
    assert queue.peek(8, NO_LIMIT).tolist() == [3, 4, 5]
    assert queue.pop(8, NO_LIMIT).tolist() == [3, 4, 5]


def test_pop_stops_at_the_scan_limit_and_goes_on_from_there() -> None:
    queue = EvictionQueue(1000)
    queue.push(np.arange(1000, dtype=np.int32))
    queue.drop(np.arange(500, dtype=np.int32))
    assert queue.pop(10, 200).tolist() == []
    assert queue.pop(10, 200).tolist() == []
    assert queue.pop(10, 105).tolist() == [500, 501, 502, 503, 504]
    assert queue.pop(3, 100).tolist() == [505, 506, 507]
    assert len(queue) == 492


def test_peek_looks_at_no_more_than_the_scan_limit() -> None:
    queue = EvictionQueue(1000)
    queue.push(np.arange(1000, dtype=np.int32))
    queue.drop(np.arange(500, dtype=np.int32))
    assert queue.peek(10, 500).tolist() == []
    assert queue.peek(10, 503).tolist() == [500, 501, 502]


def test_a_queue_needs_a_slot() -> None:
    with pytest.raises(UsageError):
        EvictionQueue(0)


@settings(max_examples=200)
@given(data=st.data(), capacity=st.integers(1, 12))
def test_any_sequence_of_calls_keeps_the_order(data: st.DataObject, capacity: int) -> None:
    queue, naive = EvictionQueue(capacity), NaiveQueue()
    lifted: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        queued = list(naive.order)
        idle = sorted(set(range(capacity)) - set(queued))
        match data.draw(
            st.sampled_from(["push", "push", "lift", "restore", "restore", "drop", "renew", "trim", "pop"])
        ):
            case "push":
                slots = data.draw(st.permutations(idle))[: data.draw(st.integers(0, capacity))]
                queue.push(array(slots))
                naive.push(slots)
            case "lift":
                slots = data.draw(st.permutations(queued))[: data.draw(st.integers(0, capacity))]
                away = list(lifted)  # each may return to its place, which may be colder
                lifted |= {slot: queued[: queued.index(slot)] + away for slot in slots}
                queue.try_lift(array(slots))
                naive.drop(slots)
            case "restore":
                slots = [slot for slot in lifted if slot not in naive.order][: data.draw(st.integers(0, capacity))]
                queue.restore(array(slots))
                naive.restore(slots, lifted=lifted, found=queue.peek(capacity, NO_LIMIT).tolist())
            case "trim":
                queue.trim(data.draw(st.integers(0, capacity)))
            case "drop":
                slots = data.draw(st.permutations(queued))[: data.draw(st.integers(0, capacity))]
                queue.drop(array(slots))
                naive.drop(slots)
            case "renew":
                slots = data.draw(st.permutations(queued))[: data.draw(st.integers(0, capacity))]
                queue.renew(array(slots))
                naive.drop(slots)
                naive.push(slots)
            case _:
                n = data.draw(st.integers(0, capacity))
                assert queue.pop(n, NO_LIMIT).tolist() == naive.pop(n)
        lifted = {slot: place for slot, place in lifted.items() if slot not in naive.order}
        assert_same(queue, naive, capacity=capacity)


def batch_sizes(kind: str, *, capacity: int, generator: random.Random) -> Iterator[int]:
    """Sizes of batches that try the ring: a pass that ends just before, within and just after a large push."""
    while True:
        if kind == "small":
            yield generator.randint(1, 40)
        elif kind == "any":
            yield generator.randint(1, capacity)
        elif kind == "all":
            yield capacity
        else:
            yield from [generator.randint(1, 60)] * generator.randint(0, capacity // 40)
            yield generator.randint(capacity // 3, capacity)


@pytest.mark.parametrize("kind", ["small", "any", "all", "mixed"])
@pytest.mark.parametrize("seed", range(3))
def test_a_large_ring_never_overflows_and_keeps_the_order(kind: str, seed: int) -> None:
    """Large enough that compaction runs in many slices; pins and releases of hot slots make all entries dead."""
    capacity = 1500
    generator = random.Random(seed)
    queue, naive = EvictionQueue(capacity), NaiveQueue()
    for step, size in zip(range(200), batch_sizes(kind, capacity=capacity, generator=generator), strict=False):
        queued = list(naive.order)
        hot = generator.sample(queued, min(size, len(queued)))
        if generator.random() < 0.9:
            queue.drop(array(hot))
            naive.drop(hot)
        idle = sorted(set(range(capacity)) - set(naive.order))
        back = generator.sample(idle, min(size, len(idle)))
        cold = back[: generator.choice([0, 0, 0, len(back) // 3, len(back)])]
        queue.restore(array(cold))
        for slot in reversed(cold):  # they were dropped, not lifted: no place stands
            naive.push([slot])
            naive.order.move_to_end(slot, last=False)
        queue.push(array(back[len(cold) :]))
        naive.push(back[len(cold) :])
        if generator.random() < 0.1:
            n, limit = generator.randint(0, 50), generator.choice([7, 100, NO_LIMIT])
            taken = queue.pop(n, limit).tolist()
            assert taken == naive.pop(len(taken))
            assert limit < NO_LIMIT or len(taken) == min(n, len(taken) + len(queue))
        if step % 20 == 0:
            assert_same(queue, naive, capacity=capacity)
        assert queue.used <= 3 * capacity
    assert_same(queue, naive, capacity=capacity)


@pytest.mark.parametrize("late", [0.48, 0.58, 0.65])
@pytest.mark.parametrize("release", [0.4, 1.0])
def test_a_large_push_late_in_a_pass_fits(late: float, release: float) -> None:
    """The tight case of the argument: a pass is nearly through when more slots come back than the ring has room for."""
    capacity = 4000
    queue, naive = EvictionQueue(capacity), NaiveQueue()
    everything = list(range(capacity))
    queue.push(array(everything))
    naive.push(everything)
    for _ in range(2):
        while queue.used < 2 * capacity - 10:
            slots = list(naive.order)[:1000]
            queue.renew(array(slots[5:]))
            naive.drop(slots[5:])
            naive.push(slots[5:])
        pushed = 0
        while pushed < late * capacity:
            slots = list(naive.order)[-200:]
            queue.renew(array(slots))
            naive.drop(slots)
            naive.push(slots)
            pushed += len(slots)
        slots = list(naive.order)[-int(release * capacity) :]
        queue.drop(array(slots))
        naive.drop(slots)
        queue.push(array(slots))
        naive.push(slots)
        assert_same(queue, naive, capacity=capacity)


@pytest.mark.parametrize("seed", range(4))
def test_slots_that_return_in_the_midst_of_a_pass_are_queued_and_disturb_no_order(seed: int) -> None:
    """A ring so large that a compaction takes several pushes: a place that it has read is gone."""
    source, capacity = random.Random(seed), 200
    queue, order = EvictionQueue(capacity), list[int]()
    for _ in range(400):
        away = [slot for slot in range(capacity) if slot not in order]
        kind = source.choice(["push", "lift", "lift", "restore", "restore", "renew"])
        few = 1 if source.random() < 0.3 else capacity
        among = away if kind in ("push", "restore") else order
        slots = source.sample(among, (min(len(among), few) + 1) // 2)
        match kind:
            case "push":
                queue.push(array(slots))
                order += slots
            case "lift":
                assert queue.try_lift(array(slots))
                order = [slot for slot in order if slot not in slots]
            case "renew":
                queue.renew(array(slots))
                order = [slot for slot in order if slot not in slots] + slots
            case _:
                queue.restore(array(slots))
                found = queue.peek(capacity, NO_LIMIT).tolist()
                assert [slot for slot in found if slot in order] == order
                assert sorted(found) == sorted(order + slots)
                order = found
        assert queue.peek(capacity, NO_LIMIT).tolist() == order
        assert queue.used <= 3 * capacity
    assert queue.check_invariants() == []
