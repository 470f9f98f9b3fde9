"""Leases that wait for each other's slots, and nobody else could give any back: one of them does."""

from __future__ import annotations

import pytest

from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.model.ids import Direction, Tier
from aiokv.model.plan import Hit, Outcome
from aiokv.model.spec import CacheGeometry, FullAttention, RecurrentState, SlidingWindow
from aiokv.testing.host import Host, state_of
from aiokv.testing.streams import geometry_of

FULL = geometry_of(FullAttention("full", block_size=4))


def stuck(
    count: int, *, gpu: int, geometry: CacheGeometry = FULL, first_chunk: int | None = None
) -> tuple[Host, list[LeaseRecord]]:
    """Leases for one prompt of 6 blocks: the first is in the CPU tier, the next three in the GPU's. The load fails."""
    h = Host(geometry, gpu_blocks=gpu, cpu_blocks=8, slice_blocks=2)
    h.place(0, [1, 2, 3], tier=Tier.GPU)
    h.place(0, [0], tier=Tier.CPU)
    records = [h.admit(0, 21, first_chunk=first_chunk) for _ in range(count)]
    h.run_slices()
    h.submit_all()
    (load,) = h.in_flight(direction=Direction.LOAD)
    h.end(load, Outcome.FAILED)
    h.check()
    h.end_all()  # stores of the hits: they hold their sources until then
    return h, records


def go_on(h: Host, record: LeaseRecord) -> None:
    h.confirm(record, 21)
    h.finish(record)
    h.end_all()
    h.turn()
    h.check()


def test_two_leases_that_hold_what_the_other_needs_do_not_wait_for_ever() -> None:
    """Both share the hits, which a failed block before them has made useless, and have no room to compute them."""
    h, (first, second) = stuck(2, gpu=9)
    h.turn()
    assert (state_of(first), state_of(second)) == (LeaseState.READY, LeaseState.HELD)
    assert first.delivered == Hit(prompt_tokens=21, gpu_tokens=0, cpu_tokens=0, compute_tokens=21)
    assert len(set(h.cache.block_ids(first, group=0).tolist())) == 6
    go_on(h, first)
    assert state_of(second) is LeaseState.READY
    assert sum((second.delivered.gpu_tokens, second.delivered.cpu_tokens, second.delivered.compute_tokens)) == 21
    h.tear_down()


def test_a_crowd_at_a_standstill_goes_on_in_its_order() -> None:
    h, records = stuck(4, gpu=13)
    h.turn()
    for record in records:
        assert state_of(record) is LeaseState.READY
        go_on(h, record)
    h.tear_down()


def test_nothing_is_given_back_while_another_lease_can_end() -> None:
    """A lease that is in use gives its slots back some day: then both go on, and keep what they have till then."""
    h = Host(FULL, gpu_blocks=12, cpu_blocks=8)
    h.place(0, [1, 2, 3], tier=Tier.GPU)
    h.place(0, [0], tier=Tier.CPU)
    other = h.admit(1, 9)
    first, second = h.admit(0, 21), h.admit(0, 21)
    held = h.cache.block_ids(second, group=0).tolist()[1:]
    h.end_all(Outcome.FAILED)
    h.turn()
    assert (first.state, second.state) == (LeaseState.HELD, LeaseState.HELD)
    assert h.cache.block_ids(second, group=0).tolist()[1:] == held
    h.release(other)
    h.turn()
    assert state_of(first) is LeaseState.READY
    h.check()
    h.tear_down()


def test_a_standstill_under_stores_ends_with_them() -> None:
    """The hits are being stored and so stay pinned; whoever polls is told when it is worth trying again."""
    h = Host(FULL, gpu_blocks=9, cpu_blocks=8)
    h.place(0, [1, 2, 3], tier=Tier.GPU)
    h.place(0, [0], tier=Tier.CPU)
    first, second = h.admit(0, 21), h.admit(0, 21)
    h.run_slices()
    h.submit_all()
    (load,) = h.in_flight(direction=Direction.LOAD)
    h.end(load, Outcome.FAILED)
    h.turn()
    assert (first.state, second.state) == (LeaseState.HELD, LeaseState.HELD)
    generation = h.cache.capacity_generation
    h.end_all()
    assert h.cache.capacity_generation > generation
    h.turn()
    assert (state_of(first), state_of(second)) == (LeaseState.READY, LeaseState.HELD)
    h.tear_down()


def test_one_that_gave_all_back_can_be_extended_and_gets_that_room_too() -> None:
    h, (first, second) = stuck(2, gpu=9)
    h.turn()
    h.extend(second, 5)
    h.check()
    go_on(h, first)
    assert state_of(second) is LeaseState.READY
    assert second.capacity_tokens == [26]
    slots = h.cache.block_ids(second, group=0).tolist()
    assert len(slots) == 7
    assert all(slots)
    h.tear_down()


@pytest.mark.parametrize("way", ["release", "preempt", "reset"])
def test_one_that_gave_all_back_may_leave(way: str) -> None:
    """Invariant 12: it has nothing to give back a second time."""
    h, (first, second) = stuck(2, gpu=9)
    h.turn()
    match way:
        case "release":
            h.release(second)
        case "preempt":
            h.preempt(second)
        case _:
            h.reset()
    h.check()
    go_on(h, first)
    h.tear_down()


@pytest.mark.parametrize("gpu", range(14, 24))
def test_groups_of_every_kind_come_out_of_a_standstill(gpu: int) -> None:
    geometry = CacheGeometry(
        groups=(
            FullAttention("full", block_size=4),
            SlidingWindow("window", block_size=4, window=6),
            RecurrentState("state", block_size=4),
        ),
        hash_block_size=4,
    )
    h = Host(geometry, gpu_blocks=gpu, cpu_blocks=16)
    for group in range(3):
        h.place(0, [1, 2, 3, 4], group=group, tier=Tier.GPU)
    h.place(0, [0], tier=Tier.CPU)
    first = h.admit(0, 21, first_chunk=4)
    second = h.acquire(0, 21, first_chunk=4)
    h.end_all(Outcome.FAILED)
    h.end_all()
    h.turn()
    assert state_of(first) is LeaseState.READY
    h.check()
    h.release(first)
    h.turn()
    if isinstance(second, LeaseRecord):
        assert state_of(second) is LeaseState.READY
    h.check()
    h.tear_down()


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.LOST])
def test_a_standstill_is_noticed_though_no_room_came_with_it(outcome: Outcome) -> None:
    """A lost target gives nothing back, so nobody is told to try again."""
    h = Host(FULL, gpu_blocks=10, cpu_blocks=8)
    h.place(0, [1, 2, 3], tier=Tier.GPU)
    h.place(0, [0, 1, 2, 3], tier=Tier.CPU)
    first, second = h.admit(0, 21), h.admit(0, 21)
    h.submit_all()
    (load,) = h.running
    h.end(load, outcome)
    while h.cache.has_work:
        h.run_slice()
    assert (state_of(first), state_of(second)) == (LeaseState.READY, LeaseState.HELD)
    h.check()
    h.tear_down()
