"""Fills the pool of one tier, through the calls of any host, with blocks that nobody has seen."""

from __future__ import annotations

from typing import Final

import numpy as np

from aiokv.core.cache import CacheState
from aiokv.core.lease_table import AcquireRequest
from aiokv.errors import AiokvError
from aiokv.model.ids import Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import Deferred, Outcome
from aiokv.model.spec import CacheGeometry, FullAttention

__all__ = ["PROMPT_BLOCKS", "fill", "new_cache"]

_BLOCK: Final = 16
_GEOMETRY: Final = CacheGeometry(groups=(FullAttention("full", block_size=_BLOCK),), hash_block_size=_BLOCK)
_VOCABULARY: Final = 50_000

_USES: Final = 3
"""Uses per slot after which the order of eviction has been written all around its ring."""

PROMPT_BLOCKS: Final = 8192
"""Of each prompt that fills a pool; the GPU pool in front of a CPU pool has room for two."""


def new_cache(tier: Tier, *, slots: int) -> CacheState:
    """A cache whose pool of `tier` has so many slots, as a host opens it: the memory of its indexes is touched."""
    gpu, cpu = (slots, 0) if tier is Tier.GPU else (2 * PROMPT_BLOCKS, slots)
    cache = CacheState(_GEOMETRY, gpu_blocks=gpu + 1, cpu_blocks=cpu)
    cache.warm()
    return cache


def fill(cache: CacheState, tier: Tier) -> int:
    """Until every slot of the pool holds a block, and was used so often that all memory of the pool is in use.

    Returns how many slots held a block then: each use computes the last block of its prompt anew.
    """
    source = np.random.default_rng(0)
    keys = _fresh_keys(source, PROMPT_BLOCKS)
    while (left := cache.pools()[tier].free) > 0:
        keys = _fresh_keys(source, min(left, PROMPT_BLOCKS))
        _serve(cache, keys)
        if cache.pools()[tier].free == left:
            raise AiokvError(f"the {tier.value} pool takes nothing any more, {left} slots are free")
    resident = cache.pools()[tier].resident
    for _ in range(_USES * resident // keys.num_blocks):
        _serve(cache, keys)
    return resident


def _fresh_keys(source: np.random.Generator, blocks: int) -> BlockKeys:
    tokens = source.integers(_VOCABULARY, size=blocks * _BLOCK, dtype=np.int32)
    return BlockKeys(tokens, hash_block_size=_BLOCK)


def _serve(cache: CacheState, keys: BlockKeys) -> None:
    """One request from its arrival to its end, whose copies end at once; nobody reads the events."""
    request = AcquireRequest(request_id="a prompt", keys=keys, prompt_tokens=keys.num_tokens)
    record = cache.try_acquire(request)
    if isinstance(record, Deferred):
        raise AiokvError(f"a pool that is being filled has no room: {record.reason.value}")
    cache.confirm(record, keys.num_tokens)
    cache.finish(record)
    while cache.has_work or cache.outbox.submissions:
        cache.run_slices()
        for transfer in cache.outbox.take_submissions():
            cache.mark_submitted(transfer)
            cache.complete(transfer.transfer_id, Outcome.OK)
    cache.events.take()
