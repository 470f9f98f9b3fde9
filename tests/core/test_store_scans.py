"""Stores into a CPU tier whose eviction queue begins with many entries that stand for nothing."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.core.cache import CacheState
from aiokv.core.lease_table import AcquireRequest, LeaseRecord
from aiokv.core.store_policy import StoreSettings
from aiokv.core.world import SCAN_LIMIT
from aiokv.model.ids import Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import DeclineReason, Outcome, StorePolicy
from aiokv.model.spec import FullAttention
from aiokv.testing.streams import geometry_of

BLOCK = 4
COLD, HOT, NEW = 64, 2 * SCAN_LIMIT, 3000
"""Blocks that are evicted first; blocks whose old entries lie behind them once they were hit; blocks that come then."""


def cache_of(policy: StorePolicy, *, filler: int) -> CacheState:
    stores = StoreSettings(policy=policy, selective_count=1)
    geometry = geometry_of(FullAttention("full", block_size=BLOCK))
    blocks = COLD + HOT + filler
    return CacheState(geometry, gpu_blocks=blocks + 2 * NEW, cpu_blocks=blocks, stores=stores)


def keys_of(prompt: int, blocks: int) -> BlockKeys:
    tokens = np.arange(blocks * BLOCK + 1, dtype=np.int32)
    tokens[0] = -prompt
    return BlockKeys(tokens, hash_block_size=BLOCK)


def admit(cache: CacheState, prompt: int, blocks: int) -> LeaseRecord:
    keys = keys_of(prompt, blocks)
    request = AcquireRequest(request_id=str(prompt), keys=keys, prompt_tokens=keys.num_tokens)
    record = cache.try_acquire(request)
    assert isinstance(record, LeaseRecord)
    return record


def end_copies(cache: CacheState) -> None:
    while cache.has_work or cache.outbox.submissions:
        cache.run_slices()
        for transfer in cache.outbox.take_submissions():
            cache.mark_submitted(transfer)
            cache.complete(transfer.transfer_id, Outcome.OK)


def serve(cache: CacheState, prompt: int, blocks: int) -> None:
    record = admit(cache, prompt, blocks)
    cache.confirm(record, blocks * BLOCK + 1)
    cache.finish(record)
    end_copies(cache)


def copies_of(cache: CacheState, prompt: int, blocks: int) -> int:
    return int(np.count_nonzero(cache.find_blocks(keys_of(prompt, blocks), group=0, tier=Tier.CPU).present))


def full_cache_with_a_hot_prefix(policy: StorePolicy) -> CacheState:
    """The CPU tier is full, and behind its coldest blocks lie dead entries, more than one scan passes."""
    cache = cache_of(policy, filler=2 * NEW)
    serve(cache, 1, COLD)
    serve(cache, 2, HOT)
    serve(cache, 3, 2 * NEW)
    serve(cache, 2, HOT)
    return cache


@pytest.mark.parametrize("policy", [StorePolicy.EAGER, StorePolicy.SELECTIVE])
def test_blocks_are_stored_although_one_scan_finds_no_slot_for_them(policy: StorePolicy) -> None:
    cache = full_cache_with_a_hot_prefix(policy)
    serve(cache, 4, NEW)
    assert copies_of(cache, 4, NEW) == NEW
    assert cache.counters.store_skipped_blocks[DeclineReason.POOL_FULL] == 0
    assert copies_of(cache, 2, HOT) == HOT, "the hot prefix is not what had to go"
    assert not cache.audit().violations


def test_what_one_scan_leaves_over_is_stored_while_the_request_runs() -> None:
    cache = full_cache_with_a_hot_prefix(StorePolicy.EAGER)
    record = admit(cache, 4, NEW)
    cache.confirm(record, NEW * BLOCK + 1)
    end_copies(cache)
    assert copies_of(cache, 4, NEW) == NEW
    cache.release(record)
    assert not cache.audit().violations


def test_what_is_left_over_when_a_request_is_released_is_dropped() -> None:
    cache = full_cache_with_a_hot_prefix(StorePolicy.EAGER)
    record = admit(cache, 4, NEW)
    cache.confirm(record, NEW * BLOCK + 1)
    while not cache.outbox.submissions:
        cache.run_slice()
    cache.release(record)
    end_copies(cache)
    assert copies_of(cache, 4, NEW) == 0
    assert cache.counters.store_skipped_blocks[DeclineReason.REQUEST_GONE] > 0
    assert not cache.audit().violations


def test_a_slice_scans_once_and_leaves_the_rest_to_the_next_one() -> None:
    cache = full_cache_with_a_hot_prefix(StorePolicy.EAGER)
    record = admit(cache, 4, NEW)
    cache.confirm(record, NEW * BLOCK + 1)
    planned, slices = [], 0
    while cache.has_work:
        cache.run_slice()
        slices += 1
        planned.append(sum(map(len, cache.outbox.take_submissions())))
    assert sum(planned) == NEW
    assert slices <= 2 * -(-NEW // 1024) + HOT // SCAN_LIMIT + 2, "registered, planned, and scanned for"
    assert 0 in planned, "this test is about scans that find nothing"


def test_a_pool_without_a_slot_to_give_is_full_at_once() -> None:
    cache = cache_of(StorePolicy.EAGER, filler=0)
    record = admit(cache, 1, COLD + HOT)
    cache.confirm(record, (COLD + HOT) * BLOCK + 1)
    while cache.has_work:
        cache.run_slice()
    other = admit(cache, 2, NEW)
    cache.confirm(other, NEW * BLOCK + 1)
    cache.run_slices()
    assert cache.counters.store_skipped_blocks[DeclineReason.POOL_FULL] == NEW
