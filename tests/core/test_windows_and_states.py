"""Windows, chunks, recurrent states and draft heads: what they cover, claim, give back and register."""

from __future__ import annotations

import pytest

from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.errors import CapacityError, UsageError
from aiokv.model.ids import Direction, Tier
from aiokv.model.plan import DeclineReason, DeferReason, Deferred
from aiokv.model.spec import ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from aiokv.testing.host import Host
from aiokv.testing.streams import geometry_of

GPU, CPU = Tier.GPU, Tier.CPU
STATE = RecurrentState("state", block_size=4)


def host(*groups: GroupSpec, gpu: int = 40, cpu: int = 40, slice_blocks: int = 1024) -> Host:
    return Host(geometry_of(*groups), gpu_blocks=gpu, cpu_blocks=cpu, slice_blocks=slice_blocks)


def window(tokens: int, *, block: int = 4) -> SlidingWindow:
    return SlidingWindow("window", block_size=block, window=tokens)


def chunked(tokens: int, *, block: int = 4) -> ChunkedLocal:
    return ChunkedLocal("chunked", block_size=block, chunk=tokens)


def held(host: Host, record: LeaseRecord, group: int = 0) -> list[int]:
    """Block positions at which the table has a slot."""
    return [i for i, slot in enumerate(host.cache.block_ids(record, group=group).tolist()) if slot]


# Windows.


@pytest.mark.parametrize(("reach", "first"), [(1, 4), (2, 3), (5, 3), (6, 2), (9, 2), (10, 1), (100, 0)])
def test_a_window_covers_what_the_next_query_reads_and_no_more(reach: int, first: int) -> None:
    h = host(window(reach))
    h.place(0, range(first, 4), tier=GPU)
    record = h.admit(0, 17)
    assert record.length == 16
    assert held(h, record) == [*range(first, 4), 4]
    h.check()
    h.release(record)
    if first < 4:
        h.evict(0, [first], tier=GPU)
        assert h.admit(0, 17).length < 16
    h.tear_down()


@pytest.mark.parametrize(("reach", "kept"), [(2, [4, 5]), (5, [3, 4, 5]), (6, [3, 4, 5]), (9, [2, 3, 4, 5])])
def test_blocks_behind_the_window_are_given_back_as_tokens_are_confirmed(reach: int, kept: list[int]) -> None:
    h = host(window(reach), cpu=0)
    record = h.admit(0, 24)
    assert held(h, record) == [0, 1, 2, 3, 4, 5]
    before = h.cache.capacity_generation
    h.confirm(record, 17)
    assert held(h, record) == kept
    assert h.cache.capacity_generation > before
    assert h.letters(0)[:5] == "gggg-", "what was given back can still be found"
    h.check()
    h.tear_down()


def test_hits_behind_the_window_are_given_back_too() -> None:
    h = host(window(9))
    h.place(0, range(4), tier=GPU)
    record = h.admit(0, 29)
    assert held(h, record) == [2, 3, 4, 5, 6, 7]
    h.confirm(record, 20)
    assert held(h, record) == [3, 4, 5, 6, 7]
    h.check()
    h.tear_down()


def test_a_window_gives_blocks_back_only_after_they_are_registered_in_slices() -> None:
    h = host(window(2), cpu=0, slice_blocks=1)
    record = h.admit(0, 17)
    h.turn()
    h.confirm(record, 17)
    assert (h.letters(0)[:5], held(h, record)) == ("g----", [0, 1, 2, 3, 4])
    h.check()
    h.turn()
    assert (h.letters(0)[:5], held(h, record)) == ("gggg-", [4])
    h.check()
    h.tear_down()


def test_a_first_chunk_limits_what_a_window_claims() -> None:
    h = host(FullAttention("full", block_size=4), window(8), gpu=64)
    record = h.admit(0, 41, first_chunk=8)
    assert (held(h, record, 0), held(h, record, 1)) == ([*range(11)], [0, 1])
    assert record.capacity_tokens == [41, 8]
    for confirmed in range(8, 41, 8):
        h.confirm(record, confirmed)
        h.extend(record, 8)
        assert len(held(h, record, 1)) <= 4
        h.check()
    h.confirm(record, 41)
    h.check()
    h.tear_down()


def test_a_window_claims_its_coverage_and_one_chunk_after_a_hit() -> None:
    h = host(window(8))
    h.place(0, range(10), tier=CPU)
    record = h.admit(0, 61, first_chunk=8)
    assert record.length == 40
    assert held(h, record) == [8, 9, 10, 11]
    assert record.capacity_tokens == [48]
    h.end_all()
    h.check()
    h.tear_down()


def test_a_prefix_that_the_pool_cannot_hold_is_not_used() -> None:
    h = host(window(40), gpu=8)
    h.place(0, range(9), tier=CPU)
    record = h.admit(0, 37, first_chunk=4)
    assert (record.state, record.length, held(h, record)) == (LeaseState.READY, 0, [0])
    h.tear_down()


def test_stores_do_not_take_slots_that_were_promised_to_an_admitted_request() -> None:
    h = host(window(4), gpu=10, slice_blocks=1)
    first = h.admit(0, 17)
    h.turn()
    h.confirm(first, 17)
    while held(h, first) != [3, 4]:
        assert h.cache.run_slice()
    promised = h.admit(1, 4 * 6)
    assert promised.unnamed_claims == 5, "all that is left"
    h.turn()
    assert h.cache.counters.store_skipped_blocks[DeclineReason.BACKPRESSURE] == 2
    h.check()
    h.end_all()
    h.check()
    h.tear_down()


def test_stores_leave_promised_slots_alone_and_count_what_they_skip() -> None:
    h = host(window(4), gpu=10)
    first = h.admit(0, 17)
    h.confirm(first, 17)
    assert held(h, first) == [3, 4]
    before = h.cache.counters.store_skipped_blocks[DeclineReason.BACKPRESSURE]
    h.admit(1, 28)
    h.turn()
    assert h.cache.counters.store_skipped_blocks[DeclineReason.BACKPRESSURE] == before, "nothing is promised any more"
    h.check()
    h.tear_down()


def offered(h: Host) -> LeaseRecord:
    """A lease whose confirmed blocks wait to be stored, three of them given back already."""
    record = h.admit(0, 17)
    h.confirm(record, 17)
    assert held(h, record) == [3, 4]
    return record


def test_a_block_that_was_evicted_before_its_store_was_planned_is_not_stored() -> None:
    h = host(window(4), gpu=6)
    offered(h)
    intruder = h.admit(1, 9)
    table = h.cache.block_ids(intruder, group=0)
    assert len(table) == 3
    h.confirm(intruder, 9)
    h.turn()
    stored = [(t.owner, t.positions.tolist()) for t in h.queued]
    assert all(positions == [3] or owner == intruder.lease_id for owner, positions in stored), stored
    h.end_all()
    h.check()
    assert h.letters(0)[:4] == "---b"
    h.tear_down()


def test_a_block_that_moved_before_its_store_was_planned_is_not_stored_from_its_old_place() -> None:
    h = host(window(4), gpu=20)
    offered(h)
    h.evict(0, [0, 1], tier=GPU)
    h.place(1, [0, 1], tier=GPU)
    h.place(0, [0, 1], tier=GPU)
    h.turn()
    assert [t.positions.tolist() for t in h.queued] == [[2, 3]]
    h.end_all()
    h.check()
    h.tear_down()


def test_within_one_release_the_tail_goes_first_over_all_groups() -> None:
    h = host(FullAttention("full", block_size=4), FullAttention("wide", block_size=8), gpu=11, cpu=0)
    record = h.admit(0, 24)
    h.confirm(record, 24)
    h.release(record)
    h.admit(1, 8)
    assert (h.letters(0, 0)[:6], h.letters(0, 1)[:3]) == ("ggggg-", "gg-")
    h.tear_down()


# Chunks.


@pytest.mark.parametrize(
    ("chunk", "tokens", "covered"), [(16, 17, []), (16, 21, [4]), (16, 29, [4, 5, 6]), (12, 29, [6]), (6, 29, [6])]
)
def test_a_chunk_covers_from_its_absolute_start(chunk: int, tokens: int, covered: list[int]) -> None:
    h = host(chunked(chunk))
    h.place(0, covered, tier=GPU)
    record = h.admit(0, tokens)
    blocks = (tokens - 1) // 4
    assert record.length == blocks * 4
    assert held(h, record) == [*covered, blocks]
    h.check()
    h.tear_down()


def test_a_chunked_group_has_a_hit_on_an_empty_cache() -> None:
    h = host(chunked(8))
    record = h.admit(0, 17)
    assert record.length == 16
    assert record.hit.gpu_tokens == 16
    h.confirm(record, 17)
    h.check()
    h.tear_down()


def test_blocks_of_earlier_chunks_are_given_back() -> None:
    h = host(chunked(8), cpu=0)
    h.place(0, [2], tier=GPU)
    record = h.admit(0, 23)
    assert record.length == 16, "at a multiple of the chunk nothing is needed"
    h.confirm(record, 23)
    assert held(h, record) == [4, 5]
    h.append(record, 2)
    h.extend(record, 2)
    h.confirm(record, 24)
    assert held(h, record) == [6]
    h.check()
    h.tear_down()


# Draft heads.


def test_the_margin_of_a_draft_head_is_probed_and_not_pinned() -> None:
    h = host(FullAttention("draft", block_size=4, lookahead=True))
    h.place(0, range(4), tier=GPU)
    record = h.admit(0, 17)
    assert record.length == 12
    slot = h.cache.block_ids(record, group=0)[3]
    found = h.cache.find_blocks(h.keys(0), group=0, tier=GPU)
    assert slot != found.slots[3]
    h.evict(0, [3], tier=GPU)
    h.check()
    h.tear_down()


def test_the_margin_of_a_draft_head_may_be_in_the_cpu_tier_and_is_not_loaded() -> None:
    h = host(FullAttention("draft", block_size=4, lookahead=True))
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 17)
    assert record.length == 12
    (load,) = h.in_flight(direction=Direction.LOAD)
    assert load.positions.tolist() == [0, 1, 2]
    h.end_all()
    h.tear_down()


# Recurrent states.


def test_a_recurrent_group_claims_two_slots_whatever_the_prompt() -> None:
    h = host(STATE, gpu=4)
    record = h.admit(0, 60)
    working, capture = h.cache.state_slots(record, group=0).tolist()
    assert working != capture
    assert 0 not in (working, capture)
    assert held(h, record) == []
    assert h.counts(GPU).free == 1
    h.check()
    h.tear_down()


def test_a_captured_state_is_found_under_its_exact_length_only() -> None:
    h = host(STATE)
    record = h.admit(0, 17)
    h.confirm(record, 9, states=(8,))
    assert h.letters(0)[:4] == "-g--"
    assert h.admit(0, 17).length == 8
    h.confirm(record, 17)
    assert h.letters(0)[:4] == "-g--", "what was not captured is not there"
    h.check()
    h.tear_down()


def test_the_next_capture_gets_a_slot_of_its_own_and_a_hit_is_only_read() -> None:
    h = host(STATE)
    record = h.admit(0, 17)
    slots = []
    for length in (4, 8, 12):
        slots.append(h.cache.state_slots(record, group=0).tolist())
        h.confirm(record, length, states=(length,))
        h.check()
    working, captures = {s[0] for s in slots}, {s[1] for s in slots}
    assert (len(working), len(captures)) == (1, 3)
    other = h.admit(0, 17)
    assert other.length == 12
    assert set(held(h, other)) == {2}
    assert int(h.cache.block_ids(other, group=0)[2]) not in h.cache.state_slots(other, group=0).tolist()
    h.confirm(other, 16, states=(16,))
    h.check()
    h.tear_down()


def test_a_captured_state_is_stored_with_the_fence_of_its_confirmation() -> None:
    h = host(STATE)
    record = h.admit(0, 17)
    h.confirm(record, 8, states=(8,), after=h.cache.fences.add("stream", "fence"))
    h.turn()
    (store,) = h.in_flight(direction=Direction.STORE)
    (fence,) = h.cache.fences.find_waits(store.sources)
    assert (store.positions.tolist(), fence.mark) == ([1], "fence")
    h.end_all()
    assert h.letters(0)[:2] == "-b"
    h.release(record)
    h.reset(GPU)
    h.turn()
    again = h.admit(0, 17)
    assert again.hit.cpu_tokens == 8
    h.end_all()
    h.check()
    h.tear_down()


def test_a_state_beyond_what_is_published_is_not_registered() -> None:
    h = host(STATE)
    record = h.admit(0, 17)
    before = h.cache.state_slots(record, group=0).tolist()
    h.confirm(record, 8, publish_to=7, states=(8,))
    assert h.letters(0)[:4] == "----"
    assert h.cache.state_slots(record, group=0).tolist() == before, "its slot serves the next capture"
    h.confirm(record, 16, publish_to=16, states=(16,))
    assert h.letters(0)[:4] == "---g"
    h.check()
    h.tear_down()


@pytest.mark.parametrize("states", [(0,), (6,), (20,), (8, 12), (4,)])
def test_states_that_cannot_have_been_captured_are_refused(states: tuple[int, ...]) -> None:
    h = host(STATE)
    record = h.admit(0, 33)
    h.confirm(record, 4)
    before = h.cache.snapshot()
    with pytest.raises(UsageError):
        h.cache.confirm(record, 16, states=states)
    assert h.cache.snapshot() == before
    assert record.confirmed == 4
    h.check()
    h.tear_down()


def test_a_second_copy_of_a_state_stays_private() -> None:
    h = host(STATE, cpu=0)
    first, second = h.admit(0, 17), h.admit(0, 17)
    for record in (first, second):
        h.confirm(record, 8, states=(8,))
        h.check()
    h.release(first)
    h.release(second)
    assert h.counts(GPU).resident == 1
    h.tear_down()


def test_the_pool_may_be_too_full_for_another_capture() -> None:
    h = host(STATE, gpu=5, cpu=0)
    record, other = h.admit(0, 33), h.admit(1, 33)
    h.confirm(record, 4, states=(4,))
    assert h.cache.state_slots(record, group=0)[1] == 0
    with pytest.raises(UsageError):
        h.cache.confirm(record, 8, states=(8,))
    assert h.extend(record, 0) == Deferred(DeferReason.CAPACITY)
    h.confirm(record, 8)
    h.release(other)
    assert h.extend(record, 0) == 33
    h.confirm(record, 12, states=(12,))
    assert h.letters(0)[:3] == "g-g"
    h.check()
    h.tear_down()


def test_an_extension_does_not_claim_a_second_time_what_has_no_name_yet() -> None:
    h = host(FullAttention("full", block_size=4), STATE, slice_blocks=1)
    record = h.admit(0, 17)
    assert record.unnamed_claims
    h.extend(record, 8)
    h.cache.state_slots(record, group=1)
    h.check()
    held_slots = h.counts(GPU).reserved
    assert held_slots == 7 + 2
    h.tear_down()


def test_a_state_confirmed_before_its_slot_was_named() -> None:
    h = host(STATE, slice_blocks=1)
    record = h.admit(0, 17)
    assert record.unnamed_claims == 1
    h.cache.confirm(record, 8, states=(8,))
    assert h.letters(0)[:2] == "-g"
    assert not h.cache.audit().violations


def test_states_are_captured_beyond_the_first_room_of_the_lease() -> None:
    h = host(STATE)
    record = h.admit(0, 4)
    for tokens in range(8, 80, 8):
        h.append(record, 8)
        h.extend(record, 8)
        h.confirm(record, tokens, states=(tokens,))
        h.check()
    assert h.letters(0)[:6] == "-g-g-g"
    h.tear_down()


def test_a_state_hit_needs_a_slot_beside_the_two_that_are_claimed() -> None:
    h = host(STATE, gpu=3, cpu=0)
    h.place(0, [1], tier=GPU)
    record = h.admit(0, 17)
    assert record.length == 0, "three slots do not fit into a pool of two"
    with pytest.raises(CapacityError):
        host(STATE, gpu=2).acquire(0, 4)
    h.check()
    h.tear_down()


def test_hits_of_several_kinds_meet() -> None:
    h = host(FullAttention("full", block_size=4), window(6), STATE, chunked(12))
    h.place(0, range(8), tier=GPU)
    h.place(0, range(6), group=1, tier=CPU)
    h.place(0, [3, 5], group=2, tier=CPU)
    record = h.admit(0, 33)
    assert record.length == 24
    assert [held(h, record, group) for group in range(4)] == [
        [*range(9)],
        [4, 5, 6, 7, 8],
        [5],
        [6, 7, 8],
    ]
    h.end_all()
    h.check()
    h.confirm(record, 32, states=(32,))
    h.end_all()
    h.check()
    h.tear_down()


def test_groups_with_blocks_of_different_sizes_share_the_pool() -> None:
    h = host(FullAttention("full", block_size=4), window(12, block=8), RecurrentState("state", block_size=8))
    record = h.admit(0, 41)
    h.confirm(record, 40, states=(40,))
    h.finish(record)
    h.end_all()
    assert [h.letters(0, group)[:5] for group in range(3)] == ["bbbbb", "bbbbb", "----b"]
    h.reset(GPU)
    h.turn()
    again = h.admit(0, 41)
    assert again.hit.cpu_tokens == 40
    h.end_all()
    h.check()
    h.tear_down()
