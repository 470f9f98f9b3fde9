"""A short request's slots are named while it is admitted, however the GPU pool's eviction queue begins."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest

from aiokv.core.cache import CacheState
from aiokv.core.lease_table import AcquireRequest, LeaseRecord
from aiokv.core.planner import STATE_CLAIMS
from aiokv.core.world import SCAN_LIMIT
from aiokv.model.ids import Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.spec import CacheGeometry, FullAttention, RecurrentState, SlidingWindow
from aiokv.testing.streams import geometry_of

BLOCK: Final = 4
FULL: Final = geometry_of(FullAttention("full", block_size=BLOCK))
COLD, HOT, NEW = 8, 4 * SCAN_LIMIT, 100
"""Blocks that are evicted first; blocks whose old entries lie behind them once they were hit; blocks that come then."""


def keys_of(prompt: int, blocks: int) -> BlockKeys:
    tokens = np.arange(blocks * BLOCK, dtype=np.int32)
    tokens[0] = -prompt
    return BlockKeys(tokens, hash_block_size=BLOCK)


def admit(cache: CacheState, keys: BlockKeys) -> LeaseRecord:
    request = AcquireRequest(request_id="r", keys=keys, prompt_tokens=keys.num_tokens)
    record = cache.try_acquire(request)
    assert isinstance(record, LeaseRecord)
    return record


def place(cache: CacheState, prompt: int, blocks: int) -> None:
    cache.placement.place(keys_of(prompt, blocks), group=0, positions=np.arange(blocks), tier=Tier.GPU)


def cache_with_a_hot_prefix(geometry: CacheGeometry) -> CacheState:
    """The GPU pool is full, and behind its coldest blocks lie dead entries, more than one scan passes."""
    cache = CacheState(geometry, gpu_blocks=1 + COLD + HOT + 4 * NEW, cpu_blocks=0)
    for prompt, blocks in enumerate((COLD, HOT, 4 * NEW)):
        place(cache, prompt, blocks)
    place(cache, 1, HOT)
    return cache


def test_targets_of_loads_are_named_first() -> None:
    """So that copies start early."""
    cache = CacheState(FULL, gpu_blocks=20, cpu_blocks=20)
    keys = keys_of(0, 5)
    cache.placement.place(keys, group=0, positions=np.array([0, 1]), tier=Tier.CPU)
    record = admit(cache, keys)
    assert cache.block_ids(record, group=0).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "geometry",
    [
        FULL,
        geometry_of(FullAttention("full", block_size=BLOCK), FullAttention("other", block_size=BLOCK)),
        geometry_of(
            FullAttention("full", block_size=BLOCK),
            SlidingWindow("window", block_size=BLOCK, window=8),
            RecurrentState("state", block_size=BLOCK),
        ),
    ],
)
def test_claims_that_one_scan_finds_no_slot_for_are_named_later(geometry: CacheGeometry) -> None:
    cache = cache_with_a_hot_prefix(geometry)
    record = admit(cache, keys_of(9, NEW))
    assert record.claims, "this test is about scans that find too little"
    assert not cache.audit().violations
    cache.run_slices()
    assert not record.claims
    held = record.held_slots().tolist()
    groups = len(geometry.groups)
    states = STATE_CLAIMS if len(geometry.other_groups) > 1 else 0
    tables = groups - (states > 0)
    assert len(set(held)) == len(held) == tables * NEW + states
    for group in range(tables):
        assert 0 not in cache.block_ids(record, group=group).tolist()
    assert not cache.audit().violations
    cache.release(record)
    assert not cache.audit().violations


def test_a_table_that_is_read_before_has_all_its_names() -> None:
    cache = cache_with_a_hot_prefix(FULL)
    record = admit(cache, keys_of(9, NEW))
    assert record.claims
    table = cache.block_ids(record, group=0).tolist()
    assert len(set(table)) == NEW
    assert 0 not in table


def test_a_request_that_leaves_before_gives_its_claims_back() -> None:
    cache = cache_with_a_hot_prefix(FULL)
    record = admit(cache, keys_of(9, NEW))
    assert record.claims
    cache.release(record)
    cache.run_slices()
    assert not cache.audit().violations
    assert cache.pools()[Tier.GPU].claimed == 0
    place_for_all = admit(cache, keys_of(10, COLD + HOT + 4 * NEW))
    assert len(set(cache.block_ids(place_for_all, group=0).tolist())) == COLD + HOT + 4 * NEW
