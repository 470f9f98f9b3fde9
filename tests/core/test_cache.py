"""The core, one named scenario at a time: admission, copies, confirmation, stores, resets and the ways out.

`Host.check()` compares every state with a model of what each slot really holds; `Host.tear_down()` ends a scenario with
nothing held (invariant 12).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from aiokv.core.cache import CacheState
from aiokv.core.counters import Closing
from aiokv.core.inflight import Transfer, TransferState
from aiokv.core.lease_table import AcquireRequest, LeaseRecord, LeaseState
from aiokv.core.pool import PoolCounts
from aiokv.errors import CapacityError, ConfigError, InvalidTransition, LeaseReleased, UsageError
from aiokv.model.ids import Direction, Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import DeclineReason, DeferReason, Deferred, Hit, Outcome
from aiokv.model.spec import FullAttention
from aiokv.testing.host import Host, state_of
from aiokv.testing.streams import geometry_of

FULL = geometry_of(FullAttention("full", block_size=4))
GPU, CPU = Tier.GPU, Tier.CPU


def host(*, gpu: int = 32, cpu: int = 32, slice_blocks: int = 1024, watermark: float = 0.0) -> Host:
    return Host(FULL, gpu_blocks=gpu, cpu_blocks=cpu, slice_blocks=slice_blocks, watermark=watermark)


def table(host: Host, record: LeaseRecord) -> list[int]:
    return list(map(int, host.cache.block_ids(record, group=0)))


def loads(host: Host) -> list[int]:
    """Block positions of each unfinished load."""
    return [len(t) for t in host.in_flight(direction=Direction.LOAD)]


# Admission.


def test_a_cold_prompt_claims_all_its_blocks_and_is_ready() -> None:
    h = host()
    record = h.admit(0, 17, reserve_tokens=4)
    assert state_of(record) is LeaseState.READY
    assert record.hit == Hit(prompt_tokens=17, gpu_tokens=0, cpu_tokens=0, compute_tokens=17)
    slots = table(h, record)
    assert len(slots) == len(set(slots)) == 6
    assert 0 not in slots
    h.tear_down()


def test_worked_example_of_the_contract() -> None:
    h = host()
    h.place(0, [0, 2, 4], tier=GPU)
    h.place(0, [1, 3, 4], tier=CPU)
    record = h.admit(0, 21)
    (load,) = h.in_flight(direction=Direction.LOAD)
    assert (record.length, load.positions.tolist(), record.state) == (20, [1, 3], LeaseState.LOADING)
    assert record.hit == Hit(prompt_tokens=21, gpu_tokens=12, cpu_tokens=8, compute_tokens=1)
    h.submit_all()
    h.check()
    h.end_all()
    assert state_of(record) is LeaseState.READY
    assert record.delivered == record.hit
    h.check()
    h.tear_down()


def test_the_last_token_is_always_computed() -> None:
    h = host()
    h.place(0, range(4), tier=GPU)
    assert h.admit(0, 16).length == 12
    assert h.admit(0, 17).length == 16
    h.tear_down()


@pytest.mark.parametrize("tokens", [0, 1])
def test_prompts_without_a_prefix_are_admitted(tokens: int) -> None:
    h = host()
    record = h.admit(0, tokens)
    assert (record.length, len(table(h, record))) == (0, tokens)
    h.tear_down()


def test_a_deferred_request_changes_nothing_the_eviction_order_included() -> None:
    h = host(gpu=11)
    h.place(0, range(4), tier=GPU)
    h.place(1, range(4), tier=CPU)
    holder = h.admit(2, 21)
    before = h.cache.snapshot()
    for stream, tokens in ((0, 33), (1, 33), (0, 37)):
        assert h.acquire(stream, tokens) == Deferred(DeferReason.CAPACITY)
        assert h.cache.snapshot() == before
    assert h.cache.counters.alloc_failures[DeferReason.CAPACITY] == 3
    h.release(holder)
    assert h.admit(0, 33).length == 16
    h.tear_down()


def test_hits_count_against_capacity_because_pinning_them_takes_them_off_the_market() -> None:
    h = host(gpu=7, cpu=0)
    h.place(0, range(3), tier=GPU)
    h.admit(1, 5)
    assert h.acquire(0, 17) == Deferred(DeferReason.CAPACITY)
    assert h.admit(0, 13).length == 12, "three hits and one new block are all there is"
    h.check()
    h.tear_down()


def test_the_watermark_binds_only_while_another_lease_is_held() -> None:
    h = host(gpu=11, watermark=0.2)
    first = h.admit(0, 33)
    assert h.acquire(1, 4) == Deferred(DeferReason.WATERMARK)
    h.release(first)
    alone = h.admit(1, 40)
    h.check()
    h.release(alone)
    assert h.cache.counters.alloc_failures[DeferReason.WATERMARK] == 1
    h.tear_down()


def test_the_watermark_never_binds_an_extension() -> None:
    h = host(gpu=11, watermark=0.2)
    record = h.admit(0, 32)
    assert h.extend(record, 8) == 40
    assert h.extend(record, 0) == 40
    h.tear_down()


def test_what_can_never_fit_is_refused_at_once() -> None:
    h = host(gpu=5)
    with pytest.raises(CapacityError) as error:
        h.acquire(0, 17)
    assert (error.value.needed, error.value.capacity) == (5, 4)
    h.admit(0, 16)
    h.tear_down()


def test_naming_never_evicts_what_the_same_request_hits() -> None:
    h = host(gpu=9, cpu=16)
    h.place(1, range(4), tier=GPU)
    h.place(0, [0, 2], tier=GPU)
    h.place(0, [1, 3], tier=CPU)
    h.admit(0, 29)
    h.end_all()
    h.check()
    assert h.letters(1)[:4] == "-" * 4, "all of the other prompt had to go"
    h.tear_down()


@pytest.mark.parametrize(
    "wrong", [{"prompt_tokens": 18}, {"prompt_tokens": -1}, {"reserve_tokens": -1}, {"first_chunk": -1}, {"align": 0}]
)
def test_a_request_must_make_sense(wrong: dict[str, int]) -> None:
    keys = BlockKeys(range(17), hash_block_size=4)
    with pytest.raises(UsageError):
        AcquireRequest(**{"request_id": "r", "keys": keys, "prompt_tokens": 17, **wrong})  # type: ignore[arg-type]  # a table of wrong values


def test_keys_of_another_hash_block_size_are_refused() -> None:
    cache = CacheState(FULL, gpu_blocks=8, cpu_blocks=8)
    keys = BlockKeys(range(17), hash_block_size=2)
    with pytest.raises(UsageError, match="hash"):
        cache.try_acquire(AcquireRequest(request_id="r", keys=keys, prompt_tokens=17))
    with pytest.raises(UsageError, match="hash"):
        cache.placement.place(keys, group=0, positions=np.arange(2), tier=GPU)
    assert cache.snapshot().gpu.free == 7


@pytest.mark.parametrize("wrong", [{"gpu_blocks": 1}, {"cpu_blocks": -1}, {"watermark": 1.0}, {"watermark": -0.1}])
def test_a_cache_must_have_a_size(wrong: dict[str, float]) -> None:
    sizes = {"gpu_blocks": 8, "cpu_blocks": 8, "watermark": 0.0}
    with pytest.raises(ConfigError):
        CacheState(FULL, **{**sizes, **wrong})  # type: ignore[arg-type]  # a table of wrong values


def test_the_smallest_pool_serves_one_block() -> None:
    h = host(gpu=2, cpu=1)
    record = h.admit(0, 4)
    h.confirm(record, 4)
    h.finish(record)
    h.end_all()
    assert h.letters(0)[0] == "b"
    with pytest.raises(CapacityError):
        h.acquire(0, 5)
    again = h.admit(1, 4)
    h.check()
    h.release(again)
    h.tear_down()


def test_without_a_cpu_tier_nothing_is_stored_or_loaded() -> None:
    h = host(cpu=0)
    record = h.admit(0, 17)
    h.confirm(record, 17)
    h.finish(record)
    h.turn()
    assert not h.queued
    assert h.letters(0)[:5] == "gggg-"
    assert CPU not in h.cache.pools()
    with pytest.raises(UsageError):
        h.place(0, [0], tier=CPU)
    h.reset()
    h.tear_down()


# Loads, and who waits for them.


def test_a_load_is_findable_only_after_its_copy_ended() -> None:
    h = host()
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 17)
    assert h.letters(0)[:4] == "cccc"
    h.submit_all()
    assert h.letters(0)[:4] == "cccc"
    h.end_all()
    assert h.letters(0)[:4] == "bbbb"
    assert state_of(record) is LeaseState.READY
    h.check()
    h.tear_down()


def test_two_requests_share_one_copy_and_each_waits_for_itself() -> None:
    h = host()
    h.place(0, range(4), tier=CPU)
    first, second = h.admit(0, 17), h.admit(0, 17)
    assert loads(h) == [4]
    assert first.hit == second.hit
    assert second.hit.cpu_tokens == 16, "a joined load counts for each"
    h.release(first)
    h.submit_all()
    h.check()
    h.end_all()
    assert state_of(second) is LeaseState.READY
    assert h.cache.counters.transferred_blocks[Direction.LOAD, Outcome.OK] == 4
    h.check()
    h.tear_down()


def test_a_joiner_names_a_slice_of_the_targets_that_the_owner_has_not_named_yet() -> None:
    """Law 8: not all of them in its own admission."""
    h = host(slice_blocks=1)
    h.place(0, range(5), tier=CPU)
    first = h.admit(0, 21)
    assert first.unnamed_claims == 5, "one target of five has a name"
    second = h.admit(0, 13)
    assert (first.unnamed_claims, second.unnamed_claims) == (4, 1)
    h.check()
    assert table(h, second)[:3] == table(h, first)[:3]
    assert loads(h) == [5]
    h.release(first)
    h.check()
    h.end_all()
    h.check()
    assert state_of(second) is LeaseState.READY
    h.tear_down()


def test_a_queued_load_is_dropped_when_the_last_waiter_leaves() -> None:
    h = host()
    h.place(0, range(4), tier=CPU)
    first, second = h.admit(0, 17), h.admit(0, 17)
    (load,) = h.queued
    h.release(first)
    assert state_of(load) is TransferState.QUEUED
    h.release(second)
    assert state_of(load) is TransferState.DROPPED
    with pytest.raises(InvalidTransition):
        h.cache.mark_submitted(load)
    assert h.cache.counters.transferred_blocks[Direction.LOAD, Outcome.DROPPED] == 4
    assert not h.cache.unfinished_transfers
    h.check()
    h.tear_down()


def test_a_load_whose_targets_have_no_names_yet_is_dropped_with_its_owner() -> None:
    h = host(slice_blocks=2)
    h.place(0, range(5), tier=CPU)
    record = h.admit(0, 21)
    assert record.unnamed_claims == 4
    h.release(record)
    assert not h.cache.unfinished_transfers
    h.check()
    h.tear_down()


def test_abandon_while_loading_keeps_targets_until_done_and_registers_them_then() -> None:
    h = host(gpu=6)
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 17)
    h.submit_all()
    h.release(record)
    assert h.acquire(1, 8) == Deferred(DeferReason.CAPACITY), "four targets are still being written"
    h.check()
    h.end(h.running[0])
    assert h.letters(0)[:4] == "bbbb"
    assert h.admit(1, 8).state is LeaseState.READY
    h.check()
    h.tear_down()


def test_a_failed_load_whose_holder_left_gives_everything_back() -> None:
    h = host()
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 17)
    h.submit_all()
    h.release(record)
    h.end(h.running[0], Outcome.FAILED)
    assert h.letters(0)[:4] == "cccc", "a failed copy says nothing about its source"
    h.check()
    h.tear_down()


def test_sources_of_a_running_load_are_not_evicted() -> None:
    h = host(cpu=4)
    h.place(0, range(4), tier=CPU)
    h.admit(0, 17)
    h.submit_all()
    with pytest.raises(UsageError):
        h.evict(0, [0], tier=CPU)
    with pytest.raises(UsageError):
        h.place(1, [0], tier=CPU)
    h.check()
    h.tear_down()


def test_each_transfer_ends_exactly_once() -> None:
    h = host(slice_blocks=1)
    h.place(0, range(4), tier=CPU)
    h.admit(0, 17)
    h.cache.run_slices()
    h.settle()
    (load,) = h.queued
    before = h.cache.snapshot()
    with pytest.raises(InvalidTransition):
        h.cache.complete(load.transfer_id, Outcome.OK)
    assert h.cache.snapshot() == before
    h.submit_all()
    h.end(load)
    assert h.cache.unfinished_transfers == 1, "three of four slices are to come"
    with pytest.raises(InvalidTransition):
        h.cache.complete(load.transfer_id, Outcome.OK)
    h.cache.run_slices()
    with pytest.raises(UsageError):
        h.cache.complete(load.transfer_id, Outcome.OK)
    h.check()
    h.tear_down()


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.DROPPED, Outcome.OK, Outcome.LOST])
def test_a_load_without_targets_cannot_end(outcome: Outcome) -> None:
    h = host(slice_blocks=1)
    h.place(0, range(4), tier=CPU)
    h.admit(0, 17)
    (load,) = h.cache.transfers()
    before = h.cache.snapshot()
    with pytest.raises(InvalidTransition):
        h.cache.complete(load.transfer_id, outcome)
    assert h.cache.snapshot() == before
    h.turn()
    h.end_all()
    h.tear_down()


def test_one_copy_at_a_time_while_a_failed_load_is_completed_in_slices() -> None:
    h = host(slice_blocks=2)
    h.place(0, range(6), tier=CPU)
    h.admit(0, 25)
    h.turn()
    h.submit_all()
    h.end(h.running[0], Outcome.FAILED)
    assert h.cache.has_work, "two of three slices are to come"
    h.admit(0, 25)
    h.turn()
    assert loads(h) == [6]
    third = h.admit(0, 25)
    assert loads(h) == [6], "the third request joins the copy of the second"
    h.check()
    h.end_all()
    assert third.delivered.cpu_tokens == 24
    h.tear_down()


def test_a_request_that_comes_between_two_slices_of_a_completion_hits_one_half_and_joins_the_other() -> None:
    h = host(slice_blocks=2)
    h.place(0, range(4), tier=CPU)
    first = h.admit(0, 17)
    h.turn()
    h.submit_all()
    h.end(h.running[0])
    assert h.letters(0)[:4] == "ccbb"
    second = h.admit(0, 17)
    assert second.hit == Hit(prompt_tokens=17, gpu_tokens=8, cpu_tokens=8, compute_tokens=1)
    assert loads(h) == []
    h.check()
    h.turn()
    assert (first.state, second.state) == (LeaseState.READY, LeaseState.READY)
    h.check()
    h.tear_down()


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.FAILED])
def test_a_holder_may_leave_between_two_slices_of_a_completion(outcome: Outcome) -> None:
    h = host(slice_blocks=1)
    h.place(0, range(4), tier=CPU)
    first, second = h.admit(0, 17), h.admit(0, 17)
    h.turn()
    h.submit_all()
    h.end(h.running[0], outcome)
    h.release(first)
    h.check()
    h.turn()
    h.check()
    assert state_of(second) is LeaseState.READY
    h.tear_down()


def test_a_lost_load_takes_both_sides_out_of_use_and_closes_the_cpu_tier() -> None:
    h = host(gpu=16)
    h.place(0, range(4), tier=CPU)
    first, second = h.admit(0, 17), h.admit(0, 17)
    h.submit_all()
    h.end(h.running[0], Outcome.LOST)
    h.check()
    h.turn()
    h.check()
    assert (first.state, second.state) == (LeaseState.READY, LeaseState.READY)
    assert first.delivered == second.delivered == Hit(prompt_tokens=17, gpu_tokens=0, cpu_tokens=0, compute_tokens=17)
    assert (h.counts(GPU).quarantined, h.counts(CPU).quarantined) == (4, 4)
    h.confirm(first, 17)
    h.finish(first)
    h.turn()
    assert not h.queued, "nothing is stored into a tier that is gone"
    h.release(second)
    with pytest.raises(CapacityError) as error:
        h.acquire(1, 48)
    assert error.value.capacity == 11, "lost slots are no capacity"
    h.tear_down()


def test_a_lost_cpu_tier_is_not_looked_up_any_more() -> None:
    h = host()
    h.place(0, range(4), tier=CPU)
    h.place(1, range(4), tier=CPU)
    record = h.admit(0, 17)
    h.submit_all()
    h.end(h.running[0], Outcome.LOST)
    assert h.cache.is_backend_lost
    assert h.admit(1, 17).length == 0
    h.release(record)
    h.check()
    h.tear_down()


def test_a_lost_store_takes_both_sides_out_of_use() -> None:
    h = host(gpu=8)
    record = h.admit(0, 17)
    h.confirm(record, 17)
    h.turn()
    h.submit_all()
    h.end(h.running[0], Outcome.LOST)
    assert (h.counts(GPU).quarantined, h.counts(CPU).quarantined) == (4, 4)
    assert h.letters(0)[:4] == "----"
    h.check()
    h.append(record, 4)
    assert h.extend(record, 4) == 21, "its own blocks are still there for the request that holds them"
    h.confirm(record, 21)
    h.check()
    h.tear_down()


# Growing.


def test_an_extension_claims_the_positions_that_follow() -> None:
    h = host()
    record = h.admit(0, 6)
    before = table(h, record)
    assert h.extend(record, 3) == 9
    assert h.extend(record, 4) == 13
    after = table(h, record)
    assert after[:2] == before
    assert len(set(after)) == len(after) == 4
    h.tear_down()


def test_an_extension_that_does_not_fit_now_is_deferred_and_one_that_never_fits_is_refused() -> None:
    h = host(gpu=7)
    record, other = h.admit(0, 12), h.admit(1, 12)
    assert h.extend(record, 1) == Deferred(DeferReason.CAPACITY)
    with pytest.raises(CapacityError):
        h.extend(record, 13)
    h.release(other)
    assert h.extend(record, 12) == 24
    with pytest.raises(UsageError):
        h.cache.try_extend(record, -1)
    h.tear_down()


def test_an_extension_while_claims_have_no_names_yet() -> None:
    h = host(slice_blocks=1)
    record = h.admit(0, 17)
    assert record.unnamed_claims == 4
    h.extend(record, 8)
    h.check()
    slots = table(h, record)
    assert len(set(slots)) == len(slots) == 7
    h.check()
    h.tear_down()


@pytest.mark.parametrize("slices", [0, 1, 9])
def test_an_extension_that_nobody_took_is_given_back_whatever_has_a_name_already(slices: int) -> None:
    h = host(slice_blocks=2)
    record = h.admit(0, 10)
    h.turn()
    h.confirm(record, 10)
    h.turn()
    before, free = list(record.capacity_tokens), h.cache.snapshot()
    h.extend(record, 30)
    for _ in range(slices):
        h.cache.run_slice()
    h.undo_extend(record, before)
    h.check()
    h.turn()
    assert h.counts(GPU).claimed == 0
    assert h.counts(GPU).reserved == free.gpu.reserved
    assert len(table(h, record)) == 3
    assert h.extend(record, 6) == 16
    assert len(set(table(h, record))) == 4
    h.check()
    h.tear_down()


def test_a_block_confirmed_before_its_slot_was_named_is_registered() -> None:
    h = host(cpu=0, slice_blocks=2)
    record = h.admit(0, 17)
    assert record.unnamed_claims == 3
    h.cache.confirm(record, 17)
    h.cache.run_slices()
    assert h.letters(0)[:5] == "gggg-"


def test_a_confirmation_names_no_more_than_it_needs() -> None:
    h = host(slice_blocks=2)
    record = h.admit(0, 8)
    h.extend(record, 40)
    h.confirm(record, 8)
    assert record.unnamed_claims
    h.check()
    h.tear_down()


# Confirmation.


def test_only_full_blocks_of_confirmed_tokens_are_found() -> None:
    h = host(cpu=0)
    record = h.admit(0, 17)
    for confirmed, letters in ((0, "-----"), (3, "-----"), (4, "g----"), (11, "gg---"), (17, "gggg-")):
        h.confirm(record, confirmed)
        assert h.letters(0)[:5] == letters
        h.check()
    h.tear_down()


def test_publish_to_limits_what_is_found() -> None:
    h = host()
    record = h.admit(0, 33)
    h.confirm(record, 20, publish_to=9)
    h.turn()
    assert h.letters(0)[:5] == "gg---"
    h.confirm(record, 24, publish_to=100)
    assert h.letters(0)[:7] == "gggggg-"
    h.confirm(record, 33, publish_to=0)
    h.end_all()
    assert h.letters(0)[:9] == "bbbbbb---", "what was not published is never stored"
    h.check()
    h.tear_down()


def test_a_confirmation_of_no_more_changes_nothing() -> None:
    h = host()
    record = h.admit(0, 17)
    h.confirm(record, 9)
    h.turn()
    before = h.cache.snapshot()
    for tokens in (9, 4, 0):
        h.confirm(record, tokens, publish_to=17, states=(tokens,))
        assert h.cache.snapshot() == before
    h.tear_down()


def test_a_confirmation_of_more_than_is_known_or_has_room_is_refused() -> None:
    h = host()
    record = h.admit(0, 10, reserve_tokens=2)
    before = h.cache.snapshot()
    with pytest.raises(UsageError):
        h.cache.confirm(record, 11)
    h.append(record, 8)
    with pytest.raises(UsageError):
        h.cache.confirm(record, 13)
    with pytest.raises(UsageError):
        h.cache.confirm(record, 12, publish_to=-1)
    assert h.cache.snapshot() == before
    h.confirm(record, 12)
    assert h.letters(0)[:3] == "ggg"
    h.check()
    h.tear_down()


def test_a_lease_that_is_loading_cannot_be_confirmed() -> None:
    h = host()
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 17)
    before = h.cache.snapshot()
    with pytest.raises(InvalidTransition):
        h.cache.confirm(record, 17)
    assert h.cache.snapshot() == before
    h.tear_down()


def test_a_duplicate_stays_private_and_is_freed_with_its_lease() -> None:
    h = host(cpu=0)
    first, second = h.admit(0, 17), h.admit(0, 17)
    h.confirm(first, 17)
    mine = table(h, second)
    h.confirm(second, 17)
    assert table(h, second) == mine, "a resident block is never swapped into a table"
    assert not set(mine) & set(table(h, first))
    h.check()
    h.release(second)
    assert h.counts(GPU) == PoolCounts(free=26, reserved=1, resident=4, quarantined=0, evictable=0, claimed=0)
    h.tear_down()


def test_a_load_that_lands_after_the_same_block_was_computed_stays_private() -> None:
    h = host()
    first = h.admit(0, 17)
    h.place(0, range(4), tier=CPU)
    second = h.admit(0, 17)
    assert state_of(second) is LeaseState.LOADING
    h.confirm(first, 17)
    h.end_all()
    assert not set(table(h, second)) & set(table(h, first))
    h.check()
    h.release(second)
    assert h.counts(GPU).reserved == 1
    h.tear_down()


def test_tokens_generated_after_the_prompt_are_registered_too() -> None:
    h = host()
    record = h.admit(0, 6)
    shared = record.keys
    h.append(record, 10)
    assert shared.num_tokens == 6, "the keys of the caller are not the lease's to grow"
    h.extend(record, 10)
    h.confirm(record, 16)
    h.end_all()
    assert h.letters(0)[:5] == "bbbb-"
    h.check()
    h.tear_down()


# Stores.


def test_confirmed_blocks_are_stored_and_found_once_the_copy_ended() -> None:
    h = host()
    record = h.admit(0, 18)
    h.confirm(record, 11)
    assert not h.queued, "stores are planned in later slices"
    h.turn()
    (store,) = h.queued
    assert store.positions.tolist() == [0, 1]
    h.submit_all()
    assert h.letters(0)[:2] == "gg"
    h.end_all()
    assert h.letters(0)[:3] == "bb-"
    h.confirm(record, 18)
    h.turn()
    assert [t.positions.tolist() for t in h.queued] == [[2, 3]]
    h.tear_down()


def test_a_failed_store_leaves_no_trace() -> None:
    h = host()
    record = h.admit(0, 17)
    h.confirm(record, 17)
    h.turn()
    h.submit_all()
    h.end(h.running[0], Outcome.FAILED)
    assert h.letters(0)[:4] == "gggg"
    assert h.counts(CPU).free == 32
    assert not record.storing
    h.check()
    h.tear_down()


def test_release_drops_what_is_not_submitted_and_finish_keeps_it() -> None:
    h = host()
    for stream, leave, letters in ((0, h.release, "gggg"), (1, h.finish, "bbbb")):
        record = h.admit(stream, 17)
        h.confirm(record, 17)
        leave(record)
        h.end_all()
        assert h.letters(stream)[:4] == letters
    assert h.cache.counters.store_skipped_blocks[DeclineReason.REQUEST_GONE] == 4
    h.tear_down()


def test_release_drops_a_queued_store_and_keeps_a_running_one() -> None:
    h = host()
    record = h.admit(0, 33)
    h.confirm(record, 9)
    h.turn()
    h.submit_all()
    h.confirm(record, 33)
    h.turn()
    (queued,) = h.queued
    h.release(record)
    assert state_of(queued) is TransferState.DROPPED
    assert len(h.running) == 1
    h.check()
    h.end_all()
    assert h.letters(0)[:4] == "bbgg"
    h.tear_down()


def test_sources_of_a_running_store_outlive_their_lease() -> None:
    h = host(gpu=6)
    record = h.admit(0, 17)
    h.confirm(record, 17)
    h.turn()
    h.submit_all()
    h.release(record)
    assert h.acquire(1, 8) == Deferred(DeferReason.CAPACITY)
    with pytest.raises(UsageError):
        h.evict(0, [0], tier=GPU)
    h.end_all()
    h.admit(1, 8)
    h.check()
    h.tear_down()


def test_a_gpu_hit_touches_its_cpu_copy_or_makes_one() -> None:
    h = host(cpu=4)
    h.place(0, range(2), tier=GPU)
    h.place(0, [0], tier=CPU)
    h.place(1, range(2), tier=CPU)
    h.admit(0, 13)
    h.turn()
    (store,) = h.queued
    assert store.positions.tolist() == [1]
    assert h.cache.counters.store_skipped_blocks[DeclineReason.ALREADY_CACHED] == 1
    other = h.admit(2, 17)
    h.confirm(other, 17)
    h.turn()
    assert h.letters(0)[0] == "b", "the touched copy outlives two that came later"
    assert h.letters(1)[:2] == "--"
    h.tear_down()


def test_a_block_in_flight_is_not_stored_twice() -> None:
    h = host()
    record = h.admit(0, 17)
    h.confirm(record, 17)
    h.turn()
    h.submit_all()
    h.admit(0, 17)
    h.turn()
    assert not h.queued
    assert h.cache.counters.store_skipped_blocks[DeclineReason.IN_FLIGHT] == 4
    h.check()
    h.tear_down()


def test_a_block_whose_cpu_copy_was_evicted_is_stored_again_for_the_next_request() -> None:
    h = host()
    record = h.admit(0, 17)
    h.confirm(record, 17)
    h.end_all()
    h.evict(0, [1, 2], tier=CPU)
    h.admit(0, 17)
    h.turn()
    assert [t.positions.tolist() for t in h.queued] == [[1, 2]]
    h.end_all()
    assert h.letters(0)[:4] == "bbbb"
    h.tear_down()


def test_a_cpu_pool_smaller_than_the_prompt_keeps_its_head() -> None:
    h = host(cpu=3)
    record = h.admit(0, 33)
    h.confirm(record, 33)
    h.turn()
    (store,) = h.queued
    assert store.positions.tolist() == [0, 1, 2]
    assert h.cache.counters.store_skipped_blocks[DeclineReason.POOL_FULL] == 5
    h.end_all()
    assert h.letters(0)[:8] == "bbbggggg"
    h.check()
    h.release(record)
    h.reset(GPU)
    h.turn()
    assert h.admit(0, 33).hit.cpu_tokens == 12
    h.end_all()
    h.check()
    h.tear_down()


def marks_before(h: Host, transfer: Transfer) -> tuple[object, ...]:
    """What its copies have to wait for."""
    return tuple(fence.mark for fence in h.cache.fences.find_waits(transfer.slots(Tier.GPU)))


def test_a_store_carries_the_fence_of_what_wrote_its_source() -> None:
    h = host(slice_blocks=2)
    record = h.admit(0, 33)
    h.turn()
    h.confirm(record, 17, after=h.cache.fences.add("stream", "first"))
    h.turn()
    assert {marks_before(h, t) for t in h.queued} == {("first",)}
    h.end_all()
    h.confirm(record, 33, after=h.cache.fences.add("stream", "second"))
    h.finish(record)
    h.turn()
    assert {marks_before(h, t) for t in h.queued} == {("second",)}
    h.tear_down()


def test_blocks_of_a_later_confirmation_carry_the_later_fence() -> None:
    h = host(slice_blocks=1)
    record = h.admit(0, 33)
    h.turn()
    h.confirm(record, 17, after=h.cache.fences.add("stream", "first"))
    h.confirm(record, 33, after=h.cache.fences.add("stream", "second"))
    h.turn()
    late = [t for t in h.queued if t.positions.max() >= 4]
    assert {marks_before(h, t) for t in late} == {("second",)}
    h.tear_down()


# The ways out.


def test_release_and_finish_are_idempotent_and_poison_the_lease() -> None:
    h = host()
    record = h.admit(0, 17)
    h.cache.release(record, how=Closing.CANCELLED)
    after = h.cache.snapshot()
    h.cache.release(record)
    h.cache.finish(record)
    uses: list[Callable[[], object]] = [
        lambda: h.cache.confirm(record, 17),
        lambda: h.cache.try_extend(record, 4),
        lambda: h.cache.block_ids(record, group=0),
    ]
    for use in uses:
        with pytest.raises(LeaseReleased):
            use()
    assert h.cache.snapshot() == after
    assert h.cache.counters.leases_closed == {**dict.fromkeys(Closing, 0), Closing.CANCELLED: 1}
    h.settle()
    h.tear_down()


def test_a_second_finish_does_not_cut_the_flush_of_the_first_short() -> None:
    h = host(slice_blocks=1)
    record = h.admit(0, 33)
    h.turn()
    h.confirm(record, 33)
    h.finish(record)
    assert state_of(record) is LeaseState.READY, "the flush takes more than one slice"
    h.finish(record)
    with pytest.raises(LeaseReleased):
        h.cache.try_extend(record, 4)
    h.end_all()
    assert state_of(record) is LeaseState.RELEASED
    assert h.letters(0)[:8] == "b" * 8
    assert h.cache.counters.leases_closed[Closing.FINISHED] == 1
    h.tear_down()


def test_a_release_ends_a_flush_at_once() -> None:
    h = host(slice_blocks=1)
    record = h.admit(0, 33)
    h.turn()
    h.confirm(record, 33)
    h.finish(record)
    h.cache.run_slice()
    h.release(record)
    assert not h.cache.live_leases
    h.check()
    h.end_all()
    h.check()
    h.tear_down()


def test_release_while_claims_have_no_names_yet() -> None:
    h = host(slice_blocks=1)
    record = h.admit(0, 33)
    h.cache.run_slice()
    h.release(record)
    h.check()
    h.turn()
    assert h.counts(GPU).reserved == 0
    h.tear_down()


def test_release_between_two_slices_of_a_registration() -> None:
    h = host(cpu=0, slice_blocks=2)
    record = h.admit(0, 33)
    h.turn()
    h.confirm(record, 33)
    assert h.letters(0)[:8] == "gg------"
    h.release(record)
    h.check()
    h.turn()
    assert h.letters(0)[:8] == "gg------"
    h.tear_down()


def test_finish_while_loading_gives_back_what_the_copy_does_not_need() -> None:
    h = host()
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 17)
    h.submit_all()
    h.finish(record)
    h.turn()
    assert not h.cache.live_leases
    assert h.counts(GPU).reserved == 4
    h.check()
    h.end_all()
    assert h.letters(0)[:4] == "bbbb"
    h.tear_down()


def test_the_tail_of_a_prefix_is_evicted_first() -> None:
    h = host(gpu=10, cpu=0)
    record = h.admit(0, 33)
    h.confirm(record, 33)
    h.finish(record)
    h.turn()
    h.admit(1, 16)
    assert h.letters(0)[:9] == "ggggg----"
    h.tear_down()


def test_capacity_that_comes_back_is_announced() -> None:
    h = host()
    record = h.admit(0, 17)
    before = h.cache.capacity_generation
    h.release(record)
    released = h.cache.capacity_generation
    assert released > before
    h.reset()
    h.turn()
    assert h.cache.capacity_generation > released


def test_capacity_that_a_copy_gives_back_after_its_lease_left_is_announced() -> None:
    h = host()
    record = h.admit(0, 17)
    h.confirm(record, 17)
    h.turn()
    h.submit_all()
    h.release(record)
    before = h.cache.capacity_generation
    h.end(h.running[0])
    assert h.cache.capacity_generation > before
    h.tear_down()


# Resets.


@pytest.mark.parametrize("tiers", [(), (GPU,), (CPU,)])
def test_a_reset_makes_a_tier_answer_nothing_at_once_and_gives_its_slots_back(tiers: tuple[Tier, ...]) -> None:
    h = host()
    h.place(0, range(4), tier=GPU)
    h.place(0, range(4), tier=CPU)
    h.reset(*tiers)
    assert h.letters(0)[:4] == {(): "----", (GPU,): "cccc", (CPU,): "gggg"}[tiers]
    h.check()
    h.turn()
    for tier in tiers or (GPU, CPU):
        assert h.counts(tier).resident == 0
    h.check()
    h.tear_down()


@pytest.mark.parametrize("tiers", [(), (GPU,), (CPU,)])
def test_a_load_that_ends_after_a_reset_registers_nothing_and_still_serves_its_lease(tiers: tuple[Tier, ...]) -> None:
    h = host()
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 17)
    h.submit_all()
    h.reset(*tiers)
    h.end_all()
    assert state_of(record) is LeaseState.READY
    assert "g" not in h.letters(0)
    assert "b" not in h.letters(0)
    h.check()
    h.tear_down()


@pytest.mark.parametrize("tiers", [(), (GPU,), (CPU,)])
def test_a_store_that_ends_after_a_reset_registers_nothing(tiers: tuple[Tier, ...]) -> None:
    h = host()
    record = h.admit(0, 17)
    h.confirm(record, 17)
    h.turn()
    h.submit_all()
    h.reset(*tiers)
    h.end_all()
    assert "c" not in h.letters(0)
    assert "b" not in h.letters(0)
    h.check()
    h.tear_down()


def test_a_reset_between_two_slices_of_a_completion_stops_the_registration() -> None:
    h = host(slice_blocks=2)
    h.place(0, range(4), tier=CPU)
    h.admit(0, 17)
    h.turn()
    h.submit_all()
    h.end(h.running[0])
    assert h.letters(0)[:4] == "ccbb"
    h.reset(GPU)
    h.turn()
    assert h.letters(0)[:4] == "cccc"
    h.check()
    h.tear_down()


def test_a_lease_of_an_older_epoch_registers_and_stores_nothing() -> None:
    h = host()
    record = h.admit(0, 33)
    h.confirm(record, 8)
    h.reset()
    h.confirm(record, 33)
    h.turn()
    assert not h.queued
    assert h.letters(0)[:8] == "-" * 8
    h.check()
    h.finish(record)
    h.tear_down()


def test_a_lease_admitted_before_a_reset_of_the_cpu_tier_stores_nothing() -> None:
    h = host()
    record = h.admit(0, 17)
    h.reset(CPU)
    h.confirm(record, 17)
    h.end_all()
    assert h.letters(0)[:4] == "gggg"
    h.tear_down()


def test_a_request_joins_a_load_from_before_a_reset_of_the_gpu_tier() -> None:
    h = host()
    h.place(0, range(4), tier=CPU)
    h.admit(0, 17)
    h.submit_all()
    h.reset(GPU)
    second = h.admit(0, 17)
    assert loads(h) == [4]
    h.end_all()
    assert state_of(second) is LeaseState.READY
    assert h.letters(0)[:4] == "cccc"
    h.confirm(second, 17)
    h.check()
    h.tear_down()


def test_a_prompt_is_computed_anew_after_a_reset_while_its_old_blocks_are_still_held() -> None:
    h = host(cpu=0)
    old = h.admit(0, 17)
    h.confirm(old, 17)
    h.reset()
    new = h.admit(0, 17)
    assert new.length == 0
    h.confirm(new, 17)
    assert h.letters(0)[:4] == "gggg"
    h.check()
    h.release(old)
    h.check()
    assert h.letters(0)[:4] == "gggg"
    h.tear_down()


# Placement.


def test_placing_takes_free_slots_only_and_none_for_what_is_there_already() -> None:
    h = host(gpu=7, cpu=0)
    h.place(0, [0, 1], tier=GPU)
    h.place(0, [10, 11, 12, 13], tier=GPU)
    before = h.cache.snapshot()
    with pytest.raises(UsageError):
        h.place(0, range(3), tier=GPU)
    assert h.cache.snapshot() == before
    h.place(0, [0, 1], tier=GPU)
    h.admit(1, 16)
    assert h.letters(0)[:14] == "gg------------", "placing again touches"
    h.tear_down()


def test_placing_takes_no_slot_that_was_promised_to_an_admitted_request() -> None:
    h = host(gpu=8, cpu=0, slice_blocks=1)
    h.place(1, [0], tier=GPU)
    h.place(1, [5], tier=GPU)
    record = h.admit(0, 17)
    assert (record.unnamed_claims, h.counts(GPU).free) == (4, 4)
    before = h.cache.snapshot()
    with pytest.raises(UsageError):
        h.place(1, [0, 1, 2, 3], tier=GPU)
    assert h.cache.snapshot() == before
    h.check()
    h.tear_down()


def test_placing_more_than_fits_is_refused_even_if_some_are_there_already() -> None:
    h = host(gpu=5, cpu=0)
    h.place(0, range(2), tier=GPU)
    before = h.cache.snapshot()
    with pytest.raises(UsageError):
        h.place(0, range(5), tier=GPU)
    assert h.cache.snapshot() == before


def test_placed_blocks_are_evicted_from_the_tail() -> None:
    h = host(gpu=6, cpu=0)
    h.place(0, range(4), tier=GPU)
    h.admit(1, 8)
    assert h.letters(0)[:4] == "ggg-"
    h.tear_down()


def test_evicting_what_is_pinned_or_absent_is_refused() -> None:
    h = host(cpu=0)
    h.place(0, range(3), tier=GPU)
    record = h.admit(0, 9)
    for positions in ([0], [3], [2, 5]):
        with pytest.raises(UsageError):
            h.evict(0, positions, tier=GPU)
    h.evict(0, [2], tier=GPU)
    assert h.letters(0)[:3] == "gg-"
    h.release(record)
    h.evict(0, [1, 0], tier=GPU)
    assert h.counts(GPU).free == 31
    h.tear_down()


# Long prompts, and what operators see.


def test_a_prompt_of_8192_blocks_in_slices() -> None:
    tokens = 8192 * 4 + 1
    cache = CacheState(FULL, gpu_blocks=9000, cpu_blocks=9000)
    keys = BlockKeys(range(tokens), hash_block_size=4)
    request = AcquireRequest(request_id="long", keys=keys, prompt_tokens=tokens)
    record = cache.try_acquire(request)
    assert isinstance(record, LeaseRecord)
    steps = run_all(cache)
    assert steps >= 7
    cache.confirm(record, tokens)
    assert cache.find_blocks(keys, group=0, tier=GPU).present.sum() == 1024, "one slice at a time"
    run_all(cache)
    cache.finish(record)
    run_all(cache)
    assert finish_copies(cache, Direction.STORE) == 8192
    assert cache.find_blocks(keys, group=0, tier=CPU).present.all()
    cache.reset((GPU,))
    run_all(cache)
    again = cache.try_acquire(replace(request, request_id="again"))
    assert isinstance(again, LeaseRecord)
    assert again.hit.cpu_tokens == tokens - 1
    joined = cache.try_acquire(replace(request, request_id="joined"))
    assert isinstance(joined, LeaseRecord)
    run_all(cache)
    assert finish_copies(cache, Direction.LOAD) == 8192
    assert (again.state, joined.state) == (LeaseState.READY, LeaseState.READY)
    assert not cache.audit().violations
    cache.release(again)
    cache.release(joined)
    assert not cache.audit().pins


def run_all(cache: CacheState) -> int:
    """Run all slices; how many there were."""
    steps = 1
    while cache.run_slice():
        steps += 1
    return steps


def finish_copies(cache: CacheState, direction: Direction) -> int:
    """End every copy of one direction well; how many blocks that were."""
    blocks = 0
    for transfer in cache.outbox.take_submissions():
        assert transfer.direction is direction
        cache.mark_submitted(transfer)
        cache.complete(transfer.transfer_id, Outcome.OK)
        blocks += len(transfer)
        run_all(cache)
    return blocks


def test_the_audit_names_every_holder() -> None:
    h = host(slice_blocks=2)
    h.place(0, range(2), tier=CPU)
    h.admit(0, 21, request_id="one")
    audit = h.cache.audit()
    assert [(p.request_id, p.tier, p.blocks) for p in audit.pins] == [("one", GPU, 2), ("one", CPU, 2), ("one", GPU, 2)]
    assert [(r.request_id, r.blocks) for r in audit.reservations] == [("one", 4)]
    assert [(v.request_id, v.state, v.prefix_tokens) for v in audit.leases] == [("one", "loading", 8)]
    h.tear_down()


def test_equal_histories_have_equal_snapshots_and_different_ones_do_not() -> None:
    def run(*streams: int) -> Host:
        h = host()
        for stream in streams:
            h.place(stream, range(3), tier=GPU)
        h.admit(0, 9)
        return h

    assert run(0, 1).cache.snapshot() == run(0, 1).cache.snapshot()
    assert run(0, 1).cache.snapshot() != run(1, 0).cache.snapshot()
    assert "1000" not in repr(run(0, 1).cache.snapshot()), "no tokens"


def test_a_forgotten_pin_is_a_violation() -> None:
    h = host()
    record = h.admit(0, 17)
    record.tables[0].take_range(0, 1)
    assert h.cache.audit().violations
