"""Law 8: what hangs on one step and can be many goes on in slices. Judged by counts: how much each slice does."""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import pytest

from aiokv.core.cache import CacheState
from aiokv.core.hint_table import HintRecord, HintState
from aiokv.core.lease_table import AcquireRequest, LeaseRecord, LeaseState
from aiokv.core.lru import EvictionQueue
from aiokv.model.ids import Direction, Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import Outcome
from aiokv.model.spec import FullAttention
from aiokv.testing.host import Host
from aiokv.testing.streams import geometry_of

FULL: Final = geometry_of(FullAttention("full", block_size=4))
SLICE: Final = 64


def crowd(count: int) -> tuple[Host, list[LeaseRecord]]:
    """So many leases that wait for one load of 8 blocks, which is running."""
    h = Host(FULL, gpu_blocks=40 + 10 * count, cpu_blocks=8, slice_blocks=SLICE)
    h.place(0, range(8), tier=Tier.CPU)
    records = [h.admit(0, 33) for _ in range(count)]
    h.run_slices()
    h.submit_all()
    return h, records


def ready(records: list[LeaseRecord]) -> int:
    return sum(record.state is LeaseState.READY for record in records)


def told(records: list[LeaseRecord]) -> int:
    return sum(not record.waiting for record in records)


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.FAILED])
def test_those_who_wait_for_one_load_are_told_some_a_slice_and_all_in_the_end(outcome: Outcome) -> None:
    h, records = crowd(40)
    (load,) = h.in_flight(direction=Direction.LOAD)
    h.end(load, outcome)
    counts = [0, told(records)]
    while h.cache.has_work:
        h.cache.run_slice()
        h.check()
        counts.append(told(records))
    assert 1 <= max(np.diff(counts)) <= SLICE // 8
    assert (told(records), ready(records)) == (40, 40)
    h.tear_down()


def test_who_leaves_while_others_are_told_is_passed_over() -> None:
    h, records = crowd(40)
    (load,) = h.in_flight(direction=Direction.LOAD)
    h.end(load, Outcome.FAILED)
    h.cache.run_slice()
    assert records[-1].waiting
    h.release(records[-1])
    h.check()
    assert records[-1].lease_id not in load.waiters
    h.run_slices()
    assert ready(records[:-1]) == 39
    h.check()
    h.tear_down()


def unnamed_load(blocks: int = 20) -> tuple[Host, LeaseRecord]:
    """A lease with a load whose first few targets have names."""
    h = Host(FULL, gpu_blocks=6 * blocks, cpu_blocks=blocks, slice_blocks=4)
    h.place(0, range(blocks), tier=Tier.CPU)
    return h, h.admit(0, 4 * blocks + 1)


def test_who_joins_a_load_names_no_more_than_a_slice_of_its_targets() -> None:
    h, first = unnamed_load()
    joined = [h.admit(0, 4 * blocks + 1) for blocks in (20, 6, 20)]
    assert first.unnamed_claims == 21 - 4 * 4
    assert not h.queued
    h.check()
    h.run_slices()
    (load,) = h.queued
    assert load.waiters == {record.lease_id for record in (first, *joined)}
    h.check()
    h.end_all()
    assert ready([first, *joined]) == 4
    for record in joined:
        held = h.cache.block_ids(record, group=0)[: record.length // 4]
        assert held.tolist() == h.cache.block_ids(first, group=0)[: len(held)].tolist()
    h.check()
    h.tear_down()


def test_an_owner_leaves_before_the_targets_that_others_wait_for_have_names() -> None:
    h, first = unnamed_load()
    second = h.admit(0, 81)
    h.release(first)
    h.check()
    (load,) = h.queued
    h.end_all()
    assert (second.state, load.waiters) == (LeaseState.READY, {second.lease_id})
    h.check()
    h.tear_down()


def test_a_load_is_dropped_when_all_who_joined_it_have_left_before_its_owner() -> None:
    h, first = unnamed_load()
    h.release(h.admit(0, 81))
    assert first.unnamed_claims
    h.release(first)
    assert not h.cache.unfinished_transfers
    h.check()
    h.tear_down()


def test_a_lease_that_joins_two_loads_gets_the_targets_of_both() -> None:
    h = Host(FULL, gpu_blocks=200, cpu_blocks=40, slice_blocks=4)
    h.place(0, range(20), tier=Tier.CPU)
    first = h.admit(0, 41)
    second = h.admit(0, 61)
    third = h.admit(0, 81)
    h.check()
    assert h.cache.unfinished_transfers == 3
    tables = [h.cache.block_ids(record, group=0) for record in (third, second, first)]
    h.check()
    assert tables[0][:15].tolist() == tables[1][:15].tolist()
    assert tables[0][:10].tolist() == tables[2][:10].tolist()
    h.end_all()
    assert ready([first, second, third]) == 3
    h.tear_down()


# Many hints that give room at once.

HINTS: Final = 600
BLOCKS: Final = 6


def hashed(start: int, blocks: int) -> BlockKeys:
    keys = BlockKeys(np.arange(start, start + 4 * blocks, dtype=np.int32), hash_block_size=4)
    keys.hash_more(keys.num_blocks)
    return keys


def request(keys: BlockKeys) -> AcquireRequest:
    return AcquireRequest(request_id="request", keys=keys, prompt_tokens=keys.num_tokens)


def crowded(tenants: int) -> tuple[CacheState, list[HintRecord]]:
    """A pool that hints fill, each tenant's to the quota."""
    slots = HINTS * BLOCKS
    cache = CacheState(FULL, gpu_blocks=slots + 1, hint_quota=1 / tenants)
    hints = []
    for number in range(HINTS):
        keys = hashed(1000 * number, BLOCKS)
        record = cache.try_acquire(request(keys))
        assert isinstance(record, LeaseRecord)
        cache.confirm(record, keys.num_tokens)
        cache.run_slices()
        hint = cache.hints.keep(keys, tenant=f"tenant {number % tenants}")
        assert isinstance(hint, HintRecord)
        hints.append(hint)
        cache.release(record)
    assert cache.pools()[Tier.GPU].evictable == 0
    return cache, hints


@pytest.mark.parametrize("tenants", [1, 3, 150])
def test_what_tenants_hold_is_written_down_in_slices_after_many_hints_gave_room(tenants: int) -> None:
    """The room is there in the step that asks for it."""
    cache, hints = crowded(tenants)
    record = cache.try_acquire(request(hashed(1_000_000, (HINTS - tenants) * BLOCKS)))
    assert isinstance(record, LeaseRecord)
    held = [hint for hint in hints if hint.state is HintState.HELD]
    assert held == hints[-tenants:]
    assert not cache.audit().violations
    slices = 1
    while cache.name_slice(record):
        slices += 1
    while cache.run_slice():
        slices += 1
    assert slices >= 5
    assert cache.hints.check_invariants() == []
    assert not cache.audit().violations
    cache.release(record)


def test_a_quota_counts_what_was_given_back_before_that_is_written_down() -> None:
    """Its tenant had used it up, and takes hold again in the same turn."""
    cache, hints = crowded(3)
    record = cache.try_acquire(request(hashed(1_000_000, (HINTS - 3) * BLOCKS)))
    assert isinstance(record, LeaseRecord)
    assert cache.has_work
    again = cache.hints.update(hints[0], hashed(1000 * (HINTS - 2), BLOCKS))  # of another tenant
    assert again == 4 * BLOCKS
    assert cache.hints.check_invariants() == []
    cache.reset()
    cache.run_slices()
    assert cache.hints.check_invariants() == []
    assert cache.hints.live() == ()
    assert not cache.audit().violations


# Entries of the eviction queue that stand for nothing.

STALE: Final = 16_384


def seconds_to_pop(slots: int) -> float:
    """CPU time of passing many entries that stand for nothing, and finding so many slots behind them."""
    queue = EvictionQueue(2 * STALE)
    queue.push(np.arange(2 * STALE))
    queue.drop(np.arange(STALE))
    started = time.thread_time()
    taken = queue.pop(slots, STALE + 1024)
    seconds = time.thread_time() - started
    assert taken.tolist() == list(range(STALE, STALE + slots))
    return seconds


def test_a_few_slots_behind_many_stale_entries_take_no_longer_than_many_slots() -> None:
    """Not scan by scan of a few entries: that takes five times as long."""
    few, many = ([seconds_to_pop(slots) for _ in range(20)] for slots in (1, 1000))
    assert min(few) <= 2 * min(many)
