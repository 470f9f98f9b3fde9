"""Failed loads: planned again once, atomically; the outcome is told as it is, and nobody waits for ever."""

from __future__ import annotations

import pytest

from aiokv.core.counters import Source
from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.errors import CapacityError
from aiokv.model.ids import Direction, Tier
from aiokv.model.plan import DeferReason, Deferred, Hit, Outcome
from aiokv.model.spec import FullAttention, RecurrentState, SlidingWindow
from aiokv.testing.host import Host, state_of
from aiokv.testing.streams import geometry_of

FULL = geometry_of(FullAttention("full", block_size=4))
GPU, CPU = Tier.GPU, Tier.CPU


def host(*, gpu: int = 32, cpu: int = 32, slice_blocks: int = 1024) -> Host:
    return Host(FULL, gpu_blocks=gpu, cpu_blocks=cpu, slice_blocks=slice_blocks)


def table(host: Host, record: LeaseRecord, group: int = 0) -> list[int]:
    return list(map(int, host.cache.block_ids(record, group=group)))


def load_of(host: Host, record: LeaseRecord) -> Transfer:
    """The one load that a lease has of its own."""
    (load,) = [t for t in host.in_flight(direction=Direction.LOAD) if t.owner == record.lease_id]
    return load


def fail(host: Host, transfer: Transfer, outcome: Outcome = Outcome.FAILED) -> None:
    if transfer in host.queued:
        host.submit(transfer)
    host.end(transfer, outcome)
    host.check()
    host.run_slices()
    host.check()


def test_a_failed_load_shortens_the_prefix_and_every_later_position_gets_a_slot_of_its_own() -> None:
    h = host()
    h.place(0, [0, 1, 4], tier=GPU)
    h.place(0, [2, 3], tier=CPU)
    record = h.admit(0, 21)
    resident = table(h, record)[4]
    load = load_of(h, record)
    failed = set(load.bound_targets.tolist())
    fail(h, load)
    assert (record.state, record.length, record.confirmed) == (LeaseState.READY, 8, 8)
    assert record.hit == Hit(prompt_tokens=21, gpu_tokens=12, cpu_tokens=8, compute_tokens=1)
    assert record.delivered == Hit(prompt_tokens=21, gpu_tokens=8, cpu_tokens=0, compute_tokens=13)
    slots = table(h, record)
    assert len(set(slots)) == len(slots) == 6
    assert resident not in slots, "a resident block is never written"
    assert not failed & set(slots), "a failed target is not reused while there are other slots"
    assert h.cache.counters.load_failed_tokens[Outcome.FAILED] == 12
    h.confirm(record, 21)
    assert h.letters(0)[:5] == "ggbbg", "the failed copy says nothing about its source"
    h.check()
    h.tear_down()


def test_a_failed_key_that_was_computed_meanwhile_is_taken_from_the_gpu() -> None:
    h = host()
    other = h.admit(0, 17)
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 17)
    h.confirm(other, 17)
    fail(h, load_of(h, record))
    assert record.delivered == Hit(prompt_tokens=17, gpu_tokens=16, cpu_tokens=0, compute_tokens=1)
    assert table(h, record)[:4] == table(h, other)[:4]
    h.check()
    h.tear_down()


def test_the_owner_of_a_load_fails_and_a_joiner_keeps_what_its_own_load_brought() -> None:
    h = host(gpu=64, cpu=64)
    other = h.admit(2, 21)
    h.place(0, range(8), tier=CPU)
    h.place(2, range(8), tier=CPU)
    owner, joiner = h.admit(0, 33), h.admit(2, 33)
    assert load_of(h, joiner).positions.tolist() == [5, 6, 7], "five blocks are shared"
    h.submit_all()
    h.end(load_of(h, joiner))
    h.confirm(other, 21)
    fail(h, load_of(h, owner))
    assert owner.length == 20
    assert joiner.delivered == Hit(prompt_tokens=33, gpu_tokens=20, cpu_tokens=12, compute_tokens=1)
    h.check()
    h.tear_down()


def test_a_lease_with_two_loads_is_planned_again_when_both_have_ended() -> None:
    h = host()
    h.place(0, range(4), tier=CPU)
    first = h.admit(0, 9)
    second = h.admit(0, 17)
    mine, shared = load_of(h, second), load_of(h, first)
    fail(h, mine)
    assert state_of(second) is LeaseState.LOADING
    h.submit_all()
    h.end(shared)
    assert second.delivered == Hit(prompt_tokens=17, gpu_tokens=0, cpu_tokens=8, compute_tokens=9)
    h.check()
    h.tear_down()


def reloading(h: Host) -> LeaseRecord:
    """A lease that hits two blocks, loads two, and must load the former again because the GPU tier was reset."""
    h.place(0, [0, 1], tier=GPU)
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 17)
    h.submit_all()
    h.reset(GPU)
    return record


def test_the_second_plan_may_load_what_has_not_failed() -> None:
    h = host()
    record = reloading(h)
    fail(h, load_of(h, record))
    assert (record.state, record.length) == (LeaseState.LOADING, 8)
    assert load_of(h, record).positions.tolist() == [0, 1]
    h.end_all()
    assert record.delivered == Hit(prompt_tokens=17, gpu_tokens=0, cpu_tokens=8, compute_tokens=9)
    h.check()
    h.tear_down()


def test_a_second_failure_takes_the_best_prefix_without_loads() -> None:
    h = host()
    record = reloading(h)
    fail(h, load_of(h, record))
    fail(h, load_of(h, record))
    assert (record.state, record.length) == (LeaseState.READY, 0)
    assert not h.in_flight(direction=Direction.LOAD)
    assert h.letters(0)[:4] == "cccc"
    h.confirm(record, 17)
    h.check()
    h.tear_down()


def test_after_a_second_failure_nothing_is_loaded_though_it_could_be() -> None:
    h = Host(geometry_of(SlidingWindow("window", block_size=4, window=6)), gpu_blocks=20, cpu_blocks=20)
    h.place(0, range(6), tier=CPU)
    record = h.admit(0, 25)
    lengths = []
    while record.state is LeaseState.LOADING:
        lengths.append(record.length)
        fail(h, load_of(h, record))
    assert lengths == [24, 16]
    assert record.length == 0, "the blocks of a prefix of 8 tokens are still in the CPU tier"
    h.confirm(record, 25)
    h.check()
    h.tear_down()


def test_a_new_plan_never_promises_more_than_the_old_one() -> None:
    h = Host(geometry_of(SlidingWindow("window", block_size=4, window=6)), gpu_blocks=20, cpu_blocks=20)
    h.place(0, [0, 1], tier=CPU)
    record = h.admit(0, 25)
    assert record.length == 8
    h.place(0, [4, 5], tier=GPU)
    fail(h, load_of(h, record))
    assert (record.state, record.length) == (LeaseState.READY, 0)
    h.confirm(record, 25)
    h.check()
    h.tear_down()


def test_an_extension_that_nobody_took_is_given_back_after_a_new_plan() -> None:
    h = Host(geometry_of(SlidingWindow("window", block_size=4, window=16)), gpu_blocks=20, cpu_blocks=32)
    h.place(0, range(15), tier=CPU)
    record = h.admit(0, 61, first_chunk=4)
    before = list(record.capacity_tokens)
    h.extend(record, 4)
    fail(h, load_of(h, record))
    assert record.length == 44
    h.undo_extend(record, before)
    h.end_all()
    room = min(record.capacity_tokens)
    assert room <= before[0]
    h.confirm(record, room)
    h.check()
    h.tear_down()


def test_the_second_plan_joins_a_load_that_is_under_way() -> None:
    h = host()
    record = reloading(h)
    other = h.admit(0, 9)
    fail(h, load_of(h, record))
    assert state_of(record) is LeaseState.LOADING
    assert len(h.in_flight(direction=Direction.LOAD)) == 1
    h.release(other)
    h.end_all()
    assert record.delivered.cpu_tokens == 8
    h.check()
    h.tear_down()


def test_the_second_plan_names_the_targets_of_a_load_it_joins() -> None:
    h = host(slice_blocks=2)
    h.place(0, [4], tier=CPU)
    record = reloading(h)
    other = h.admit(0, 21)
    assert not h.queued, "two of the three targets have names"
    fail(h, load_of(h, record))
    assert len(h.in_flight(direction=Direction.LOAD)) == 1
    assert table(h, record)[:2] == table(h, other)[:2]
    h.end_all()
    h.check()
    assert (record.state, other.state) == (LeaseState.READY, LeaseState.READY)
    h.tear_down()


def test_a_request_that_fills_the_pool_survives_its_failed_load() -> None:
    h = host(gpu=6)
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 17)
    assert h.counts(GPU).free == 0
    fail(h, load_of(h, record))
    assert state_of(record) is LeaseState.READY
    slots = table(h, record)
    assert len(set(slots)) == 5
    h.confirm(record, 17)
    h.check()
    h.tear_down()


def test_a_request_that_fills_the_pool_gives_up_hits_behind_the_failed_block() -> None:
    h = host(gpu=6)
    h.place(0, [1, 2, 3], tier=GPU)
    h.place(0, [0], tier=CPU)
    record = h.admit(0, 17)
    fail(h, load_of(h, record))
    assert (record.state, record.length) == (LeaseState.READY, 0)
    assert len(set(table(h, record))) == 5
    h.check()
    h.tear_down()


def waiting(h: Host) -> tuple[LeaseRecord, LeaseRecord]:
    """Two leases in a full pool whose shared load has failed: there is room for one of them."""
    h.place(0, range(4), tier=CPU)
    first, second = h.admit(0, 17), h.admit(0, 17)
    assert h.counts(GPU).free == 0
    fail(h, load_of(h, first))
    return first, second


def test_of_two_leases_that_hold_one_failed_target_one_goes_on_and_the_other_waits() -> None:
    h = host(gpu=7)
    first, second = waiting(h)
    assert (first.state, second.state) == (LeaseState.HELD, LeaseState.READY)
    assert h.cache.waits_for_capacity
    h.cache.retry_replans()
    assert state_of(first) is LeaseState.HELD
    h.confirm(second, 17)
    h.finish(second)
    h.end_all()
    assert state_of(first) is LeaseState.READY
    assert first.delivered == Hit(prompt_tokens=17, gpu_tokens=16, cpu_tokens=0, compute_tokens=1)
    h.check()
    h.tear_down()


def test_nobody_overtakes_a_lease_that_waits_to_be_planned_again() -> None:
    h = host(gpu=9)
    h.admit(1, 5)
    first, second = waiting(h)
    h.release(second)
    before = h.cache.snapshot()
    assert h.acquire(1, 4) == Deferred(DeferReason.QUEUED)
    with pytest.raises(CapacityError):
        h.acquire(1, 33)
    assert h.cache.snapshot() == before
    assert h.cache.counters.alloc_failures[DeferReason.QUEUED] == 1
    h.turn()
    assert state_of(first) is LeaseState.READY
    assert isinstance(h.acquire(1, 4), LeaseRecord)
    h.tear_down()


def test_nobody_overtakes_a_lease_that_is_about_to_be_planned_again() -> None:
    h = host(gpu=16)
    h.place(0, range(4), tier=CPU)
    h.admit(0, 17)
    second = h.admit(0, 17)
    h.submit_all()
    h.end(h.running[0], Outcome.FAILED)
    assert state_of(second) is LeaseState.LOADING, "its turn is the next slice"
    assert h.acquire(1, 4) == Deferred(DeferReason.QUEUED)
    h.run_slices()
    assert state_of(second) is LeaseState.READY
    assert isinstance(h.acquire(1, 4), LeaseRecord)
    h.check()
    h.tear_down()


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.LOST])
def test_a_deferred_request_is_told_when_no_lease_goes_before_it_any_more(outcome: Outcome) -> None:
    h = host(gpu=16)
    h.place(0, range(4), tier=CPU)
    h.admit(0, 17)
    second = h.admit(0, 17)
    h.submit_all()
    h.end(h.running[0], outcome)
    assert h.acquire(1, 4) == Deferred(DeferReason.QUEUED)
    before = h.cache.capacity_generation
    h.run_slices()
    assert state_of(second) is LeaseState.READY
    assert h.cache.capacity_generation > before
    h.tear_down()


def test_a_lease_released_while_it_waits_blocks_nobody() -> None:
    h = host(gpu=7)
    first, second = waiting(h)
    h.release(first)
    assert not h.cache.waits_for_capacity
    assert isinstance(h.acquire(1, 4), LeaseRecord)
    h.check()
    assert state_of(second) is LeaseState.READY
    assert h.cache.counters.prompt_tokens[Source.CPU, next(iter(h.cache.counters.prompt_tokens))[1]] == 16
    h.tear_down()


def test_waiting_leases_go_on_in_their_order() -> None:
    h = host(gpu=8)
    h.place(0, range(4), tier=CPU)
    first, second, third = h.admit(0, 17), h.admit(0, 17), h.admit(0, 17)
    fail(h, load_of(h, first))
    assert [r.state for r in (first, second, third)] == [LeaseState.HELD, LeaseState.HELD, LeaseState.READY]
    h.release(third)
    h.turn()
    assert (first.state, second.state) == (LeaseState.READY, LeaseState.HELD)
    h.release(first)
    h.turn()
    assert state_of(second) is LeaseState.READY
    h.check()
    h.tear_down()


def test_capacity_that_comes_while_waiting_leases_are_planned_again_is_not_missed() -> None:
    h = host(gpu=8)
    h.place(0, range(4), tier=CPU)
    first, second, third = h.admit(0, 17), h.admit(0, 17), h.admit(0, 17)
    fail(h, load_of(h, first))
    h.cache.retry_replans()
    assert (first.state, second.state) == (LeaseState.HELD, LeaseState.HELD)
    h.release(third)
    h.cache.retry_replans()
    h.run_slices()
    assert state_of(first) is LeaseState.READY
    h.check()
    h.tear_down()


def test_a_lease_that_waits_takes_nothing_that_an_older_one_waits_for() -> None:
    h = host(gpu=13)
    blocker = h.admit(2, 8)
    h.place(0, range(4), tier=CPU)
    h.place(1, range(2), tier=CPU)
    first, large = h.admit(0, 17), h.admit(0, 17)
    second, small = h.admit(1, 9), h.admit(1, 9)
    for owner in (first, second):
        fail(h, load_of(h, owner))
    assert [r.state.value for r in (first, large, second, small)] == ["held", "ready", "held", "ready"]
    h.release(blocker)
    h.turn()
    assert (first.state, second.state) == (LeaseState.HELD, LeaseState.HELD), "two slots, and the first needs four"
    h.release(large)
    h.turn()
    assert [r.state.value for r in (first, second)] == ["ready", "ready"]
    h.check()
    h.tear_down()


def test_a_lease_that_waits_may_be_extended_and_keeps_what_it_was_given() -> None:
    h = host(gpu=9)
    first, second = waiting_with_room(h)
    h.extend(first, 4)
    assert first.unnamed_claims in (0, 1)
    h.release(second)
    h.turn()
    assert state_of(first) is LeaseState.READY
    assert min(first.capacity_tokens) == 21
    slots = table(h, first)
    assert len(set(slots)) == len(slots) == 6
    h.check()
    h.tear_down()


def waiting_with_room(h: Host) -> tuple[LeaseRecord, LeaseRecord]:
    """Like `waiting`, with two slots to spare."""
    h.place(0, range(4), tier=CPU)
    first, second = h.admit(0, 17), h.admit(0, 17)
    fail(h, load_of(h, first))
    assert state_of(first) is LeaseState.HELD
    return first, second


def test_hits_for_a_new_plan_are_pinned_though_their_slots_are_promised_to_others() -> None:
    h = host(gpu=12, slice_blocks=4)
    other = h.admit(0, 17)
    h.turn()
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 17)
    h.turn()
    h.confirm(other, 17)
    h.turn()
    h.release(other)
    promised = h.admit(1, 24)
    assert promised.unnamed_claims == 2
    assert h.letters(0)[:4] == "bbcc", "the two that are left are promised, and have no names yet"
    fail(h, load_of(h, record))
    assert record.delivered == Hit(prompt_tokens=17, gpu_tokens=8, cpu_tokens=0, compute_tokens=9)
    h.check()
    h.tear_down()


def test_a_first_chunk_is_counted_anew_from_the_shorter_prefix() -> None:
    geometry = geometry_of(SlidingWindow("window", block_size=4, window=16))
    h = Host(geometry, gpu_blocks=9, cpu_blocks=32)
    h.place(0, range(15), tier=CPU)
    record = h.admit(0, 61, first_chunk=4)
    assert (record.length, record.capacity_tokens) == (60, [61])
    fail(h, load_of(h, record))
    assert (record.length, record.capacity_tokens) == (44, [48])
    assert state_of(record) is LeaseState.LOADING, "the window before the failed one is loaded"
    h.end_all()
    assert state_of(record) is LeaseState.READY
    assert [i for i, slot in enumerate(table(h, record)) if slot] == [7, 8, 9, 10, 11]
    h.extend(record, 8)
    h.confirm(record, 56)
    h.check()
    h.tear_down()


def test_a_first_chunk_with_nothing_left_of_the_prefix() -> None:
    geometry = geometry_of(SlidingWindow("window", block_size=4, window=16))
    h = Host(geometry, gpu_blocks=9, cpu_blocks=32)
    h.place(0, range(11, 15), tier=CPU)
    record = h.admit(0, 61, first_chunk=8)
    fail(h, load_of(h, record))
    assert (record.state, record.length, record.capacity_tokens) == (LeaseState.READY, 0, [8])
    assert h.counts(GPU).reserved == 2
    h.confirm(record, 8)
    h.check()
    h.tear_down()


def test_a_failed_state_falls_back_to_an_earlier_one() -> None:
    geometry = geometry_of(FullAttention("full", block_size=4), RecurrentState("state", block_size=4))
    h = Host(geometry, gpu_blocks=20, cpu_blocks=20)
    h.place(0, range(4), tier=GPU)
    h.place(0, [1, 3], group=1, tier=CPU)
    record = h.admit(0, 17)
    working = h.cache.state_slots(record, group=1).tolist()
    assert record.length == 16
    fail(h, load_of(h, record))
    assert (record.length, record.state) == (8, LeaseState.LOADING)
    h.end_all()
    assert record.delivered == Hit(prompt_tokens=17, gpu_tokens=4, cpu_tokens=4, compute_tokens=9)
    assert h.cache.state_slots(record, group=1).tolist() == working
    assert [i for i, slot in enumerate(table(h, record, 1)) if slot] == [1]
    h.check()
    h.confirm(record, 16, states=(16,))
    h.check()
    h.tear_down()


def test_a_failed_window_shortens_the_prefix_of_all_groups() -> None:
    geometry = geometry_of(FullAttention("full", block_size=4), SlidingWindow("window", block_size=4, window=6))
    h = Host(geometry, gpu_blocks=32, cpu_blocks=32)
    h.place(0, range(6), tier=GPU)
    h.place(0, [1, 2], group=1, tier=GPU)
    h.place(0, [4, 5], group=1, tier=CPU)
    record = h.admit(0, 25)
    assert record.length == 24
    fail(h, load_of(h, record))
    assert record.delivered == Hit(prompt_tokens=25, gpu_tokens=12, cpu_tokens=0, compute_tokens=13)
    assert [i for i, slot in enumerate(table(h, record, 1)) if slot] == [1, 2, 3, 4, 5, 6]
    h.confirm(record, 25)
    h.check()
    h.tear_down()


def test_a_lease_from_before_a_reset_is_planned_again_and_registers_nothing() -> None:
    h = host()
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 17)
    h.submit_all()
    h.reset()
    fail(h, load_of(h, record))
    assert (record.state, record.length) == (LeaseState.READY, 0)
    h.confirm(record, 17)
    h.end_all()
    assert h.letters(0)[:4] == "----"
    h.check()
    h.tear_down()


def test_a_lost_load_in_a_full_pool_leaves_a_lease_that_waits_and_can_be_released() -> None:
    h = host(gpu=6)
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 17)
    fail(h, load_of(h, record), Outcome.LOST)
    assert state_of(record) is LeaseState.HELD
    h.turn()
    assert state_of(record) is LeaseState.HELD
    h.release(record)
    assert isinstance(h.acquire(1, 4), LeaseRecord)
    h.check()
    h.tear_down()


def test_a_hit_whose_slot_is_lost_gives_no_room_to_a_new_plan() -> None:
    h = host(gpu=8)
    first = h.admit(0, 9)
    h.confirm(first, 9)
    h.turn()
    h.submit_all()
    h.release(first)
    h.place(0, [2, 3], tier=CPU)
    record = h.admit(0, 25)
    assert h.counts(GPU).free == 0
    (store,) = h.in_flight(direction=Direction.STORE)
    h.submit_all()
    h.end(store, Outcome.LOST)
    fail(h, load_of(h, record))
    assert state_of(record) is LeaseState.HELD, "seven blocks do not fit beside two lost slots"
    h.release(record)
    h.check()
    h.tear_down()


def test_a_copy_that_could_not_be_submitted_is_a_failed_one() -> None:
    h = host()
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 17)
    h.end(load_of(h, record), Outcome.FAILED)
    assert (record.state, record.length) == (LeaseState.READY, 0)
    h.check()
    h.tear_down()


def test_a_failed_load_is_planned_again_after_its_last_slice() -> None:
    h = host(slice_blocks=2)
    h.place(0, range(5), tier=CPU)
    record = h.admit(0, 21)
    h.turn()
    h.submit_all()
    h.end(load_of(h, record), Outcome.FAILED)
    assert state_of(record) is LeaseState.LOADING
    h.check()
    h.turn()
    assert (record.state, record.length) == (LeaseState.READY, 0)
    h.check()
    h.tear_down()


# Between the slices of a new plan.


def half_planned(h: Host) -> tuple[LeaseRecord, set[int]]:
    """A lease of 21 blocks whose load of 20 has failed: it is planned again, and hardly any block has a name yet.

    Also the targets that have failed.
    """
    h.place(0, range(20), tier=CPU)
    record = h.admit(0, 81, reserve_tokens=3)
    h.turn()
    load = load_of(h, record)
    failed = set(load.bound_targets.tolist())
    h.submit(load)
    h.end(load, Outcome.FAILED)
    while record.replans == 0:
        h.run_slice()
    h.check()
    assert record.unnamed_claims >= 16
    return record, failed


def test_a_new_plan_is_named_in_slices_and_keeps_failed_targets_from_everybody_until_it_is() -> None:
    """Laws 4 and 8: nobody, this lease least of all, is given a slot that a failed copy was to fill."""
    h = host(gpu=64, slice_blocks=4)
    record, failed = half_planned(h)
    others = h.admit(1, 40)
    while record.unnamed_claims:
        before = record.unnamed_claims
        assert h.counts(GPU).reserved >= 20, "what was dropped is still pinned"
        h.run_slice()
        h.check()
        assert before - record.unnamed_claims <= 4
    slots = table(h, record)
    assert len(set(slots)) == len(slots) == 21
    assert not failed & set(slots)
    assert not failed & set(others.tables[0].view().tolist())
    h.run_slices()
    assert h.counts(GPU).reserved == 21 + 10, "it has given back what it dropped"
    h.confirm(record, 81)
    h.check()
    h.tear_down()


@pytest.mark.parametrize("how", ["release", "finish", "preempt"])
def test_a_lease_that_leaves_between_the_slices_of_a_new_plan_gives_everything_back(how: str) -> None:
    """Invariant 12: what it has, what it has not named, and what it was about to drop."""
    h = host(gpu=64, slice_blocks=4)
    record, _ = half_planned(h)
    getattr(h, how)(record)
    h.check()
    h.run_slices()
    h.check()
    assert (h.counts(GPU).reserved, h.counts(GPU).claimed) == (0, 0)
    h.tear_down()


def test_a_reset_and_a_read_between_the_slices_of_a_new_plan() -> None:
    h = host(gpu=64, slice_blocks=4)
    record, failed = half_planned(h)
    h.reset()
    h.check()
    assert not failed & set(table(h, record)), "reading the table names the rest"
    assert h.counts(GPU).reserved == 21
    h.check()
    h.tear_down()


def test_what_is_about_to_be_dropped_is_not_counted_against_an_extension() -> None:
    """It comes back by itself: the 41 blocks fit into 51 slots, and 20 failed targets beside them would not."""
    h = host(gpu=52, slice_blocks=4)
    record, _ = half_planned(h)
    assert h.extend(record, 80) == Deferred(DeferReason.CAPACITY)
    h.run_slices()
    assert h.extend(record, 80) == 164
    h.check()
    h.tear_down()


def test_a_load_that_fails_while_another_lease_is_planned_again_waits_for_its_turn() -> None:
    """Law 8: one plan a slice, however many fail at once."""
    h = host(gpu=64, slice_blocks=4)
    h.place(1, range(3), tier=CPU)
    second = h.admit(1, 13)
    record, _ = half_planned(h)
    fails = load_of(h, second)
    h.submit_all()
    h.end(fails, Outcome.FAILED)
    assert second.replans == 0
    h.run_slices()
    assert (record.replans, second.replans) == (1, 1)
    assert (state_of(record), state_of(second)) == (LeaseState.READY, LeaseState.READY)
    h.check()
    h.tear_down()


def test_a_load_that_fails_while_the_rest_of_its_lease_is_named_is_planned_again_after_that() -> None:
    """Law 8: naming what is computed is not made up for in one hold."""
    h = host(gpu=64, slice_blocks=4)
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 81)
    (load,) = h.in_flight(direction=Direction.LOAD)
    h.submit(load)
    before = record.unnamed_claims
    assert before >= 13
    h.end(load, Outcome.FAILED)
    while record.replans == 0:
        assert before - record.unnamed_claims <= 4
        before = record.unnamed_claims
        h.run_slice()
        h.check()
    h.run_slices()
    assert (state_of(record), record.length) == (LeaseState.READY, 0)
    assert len(set(table(h, record))) == 21
    h.check()
    h.tear_down()
