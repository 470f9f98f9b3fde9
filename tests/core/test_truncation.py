"""Tokens are forgotten and others computed in their place: what was found or shared is never written again."""

from __future__ import annotations

import pytest

from aiokv.core.cache import CacheState
from aiokv.core.lease_table import AcquireRequest, LeaseRecord, LeaseState
from aiokv.errors import CapacityError, InvalidTransition, LeaseReleased, UsageError
from aiokv.model.ids import Tier
from aiokv.model.keys import BlockKeys, MediaSpan
from aiokv.model.plan import DeferReason, Deferred, Outcome
from aiokv.model.spec import ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from aiokv.testing.host import Host
from aiokv.testing.streams import geometry_of

GPU, CPU = Tier.GPU, Tier.CPU
FULL = FullAttention("full", block_size=4)
COARSE = FullAttention("coarse", block_size=8)
STATE = RecurrentState("state", block_size=4)


def host(*groups: GroupSpec, gpu: int = 40, cpu: int = 40, slice_blocks: int = 1024) -> Host:
    return Host(geometry_of(*(groups or (FULL,))), gpu_blocks=gpu, cpu_blocks=cpu, slice_blocks=slice_blocks)


def table(h: Host, record: LeaseRecord, group: int = 0) -> list[int]:
    slots: list[int] = h.cache.block_ids(record, group=group).tolist()
    return slots


def test_rejected_tokens_that_were_not_confirmed_are_only_forgotten() -> None:
    h = host()
    record = h.admit(0, 18, reserve_tokens=6)
    h.confirm(record, 18)
    before = table(h, record)
    h.append(record, 5)
    assert h.truncate(record, 19) == 18
    assert table(h, record) == before
    h.append(record, 2)
    h.confirm(record, 21)
    h.check()
    h.tear_down()


def test_a_last_block_that_is_not_full_is_written_on() -> None:
    h = host()
    record = h.admit(0, 19)
    h.confirm(record, 19)
    before = table(h, record)
    assert h.truncate(record, 17, stream=2) == 17
    assert table(h, record) == before
    h.append(record, 2)
    h.confirm(record, 19)
    h.check()
    h.tear_down()


def test_a_findable_block_is_not_written_and_its_position_gets_another_slot() -> None:
    h = host()
    record = h.admit(0, 24)
    h.confirm(record, 24)
    before = table(h, record)
    assert h.truncate(record, 18, stream=2) == 16, "block 4 is findable: its first tokens are computed again"
    after = table(h, record)
    assert after[:4] == before[:4]
    assert not set(after[4:]) & set(before)
    assert h.letters(0)[:6] == "gggggg", "what was rejected is still free cache"
    h.append(record, 6)
    h.confirm(record, 24)
    assert h.letters(2)[:6] == "gggggg"
    h.check()
    h.tear_down()


def test_all_groups_go_on_from_one_length() -> None:
    h = host(FULL, COARSE)
    record = h.admit(0, 24)
    h.confirm(record, 24)
    before = table(h, record, 0), table(h, record, 1)
    assert h.truncate(record, 13) == 8, "block 1 of the coarse group starts there, so the fine one goes back too"
    assert (table(h, record, 0)[:2], table(h, record, 1)[:1]) == (before[0][:2], before[1][:1])
    assert not set(table(h, record, 0)[2:]) & set(before[0])
    h.confirm(record, 13)
    h.check()
    h.tear_down()


def test_going_back_in_one_group_may_take_another_one_back_further() -> None:
    """23 -> 16 and 12, then 12 lies inside a findable block of 8 tokens, then 8 inside one of 12."""
    h = host(COARSE, FullAttention("twelve", block_size=12))
    record = h.admit(0, 24)
    h.confirm(record, 24)
    assert h.truncate(record, 23) == 0
    h.confirm(record, 23)
    h.check()
    h.tear_down()


def test_a_block_that_was_not_published_is_written_on() -> None:
    h = host()
    record = h.admit(0, 24)
    h.confirm(record, 24, publish_to=8)
    before = table(h, record)
    assert h.truncate(record, 18) == 18
    assert table(h, record) == before
    h.append(record, 6)
    h.confirm(record, 24)
    assert h.letters(0)[:6] == "gggggg"
    h.check()
    h.tear_down()


def test_what_waits_for_registration_is_registered_up_to_the_new_end_only() -> None:
    h = host(slice_blocks=1)
    record = h.admit(0, 24)
    h.turn()
    h.confirm(record, 24)
    assert h.letters(0)[:6] == "g-----"
    assert h.truncate(record, 18, stream=2) == 18
    h.turn()
    assert h.letters(0)[:6] == "gggg--"
    h.append(record, 6)
    h.confirm(record, 24)
    h.turn()
    assert (h.letters(0)[:6], h.letters(2)[:6]) == ("ggggg-", "gggggg"), "20 tokens are the same"
    h.check()
    h.tear_down()


@pytest.mark.parametrize("slice_blocks", [1, 1024])
def test_stores_keep_the_names_of_what_they_copy(slice_blocks: int) -> None:
    """Invariant 4: queued, running and merely offered stores carry the hashes they were planned with."""
    h = host(slice_blocks=slice_blocks)
    record = h.admit(0, 24)
    h.turn()
    h.confirm(record, 24)
    while h.letters(0)[:6] != "gggggg":
        h.cache.run_slice()
    h.truncate(record, 18, stream=2)
    h.append(record, 6)
    h.confirm(record, 24)
    h.end_all()
    assert (h.letters(0)[:6], h.letters(2)[:6]) == ("bbbbbb", "bbbbbb")
    h.check()
    h.tear_down()


def test_a_store_that_runs_keeps_its_source() -> None:
    """Law 4: the slot that a store reads is not written, whoever truncates."""
    h = host()
    record = h.admit(0, 24)
    h.confirm(record, 24)
    h.turn()
    h.submit_all()
    h.truncate(record, 4, stream=1)
    h.append(record, 20)
    h.confirm(record, 24)
    h.end_all()
    assert h.letters(0)[:6] == "bbbbbb"
    h.check()
    h.tear_down()


def test_slots_that_come_back_serve_a_full_pool() -> None:
    h = host(gpu=7, cpu=0)
    record = h.admit(0, 24)
    h.confirm(record, 24)
    assert h.counts(GPU).evictable == h.counts(GPU).free == 0
    assert h.truncate(record, 8, stream=2) == 8
    h.append(record, 16)
    h.confirm(record, 24)
    assert (h.letters(0)[:6], h.letters(2)[:6]) == ("ggggg-", "gggggg")
    h.check()
    h.tear_down()


def test_a_truncation_without_slots_is_deferred_and_changes_nothing() -> None:
    """Law 2. Blocks that somebody else holds do not come back."""
    h = host(gpu=9, cpu=0)
    record = h.admit(0, 20)
    h.confirm(record, 20)
    other = h.admit(0, 22)
    h.admit(1, 8, request_id="third")
    assert other.length == 20
    assert h.truncate(record, 8, stream=2) == Deferred(DeferReason.CAPACITY)
    assert h.cache.counters.alloc_failures[DeferReason.CAPACITY] == 1
    h.check()
    h.release(other)
    assert h.truncate(record, 8, stream=2) == 8
    h.check()
    h.tear_down()


def test_what_a_window_gave_back_cannot_be_read_again() -> None:
    h = host(SlidingWindow("window", block_size=4, window=9), cpu=0)
    record = h.admit(0, 40)
    h.confirm(record, 40)
    with pytest.raises(UsageError, match="'window' has given back blocks that queries from 32 on read"):
        h.truncate(record, 33)
    h.check()
    h.tear_down()


def test_a_window_is_truncated_where_it_still_holds_what_is_read() -> None:
    h = host(SlidingWindow("window", block_size=4, window=9), cpu=0)
    record = h.admit(0, 40)
    h.confirm(record, 38)
    assert h.truncate(record, 37) == 37
    h.confirm(record, 37)
    h.check()
    h.tear_down()


def test_positions_given_back_get_slots_again_where_nothing_before_them_is_read() -> None:
    """A chunk starts at 16 and at 32: from 32 on nothing earlier is read."""
    h = host(ChunkedLocal("chunked", block_size=4, chunk=16), cpu=0)
    record = h.admit(0, 16, reserve_tokens=44)
    h.append(record, 44)
    h.confirm(record, 52)
    assert table(h, record)[:12] == [0] * 12
    assert h.truncate(record, 32) == 32
    after = table(h, record)
    assert after[:8] == [0] * 8
    assert 0 not in after[8:]
    h.append(record, 20)
    h.confirm(record, 52)
    assert table(h, record)[:12] == [0] * 12, "given back again"
    h.check()
    assert h.truncate(record, 32) == 32
    h.check()
    h.tear_down()


def test_what_was_given_back_and_fits_no_more_is_a_capacity_error() -> None:
    h = host(ChunkedLocal("chunked", block_size=4, chunk=8), gpu=6, cpu=0)
    record = h.admit(0, 8, first_chunk=8)
    for stop in range(8, 40, 8):
        h.append(record, 8)
        h.confirm(record, stop)
        h.extend(record, 8)
    h.confirm(record, 40)
    h.extend(record, 16)
    with pytest.raises(CapacityError):
        h.truncate(record, 16)
    h.check()
    h.tear_down()


def test_a_recurrent_group_is_truncated_to_a_captured_state_only() -> None:
    h = host(STATE)
    record = h.admit(0, 24)
    h.confirm(record, 16, states=(16,))
    h.confirm(record, 18)
    held = table(h, record)
    for tokens in (17, 12, 8):
        with pytest.raises(UsageError, match=f"holds no state of exactly {tokens} tokens"):
            h.truncate(record, tokens)
    assert h.truncate(record, 16, stream=2) == 16
    assert table(h, record) == held
    h.append(record, 4)
    h.confirm(record, 20, states=(20,))
    h.check()
    h.tear_down()


def test_only_the_last_state_is_held() -> None:
    h = host(STATE, cpu=0)
    record = h.admit(0, 24)
    h.confirm(record, 16, states=(16,))
    h.confirm(record, 20, states=(20,))
    assert [slot > 0 for slot in table(h, record)] == [False, False, False, False, True, False]
    with pytest.raises(UsageError):
        h.truncate(record, 16)
    assert h.truncate(record, 20) == 20
    h.check()
    h.tear_down()


def test_without_a_prefix_everything_may_be_computed_again() -> None:
    h = host(STATE, FULL)
    record = h.admit(0, 16)
    h.confirm(record, 6)
    with pytest.raises(UsageError, match="holds no state of exactly 5 tokens"):
        h.truncate(record, 5)
    h.confirm(record, 10)
    with pytest.raises(UsageError, match="holds no state of exactly 4 tokens"):
        h.truncate(record, 4)
    assert h.truncate(record, 3) == 0
    h.check()
    h.tear_down()


def test_a_state_beyond_the_new_end_is_let_go() -> None:
    h = host(STATE, FULL)
    record = h.admit(0, 16)
    h.confirm(record, 8, states=(8,))
    assert h.truncate(record, 3) == 0
    assert set(table(h, record)) == {0}
    h.append(record, 13)
    h.confirm(record, 8, states=(8,))
    h.check()
    h.tear_down()


@pytest.mark.parametrize("tokens", [0, 15, 25, -1])
def test_neither_less_than_the_prefix_nor_more_than_is_known(tokens: int) -> None:
    h = host()
    h.place(0, range(4), tier=GPU)
    record = h.admit(0, 24)
    assert record.length == 16
    with pytest.raises(UsageError, match="16 to 24 can be kept"):
        h.truncate(record, tokens)
    assert h.truncate(record, 24) == 16, "nothing to forget"
    h.tear_down()


def test_not_while_loading_nor_afterwards() -> None:
    h = host()
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 24)
    assert record.state is LeaseState.LOADING
    with pytest.raises(InvalidTransition, match="cannot be truncated while it is loading"):
        h.truncate(record, 20)
    h.end_all()
    assert h.truncate(record, 20) == 16
    h.release(record)
    with pytest.raises(LeaseReleased):
        h.cache.truncations.truncate(record, 20)
    h.tear_down()


def test_a_media_span_is_not_cut() -> None:
    cache = CacheState(geometry_of(FULL), gpu_blocks=9)
    keys = BlockKeys(range(24), hash_block_size=4, media=[MediaSpan(b"picture", 9, 6)])
    record = cache.try_acquire(AcquireRequest(request_id="seen", keys=keys, prompt_tokens=24))
    assert isinstance(record, LeaseRecord)
    cache.confirm(record, 24)
    before = cache.snapshot()
    for tokens in (10, 14):
        with pytest.raises(UsageError, match="inside a media span"):
            cache.truncations.truncate(record, tokens)
    assert (cache.snapshot(), record.keys.num_tokens, record.confirmed) == (before, 24, 24)
    assert cache.truncations.truncate(record, 15) == 12


def test_a_reset_does_not_make_a_shared_block_writable() -> None:
    h = host()
    record = h.admit(0, 24)
    h.confirm(record, 24)
    other = h.admit(0, 25)
    h.reset(GPU)
    h.turn()
    assert h.truncate(record, 18, stream=2) == 16
    h.append(record, 6)
    h.confirm(record, 24)
    h.check()
    assert h.letters(2)[:6] == "------", "a lease of an older epoch registers nothing"
    h.release(other)
    h.tear_down()


def test_a_block_whose_copy_was_lost_is_not_written_again() -> None:
    h = host()
    record = h.admit(0, 17)
    h.confirm(record, 17)
    h.turn()
    h.submit_all()
    h.end(h.running[0], Outcome.LOST)
    lost = table(h, record)[:4]
    assert h.truncate(record, 9, stream=2) == 8
    h.append(record, 8)
    h.confirm(record, 17)
    assert not set(table(h, record)[2:]) & set(lost)
    h.check()
    h.tear_down()


def test_what_is_given_up_is_counted() -> None:
    h = host()
    record = h.admit(0, 24)
    h.confirm(record, 24)
    h.truncate(record, 18)
    assert h.cache.counters.truncated_tokens == 8
    h.truncate(record, 17)
    assert h.cache.counters.truncated_tokens == 8
    h.tear_down()
