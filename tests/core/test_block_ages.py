"""How long blocks lie idle: stamped when they fall idle, sampled when they are evicted or used again."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.core.block_ages import GAP_BOUNDS, SAMPLE, TICKS_PER_SECOND, Gaps
from aiokv.core.cache import CacheState
from aiokv.core.lease_table import AcquireRequest, LeaseRecord
from aiokv.model.ids import Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import Outcome
from aiokv.model.spec import CacheGeometry, FullAttention

BLOCK = 4
FIRST_WINDOWS = SAMPLE + SAMPLE // 2
GEOMETRY = CacheGeometry(groups=(FullAttention("full", block_size=BLOCK),), hash_block_size=BLOCK)


def acquired(cache: CacheState, *, seed: int, blocks: int = FIRST_WINDOWS) -> LeaseRecord:
    first = seed * 10_000_000
    keys = BlockKeys(np.arange(first, first + blocks * BLOCK + 1, dtype=np.int32), hash_block_size=BLOCK)
    request = AcquireRequest(request_id=f"{seed}", keys=keys, prompt_tokens=keys.num_tokens)
    record = cache.try_acquire(request)
    assert isinstance(record, LeaseRecord)
    cache.run_slices()
    return record


def served(cache: CacheState, *, seed: int, blocks: int = FIRST_WINDOWS) -> None:
    """A request that computes its prompt and leaves; what it stores arrives."""
    record = acquired(cache, seed=seed, blocks=blocks)
    cache.confirm(record, blocks * BLOCK)
    cache.finish(record)
    copy_all(cache)


def copy_all(cache: CacheState) -> None:
    cache.run_slices()
    while transfers := cache.outbox.take_submissions():
        for transfer in transfers:
            cache.mark_submitted(transfer)
            cache.complete(transfer.transfer_id, Outcome.OK)
        cache.run_slices()


def gaps_of(cache: CacheState, *, kind: str, tier: Tier = Tier.GPU) -> list[float]:
    """Seconds of the bounds up to which samples have come, as often as they have."""
    ages = cache.meters.ages(tier)
    assert ages is not None
    gaps = ages.reuses if kind == "reuses" else ages.evictions
    assert sum(gaps.counts) or not gaps.ticks
    bounds = (*GAP_BOUNDS, float("inf"))
    return [bound for bound, count in zip(bounds, gaps.counts, strict=True) for _ in range(count)]


def test_a_hit_is_sampled_by_the_time_since_it_was_let_go_of() -> None:
    cache = CacheState(GEOMETRY, gpu_blocks=4 * SAMPLE)
    cache.meters.note_time(100.0)
    served(cache, seed=1)
    cache.meters.note_time(103.0)
    record = acquired(cache, seed=1)
    assert gaps_of(cache, kind="reuses") == [4.0]
    ages = cache.meters.ages(Tier.GPU)
    assert ages is not None
    assert ages.reuses.ticks == 3 * TICKS_PER_SECOND
    cache.release(record)


def test_a_release_counts_from_then_however_late_its_pins_are_dropped() -> None:
    cache = CacheState(GEOMETRY, gpu_blocks=8 * SAMPLE)
    cache.meters.note_time(10.0)
    served(cache, seed=1, blocks=SAMPLE // 2)
    record = acquired(cache, seed=1, blocks=SAMPLE // 2)
    cache.meters.note_time(20.0)
    cache.release(record)
    cache.meters.note_time(80.0)
    cache.release(acquired(cache, seed=1, blocks=SAMPLE // 2))
    assert gaps_of(cache, kind="reuses") == [64.0]


def test_blocks_in_use_have_no_gap() -> None:
    cache = CacheState(GEOMETRY, gpu_blocks=4 * SAMPLE)
    cache.meters.note_time(1.0)
    served(cache, seed=1, blocks=SAMPLE)
    held = acquired(cache, seed=1, blocks=SAMPLE)
    assert len(gaps_of(cache, kind="reuses")) == 1
    for now in (2.0, 3.0):
        cache.meters.note_time(now)
        cache.release(acquired(cache, seed=1, blocks=SAMPLE))
    assert len(gaps_of(cache, kind="reuses")) == 1
    cache.release(held)


def test_an_eviction_is_sampled_by_the_time_since_the_last_use() -> None:
    cache = CacheState(GEOMETRY, gpu_blocks=2 * SAMPLE + 1)
    cache.meters.note_time(1000.0)
    served(cache, seed=1, blocks=SAMPLE)
    cache.meters.note_time(1200.0)
    served(cache, seed=2, blocks=2 * SAMPLE - 1)
    assert gaps_of(cache, kind="evictions") == [256.0], "200 seconds"
    cache.meters.note_time(1201.0)
    served(cache, seed=3, blocks=2 * SAMPLE - 1)
    *recent, oldest = gaps_of(cache, kind="evictions")
    assert set(recent) == {1.0}
    assert oldest == 256.0


def test_what_a_reset_made_unfindable_is_not_evicted_again() -> None:
    cache = CacheState(GEOMETRY, gpu_blocks=SAMPLE + 1)
    cache.meters.note_time(1.0)
    for seed in (1, 2):
        served(cache, seed=seed, blocks=SAMPLE - 1)
    cache.reset()
    record = acquired(cache, seed=3, blocks=SAMPLE - 1)
    assert gaps_of(cache, kind="evictions") == []
    cache.release(record)


def test_both_tiers_are_sampled_apart() -> None:
    cache = CacheState(GEOMETRY, gpu_blocks=2 * SAMPLE, cpu_blocks=4 * SAMPLE)
    cache.meters.note_time(50.0)
    served(cache, seed=1)
    cache.meters.note_time(60.0)
    cache.reset((Tier.GPU,))
    record = acquired(cache, seed=1)
    assert record.hit.cpu_tokens == FIRST_WINDOWS * BLOCK
    assert gaps_of(cache, kind="reuses", tier=Tier.CPU) == [16.0]
    assert gaps_of(cache, kind="reuses") == []
    copy_all(cache)
    cache.release(record)


def test_a_cache_without_a_cpu_tier_has_no_ages_of_one() -> None:
    assert CacheState(GEOMETRY, gpu_blocks=9).meters.ages(Tier.CPU) is None


def test_a_host_that_tells_no_time_has_no_ages() -> None:
    cache = CacheState(GEOMETRY, gpu_blocks=SAMPLE + 1)
    served(cache, seed=1, blocks=SAMPLE - 1)
    for seed in (1, 2, 3):
        cache.release(acquired(cache, seed=seed, blocks=SAMPLE - 1))
    assert gaps_of(cache, kind="reuses") == gaps_of(cache, kind="evictions") == []


def test_what_was_idle_before_the_first_time_was_told_has_no_age() -> None:
    cache = CacheState(GEOMETRY, gpu_blocks=4 * SAMPLE)
    served(cache, seed=1)
    cache.meters.note_time(100.0)
    cache.release(acquired(cache, seed=1))
    assert gaps_of(cache, kind="reuses") == []
    cache.meters.note_time(103.0)
    cache.release(acquired(cache, seed=1))
    assert gaps_of(cache, kind="reuses") == [4.0]


@pytest.mark.parametrize("now", [0.0, 1e-9, 1.0, 3e8, 1e12])
def test_any_time_is_taken(now: float) -> None:
    cache = CacheState(GEOMETRY, gpu_blocks=9)
    cache.meters.note_time(now)
    served(cache, seed=1, blocks=3)
    assert cache.audit().violations == ()


@pytest.mark.parametrize("batch", [1, 7, 64, SAMPLE - 1, SAMPLE])
def test_batches_up_to_the_interval_are_sampled_once_an_interval(batch: int) -> None:
    gaps = Gaps()
    batches = 20 * SAMPLE // batch
    picked = 0
    for _ in range(batches):
        if batch < gaps.until_next:
            gaps.until_next -= batch
        else:
            assert 0 <= gaps.pick(np.arange(batch)) < batch
            picked += 1
    passed = batches * batch
    assert passed // (SAMPLE + batch) <= picked <= passed // SAMPLE


def test_bounds_are_upper_bounds() -> None:
    gaps = Gaps()
    for seconds in (*GAP_BOUNDS, 2 * GAP_BOUNDS[-1]):
        gaps.note(int(seconds * TICKS_PER_SECOND))
    assert gaps.counts == [1] * (len(GAP_BOUNDS) + 1)
