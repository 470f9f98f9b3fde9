"""Loads that bring corrupt blocks: a miss, counted, never served; everything else in the CPU tier stays as it was."""

from __future__ import annotations

from collections.abc import Collection
from itertools import permutations

import numpy as np
import pytest

from aiokv.core.counters import EvictReason
from aiokv.core.inflight import Transfer, TransferState
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.errors import UsageError
from aiokv.model.events import BlockRemoved
from aiokv.model.ids import Direction, Tier
from aiokv.model.plan import Outcome
from aiokv.model.spec import FullAttention, SlidingWindow
from aiokv.testing.host import Host, state_of
from aiokv.testing.streams import geometry_of

FULL = geometry_of(FullAttention("full", block_size=4))
HYBRID = geometry_of(FullAttention("full", block_size=4), SlidingWindow("swa", block_size=4, window=8))
GPU, CPU = Tier.GPU, Tier.CPU
OK, CORRUPT, FAILED, LOST = Outcome.OK, Outcome.CORRUPT, Outcome.FAILED, Outcome.LOST


def host(*, world_size: int = 1, gpu: int = 32, cpu: int = 32, slice_blocks: int = 1024) -> Host:
    return Host(FULL, gpu_blocks=gpu, cpu_blocks=cpu, slice_blocks=slice_blocks, world_size=world_size)


def loading(h: Host, blocks: int = 5) -> tuple[LeaseRecord, Transfer]:
    """A request whose blocks are all being loaded."""
    h.place(0, range(blocks), tier=CPU)
    record = h.admit(0, 4 * blocks + 1)
    h.run_slices()
    h.submit_all()
    (load,) = h.running
    return record, load


def spoil(h: Host, load: Transfer, *copies: int) -> None:
    """The load ends, these blocks corrupt; then everything that follows at once."""
    h.report(load, 0, outcome=CORRUPT, corrupt=copies)
    h.check()
    h.turn()
    h.check()


def loads(h: Host) -> list[Transfer]:
    return h.in_flight(direction=Direction.LOAD)


def test_a_corrupt_block_is_a_miss_and_the_good_ones_before_it_are_loaded_again() -> None:
    h = host()
    record, load = loading(h)
    torn = set(load.bound_targets.tolist())
    spoil(h, load, 2)
    assert h.letters(0).startswith("cc-cc")
    assert state_of(load) is TransferState.FAILED
    assert state_of(record) is LeaseState.LOADING
    (again,) = loads(h)
    assert again.positions.tolist() == [0, 1]
    assert not torn & set(again.bound_targets.tolist()), "a failed target is not bound again while there are others"
    h.end_all()
    assert (record.length, record.delivered.cpu_tokens, record.delivered.compute_tokens) == (8, 8, 13)
    counters = h.cache.counters
    assert (counters.corrupt_blocks, counters.load_failed_tokens[Outcome.CORRUPT]) == (1, 12)
    assert counters.evicted_blocks[CPU, EvictReason.CORRUPT] == 1
    assert counters.transferred_blocks[Direction.LOAD, CORRUPT] == 5
    assert h.letters(0).startswith("bb-cc")
    h.tear_down()


def test_the_block_removed_event_names_the_corrupt_block_and_no_other() -> None:
    h = host()
    _, load = loading(h)
    h.check()
    h.cache.events.take()
    h.cache.complete(load.transfer_id, CORRUPT, corrupt=[3])
    removed = [event for event in h.cache.events.take() if isinstance(event, BlockRemoved)]
    assert [(event.tier, [bytes(name) for name in event.block_hashes]) for event in removed] == [
        (CPU, [h.streams.digest(0, 0, 3)])
    ]


def test_a_block_that_somebody_holds_in_the_gpu_is_stored_again_in_place_of_the_corrupt_one() -> None:
    """Its copy was there when it was offered: where it has gone now, a running request has a hole."""
    h = host()
    other = h.admit(0, 21, request_id="other")
    record, load = loading(h)
    h.confirm(other, 21)
    h.run_slices()
    spoil(h, load, 1)
    assert h.letters(0).startswith("bgbbb")
    h.finish(other)
    h.end_all()
    assert h.letters(0).startswith("bbbbb")
    h.release(record)
    h.tear_down()


def test_what_is_computed_in_its_place_is_stored_again() -> None:
    h = host()
    record, load = loading(h)
    spoil(h, load, 0)
    assert (record.state, record.length) == (LeaseState.READY, 0)
    h.confirm(record, 21)
    h.finish(record)
    h.end_all()
    assert h.letters(0).startswith("bbbbb")
    h.tear_down()


def test_a_copy_that_is_in_the_gpu_meanwhile_takes_the_place_of_the_corrupt_one() -> None:
    h = host()
    record, load = loading(h)
    h.place(0, range(5), tier=GPU)
    spoil(h, load, 0, 4)
    assert state_of(record) is LeaseState.READY
    assert (record.length, record.delivered.gpu_tokens) == (20, 20)
    assert sum(h.cache.counters.load_failed_tokens.values()) == 0
    h.tear_down()


def test_in_a_full_pool_the_failed_targets_make_room_for_the_new_plan() -> None:
    h = host(gpu=7)
    record, load = loading(h)
    assert h.counts(GPU).free == 0
    spoil(h, load, 3)
    h.end_all()
    assert (state_of(record), record.length) == (LeaseState.READY, 12)
    h.tear_down()


def test_all_who_joined_the_load_are_planned_again_and_share_the_next_one() -> None:
    h = host()
    first, load = loading(h)
    joined = [h.admit(0, 4 * blocks + 1, request_id=f"joined {blocks}") for blocks in (1, 3, 5)]
    assert loads(h) == [load]
    spoil(h, load, 1)
    (again,) = loads(h)
    assert again.waiters == {record.lease_id for record in (first, *joined)}
    h.end_all()
    assert [record.length for record in (first, *joined)] == [4, 4, 4, 4]
    assert h.cache.counters.corrupt_blocks == 1
    h.tear_down()


def test_a_second_corruption_takes_the_best_prefix_without_loads() -> None:
    h = host()
    record, load = loading(h)
    spoil(h, load, 4)
    (again,) = loads(h)
    h.submit_all()
    spoil(h, again, 1, 2)
    assert loads(h) == []
    assert (state_of(record), record.length) == (LeaseState.READY, 0)
    assert h.letters(0).startswith("c--c-")
    assert h.cache.counters.corrupt_blocks == 3
    assert sum(h.cache.counters.load_failed_tokens.values()) == 20
    h.tear_down()


@pytest.mark.parametrize("slice_blocks", [1, 2, 1024])
def test_a_holder_that_has_left_leaves_the_corrupt_blocks_unfindable(slice_blocks: int) -> None:
    h = host(slice_blocks=slice_blocks)
    record, load = loading(h)
    h.release(record)
    spoil(h, load, 0, 3)
    assert h.letters(0).startswith("-cc-c")
    assert h.counts(GPU).reserved == 0, "nothing that the load wrote is kept"
    assert h.counts(CPU).resident == 3
    h.tear_down()


def test_nothing_of_a_corrupt_load_is_registered_though_its_other_blocks_are_good() -> None:
    """Law 3: the transfer as a whole has failed."""
    h = host()
    record, load = loading(h)
    h.release(record)
    spoil(h, load, 4)
    assert "g" not in h.letters(0)
    assert "b" not in h.letters(0)
    h.tear_down()


def test_two_groups_lose_only_the_block_of_the_group_that_was_loaded() -> None:
    h = Host(HYBRID, gpu_blocks=64, cpu_blocks=64)
    for group in (0, 1):
        h.place(0, range(5), group=group, tier=CPU)
    record = h.admit(0, 21)
    h.submit_all()
    full, windowed = h.running
    assert (full.group, windowed.group) == (0, 1)
    h.end(full)
    spoil(h, windowed, 0)
    assert h.letters(0, 0).startswith("bbbbb")
    assert h.letters(0, 1).startswith("ccc-c")
    h.end_all()
    assert state_of(record) is LeaseState.READY
    assert record.length == 12, "the window before position 12 is whole"
    h.tear_down()


# The slot and what may have become of it.


@pytest.mark.parametrize("tiers", [(GPU,), (CPU,), (GPU, CPU)], ids=str)
@pytest.mark.parametrize("is_swept", [False, True])
def test_a_block_of_an_older_epoch_takes_nothing_with_it(tiers: tuple[Tier, ...], is_swept: bool) -> None:  # noqa: FBT001
    """Invariant 4: the same hash, placed again after the reset, is another slot's."""
    h = host()
    record, load = loading(h)
    h.reset(*tiers)
    if is_swept:
        h.run_slices()
    if CPU in tiers:
        h.place(0, range(5), tier=CPU)
    found = h.cache.find_blocks(h.keys(0), group=0, tier=CPU)
    assert bool(np.isin(found.slots[:5], load.sources).any()) == (CPU not in tiers)
    spoil(h, load, 1, 2)
    h.end_all()
    assert state_of(record) is LeaseState.READY
    on_cpu = [letter in "cb" for letter in h.letters(0)[:5]]
    assert on_cpu == ([True] * 5 if CPU in tiers else [True, False, False, True, True])
    assert h.cache.counters.corrupt_blocks == 2
    assert h.cache.counters.evicted_blocks[CPU, EvictReason.CORRUPT] == (0 if CPU in tiers else 2)
    h.tear_down()


def test_no_other_block_can_get_the_slot_of_a_corrupt_one_before_its_load_has_ended() -> None:
    """Law 4: pins guard it, first under its own name, then as a slot without one."""
    h = host(world_size=2, cpu=6)
    record, load = loading(h)
    h.report(load, 0, outcome=CORRUPT, corrupt=[2])
    slot = int(load.sources[2])
    others = [h.admit(1, 25, request_id="others")]
    h.confirm(others[0], 25)
    h.finish(others[0])
    h.turn()
    h.submit_all()
    taken = [s for t in h.in_flight(direction=Direction.STORE) for s in t.bound_targets.tolist()]
    assert len(taken) == 1, "the one free slot; the others are read by the load"
    assert slot not in taken
    h.check()
    h.report(load, 1)
    assert h.counts(CPU).free == 1
    h.turn()
    h.end_all()
    assert state_of(record) is LeaseState.READY
    newcomer = h.admit(2, 25, request_id="newcomer")
    h.confirm(newcomer, 25)
    h.finish(newcomer)
    h.end_all()
    before = h.cache.snapshot()
    with pytest.raises(UsageError):
        h.cache.report(load.transfer_id, 1, CORRUPT, corrupt=[2])
    assert h.cache.snapshot() == before, "a late report changes nothing of what is in the slot by now"
    h.tear_down()


def test_two_loads_of_one_slot_may_both_find_it_corrupt() -> None:
    """The second began after one rank had failed the first; the block is gone with whoever says so first."""
    h = host(world_size=2, gpu=64)
    first, doomed = loading(h)
    h.report(doomed, 0, outcome=FAILED)
    second = h.admit(0, 21, request_id="second")
    h.submit_all()
    (fresh,) = [load for load in h.running if load is not doomed]
    assert fresh.sources.tolist() == doomed.sources.tolist()
    h.report(doomed, 1, outcome=CORRUPT, corrupt=[0])
    h.check()
    assert h.letters(0).startswith("-cccc")
    h.report(fresh, 1, outcome=CORRUPT, corrupt=[0, 1])
    h.report(fresh, 0)
    h.end_all()
    assert h.letters(0).startswith("--ccc")
    assert h.cache.counters.evicted_blocks[CPU, EvictReason.CORRUPT] == 2
    assert [first.length, second.length] == [0, 0]
    assert h.counts(CPU).resident == 3
    h.tear_down()


# Ranks.


@pytest.mark.parametrize("order", [*permutations(range(3))], ids=str)
def test_what_any_rank_finds_corrupt_is_gone_from_its_report_on_in_any_order(order: tuple[int, ...]) -> None:
    named: dict[int, Collection[int]] = {0: (), 1: (1, 3), 2: (3, 4)}
    h = host(world_size=3)
    record, load = loading(h)
    gone: set[int] = set()
    for rank in order:
        h.report(load, rank, outcome=CORRUPT if named[rank] else OK, corrupt=named[rank])
        gone |= set(named[rank])
        assert h.letters(0)[:5] == "".join("-" if position in gone else "c" for position in range(5))
        h.check()
    h.end_all()
    assert (state_of(record), record.length) == (LeaseState.READY, 4)
    assert h.cache.counters.corrupt_blocks == 3, "a block that two ranks name is one"
    assert h.cache.counters.rank_reports[CORRUPT] == 2
    h.tear_down()


def test_a_request_that_comes_between_two_reports_does_not_hit_the_corrupt_block() -> None:
    h = host(world_size=2, gpu=64)
    _, load = loading(h)
    h.report(load, 1, outcome=CORRUPT, corrupt=np.array([2]))
    late = h.admit(0, 21, request_id="late")
    assert late.length == 8
    assert late.lease_id not in load.waiters, "it waits for a copy of its own, not for one that has failed"
    h.report(load, 0)
    h.end_all()
    h.tear_down()


@pytest.mark.parametrize(
    ("worse", "state"), [(FAILED, TransferState.FAILED), (LOST, TransferState.QUARANTINED)], ids=str
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_worse_report_of_another_rank_decides_and_the_corrupt_block_is_gone_all_the_same(
    worse: Outcome,
    state: TransferState,
    is_first: bool,  # noqa: FBT001
) -> None:
    h = host(world_size=2)
    record, load = loading(h)
    reports: list[tuple[int, Outcome, tuple[int, ...]]] = [(0, worse, ()), (1, CORRUPT, (3,))]
    for rank, outcome, copies in reports if is_first else reports[::-1]:
        h.report(load, rank, outcome=outcome, corrupt=copies)
    h.turn()
    assert state_of(load) is state
    assert (state_of(record), record.length) == (LeaseState.READY, 0), "what failed is not loaded again"
    assert h.letters(0).startswith("ccc-c" if worse is FAILED else "-----")
    assert h.cache.counters.corrupt_blocks == 1
    h.check()
    h.tear_down()


def test_the_same_corrupt_report_twice_counts_once_and_another_one_is_refused() -> None:
    h = host(world_size=2)
    record, load = loading(h)
    h.report(load, 1, outcome=CORRUPT, corrupt=[1, 2])
    before = h.cache.snapshot()
    for same in ([2, 1], (1, 2, 2), {1, 2}):
        h.cache.report(load.transfer_id, 1, CORRUPT, corrupt=same)
    for outcome, other in ((CORRUPT, [1]), (CORRUPT, [1, 2, 3]), (OK, []), (FAILED, [])):
        with pytest.raises(UsageError):
            h.cache.report(load.transfer_id, 1, outcome, corrupt=other)
    assert h.cache.snapshot() == before
    assert h.cache.counters.corrupt_blocks == 2
    assert h.cache.counters.rank_reports[CORRUPT] == 1
    h.report(load, 0)
    h.end_all()
    assert record.length == 4
    h.tear_down()


@pytest.mark.parametrize(
    ("outcome", "copies"),
    [
        (CORRUPT, []), (CORRUPT, [5]), (CORRUPT, [-1]), (CORRUPT, [0, 5]), (CORRUPT, [True]), (CORRUPT, [1.0]),
        (CORRUPT, "0"), (CORRUPT, [None]), (CORRUPT, None), (CORRUPT, 1), (CORRUPT, np.array([[0]])), (OK, None),
        (OK, [0]), (FAILED, [0]), (LOST, [0]), (Outcome.DROPPED, [0]),
    ],
    ids=str,
)  # fmt: skip
def test_a_report_that_names_what_cannot_be_corrupt_changes_nothing(outcome: Outcome, copies: Collection[int]) -> None:
    h = host()
    _, load = loading(h)
    before = h.cache.snapshot()
    with pytest.raises(UsageError):
        h.cache.report(load.transfer_id, 0, outcome, corrupt=copies)
    with pytest.raises(UsageError):
        h.cache.complete(load.transfer_id, outcome, corrupt=copies)
    assert h.cache.snapshot() == before
    assert h.cache.counters.corrupt_blocks == 0
    h.tear_down()


def test_a_store_and_a_load_that_has_not_begun_cannot_be_corrupt() -> None:
    h = host()
    record = h.admit(1, 17, request_id="stored")
    h.confirm(record, 17)
    h.turn()
    h.submit_all()
    (store,) = h.running
    h.place(0, range(5), tier=CPU)
    h.admit(0, 21)
    h.run_slices()
    (load,) = loads(h)
    before = h.cache.snapshot()
    for transfer in (store, load):
        with pytest.raises(UsageError):
            h.cache.complete(transfer.transfer_id, CORRUPT, corrupt=[0])
        with pytest.raises(UsageError):
            h.cache.report(transfer.transfer_id, 0, CORRUPT, corrupt=[0])
    assert h.cache.snapshot() == before
    h.tear_down()


def test_nobody_joins_a_load_whose_end_is_being_worked_off_in_slices() -> None:
    h = host(slice_blocks=1, gpu=64)
    record, load = loading(h)
    h.report(load, 0, outcome=CORRUPT, corrupt=[4])
    assert h.cache.unfinished_transfers == 1
    late = h.admit(0, 21, request_id="late")
    assert late.length == 16
    assert late.lease_id not in load.waiters
    h.turn()
    h.end_all()
    assert [state_of(record), state_of(late)] == [LeaseState.READY] * 2
    h.tear_down()
