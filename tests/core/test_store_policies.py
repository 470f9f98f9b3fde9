"""LAZY and SELECTIVE beside EAGER: what is copied, when, and what never is."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.core.cache import CacheState
from aiokv.core.lease_table import AcquireRequest, LeaseRecord
from aiokv.core.sightings import Sightings
from aiokv.core.store_policy import StoreSettings
from aiokv.errors import ConfigError
from aiokv.model.events import BlockStored
from aiokv.model.ids import DigestArray, Direction, Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import DeclineReason, Outcome, StorePolicy
from aiokv.model.spec import FullAttention, SlidingWindow
from aiokv.testing.host import Host
from aiokv.testing.streams import geometry_of

GPU, CPU = Tier.GPU, Tier.CPU
BLOCK = 4


def host(
    policy: StorePolicy,
    *,
    gpu: int = 20,
    cpu: int = 64,
    fraction: float = 0.125,
    count: int = 2,
    slice_blocks: int = 1024,
) -> Host:
    stores = StoreSettings(policy=policy, lazy_fraction=fraction, selective_count=count)
    geometry = geometry_of(FullAttention("full", block_size=BLOCK))
    return Host(geometry, gpu_blocks=gpu, cpu_blocks=cpu, slice_blocks=slice_blocks, stores=stores)


def compute(h: Host, stream: int, tokens: int) -> LeaseRecord:
    record = h.admit(stream, tokens)
    h.confirm(record, tokens)
    return record


def serve(h: Host, stream: int, tokens: int) -> None:
    """One request from its admission to its end, copies included."""
    h.finish(compute(h, stream, tokens))
    h.end_all()
    h.check()


def skipped(h: Host, reason: DeclineReason) -> int:
    return h.cache.counters.store_skipped_blocks[reason]


# LAZY.


def test_lazy_copies_nothing_while_nothing_is_near_eviction() -> None:
    h = host(StorePolicy.LAZY, gpu=41)
    serve(h, 0, 41)
    assert h.letters(0)[:10] == "g" * 10
    h.tear_down()


def test_lazy_copies_the_blocks_that_are_evicted_next() -> None:
    h = host(StorePolicy.LAZY, gpu=13, fraction=0.5)
    h.place(0, range(10), tier=GPU)
    h.end_all()
    assert h.letters(0)[:10] == "gggggbbbbb", "two slots are free; a target of six and a little more"
    h.tear_down()


def test_lazy_keeps_as_much_ahead_as_a_recent_request_has_claimed() -> None:
    h = host(StorePolicy.LAZY, gpu=41, fraction=0.05)
    h.place(0, range(20), tier=GPU)
    h.place(1, range(19), tier=GPU)
    h.end_all()
    assert h.letters(0).count("b") == 1
    claims = 37 // BLOCK + 1 - 5
    h.release(h.admit(2, 37))
    h.end_all()
    assert h.counts(GPU).free + h.letters(0).count("b") >= claims > 2, "so many may be claimed at once again"
    h.tear_down()


def test_a_lazily_stored_block_is_loaded_again() -> None:
    h = host(StorePolicy.LAZY, gpu=13, fraction=0.5)
    serve(h, 0, 41)
    serve(h, 1, 21)
    record = h.admit(0, 41)
    assert (record.hit.gpu_tokens > 0, record.hit.cpu_tokens > 0, record.length) == (True, True, 40)
    h.end_all()
    h.check()
    h.tear_down()


def test_a_lazy_walk_does_not_stall_when_blocks_move_under_it() -> None:
    """A pool of 64, 61 hashed free blocks, a target of 4; each store is completed before the next step."""
    cache = CacheState(
        geometry_of(FullAttention("full", block_size=BLOCK)),
        gpu_blocks=64,
        cpu_blocks=256,
        stores=StoreSettings(policy=StorePolicy.LAZY, lazy_fraction=4 / 63),
    )
    keys = BlockKeys(range(1000, 1000 + 61 * BLOCK), hash_block_size=BLOCK)
    cache.placement.place(keys, group=0, positions=np.arange(61), tier=GPU)
    step(cache)
    for number in range(80):
        fresh = BlockKeys(range(10_000 * (number + 1), 10_000 * (number + 1) + BLOCK + 1), hash_block_size=BLOCK)
        record = cache.try_acquire(AcquireRequest(request_id=str(number), keys=fresh, prompt_tokens=BLOCK + 1))
        assert isinstance(record, LeaseRecord)
        step(cache)
        cache.confirm(record, BLOCK + 1)
        cache.finish(record)
        step(cache)
    on_gpu = cache.find_blocks(keys, group=0, tier=GPU).present
    on_cpu = cache.find_blocks(keys, group=0, tier=CPU).present
    assert not on_gpu.any(), "all 61 were evicted"
    assert on_cpu.all(), "and each had been copied before"
    assert not cache.audit().violations


def step(cache: CacheState) -> None:
    cache.run_slices()
    while transfers := cache.outbox.take_submissions():
        for transfer in transfers:
            cache.mark_submitted(transfer)
            cache.complete(transfer.transfer_id, Outcome.OK)
        cache.run_slices()


def test_a_lazy_store_leaves_the_eviction_order_as_it_was() -> None:
    h = host(StorePolicy.LAZY, gpu=13, fraction=0.5)
    h.place(0, range(10), tier=GPU)
    h.end_all()
    h.admit(1, 16)
    assert h.letters(0)[:10] == "gggggbbbcc", "the tail of the prefix went first"
    h.end_all()
    h.tear_down()


def test_a_block_that_is_hit_while_it_is_stored_becomes_recent() -> None:
    h = host(StorePolicy.LAZY, gpu=13, fraction=0.5)
    h.place(1, range(3), tier=GPU)
    h.place(1, range(3, 10), tier=GPU)
    h.turn()
    h.submit_all()
    assert sum(len(t) for t in h.running) == 5
    h.release(h.admit(1, 13))
    h.end_all()
    h.admit(0, 16)
    assert h.letters(1)[:10] == "bbbggbbbcc", "blocks 0 to 2 were the coldest, before they were hit"
    h.end_all()
    h.tear_down()


def test_nothing_is_stored_twice_by_walk_after_walk() -> None:
    h = host(StorePolicy.LAZY, gpu=13, fraction=1.0)
    h.finish(compute(h, 0, 41))
    h.turn()
    h.submit_all()
    stored = h.cache.counters.submitted_blocks.copy()
    h.release(h.admit(1, 5))
    h.turn()
    h.submit_all()
    assert h.cache.counters.submitted_blocks == stored, "all ten are in flight"
    h.end_all()
    h.release(h.admit(1, 5))
    h.end_all()
    assert h.cache.counters.submitted_blocks == stored, "all ten are resident"
    h.tear_down()


def test_a_failed_lazy_store_is_tried_again_with_the_next_activity_only() -> None:
    h = host(StorePolicy.LAZY, gpu=13, fraction=1.0)
    h.finish(compute(h, 0, 41))
    h.end_all(Outcome.FAILED)
    assert h.letters(0)[:10] == "g" * 10
    assert not h.cache.has_work, "a drain ends, however often copies fail"
    serve(h, 1, 5)
    assert h.letters(0)[:10].count("b") >= 9
    h.tear_down()


def test_a_hole_in_the_cpu_tier_is_filled_by_the_next_walk() -> None:
    h = host(StorePolicy.LAZY, gpu=13, fraction=1.0)
    serve(h, 0, 41)
    h.evict(0, [3, 4], tier=CPU)
    h.end_all()
    assert h.letters(0)[:10] == "b" * 10
    h.tear_down()


def test_a_lazy_walk_with_too_few_cpu_slots_skips_and_counts() -> None:
    h = host(StorePolicy.LAZY, gpu=13, cpu=3, fraction=1.0)
    h.place(1, range(3), tier=CPU)
    h.admit(1, 13)
    h.submit_all()
    h.place(0, range(8), tier=GPU)
    h.turn()
    assert not h.queued, "all CPU slots are being read"
    assert skipped(h, DeclineReason.POOL_FULL) > 0
    h.check()
    h.end_all()
    h.tear_down()


def test_a_lazy_walk_takes_no_slot_that_was_promised() -> None:
    h = host(StorePolicy.LAZY, gpu=13, fraction=1.0, slice_blocks=1)
    h.finish(compute(h, 0, 41))
    h.run_slices()
    h.end_all()
    record = h.acquire(1, 45)
    assert isinstance(record, LeaseRecord)
    h.check()
    h.end_all()
    h.tear_down()


def test_unconfirmed_blocks_are_never_stored_lazily() -> None:
    h = host(StorePolicy.LAZY, gpu=13, fraction=1.0)
    record = h.admit(0, 41)
    h.confirm(record, 17)
    h.release(record)
    h.end_all()
    assert h.letters(0)[:10] == "bbbb------"
    h.tear_down()


def test_a_reset_ends_what_was_covered_and_walks_begin_anew() -> None:
    h = host(StorePolicy.LAZY, gpu=13, fraction=1.0)
    serve(h, 0, 41)
    h.reset(CPU)
    h.end_all()
    assert h.letters(0)[:10] == "b" * 10
    h.tear_down()


def test_a_lazy_store_that_a_reset_overtakes_registers_nothing() -> None:
    h = host(StorePolicy.LAZY, gpu=13, fraction=1.0)
    h.finish(compute(h, 0, 41))
    h.turn()
    h.submit_all()
    h.reset(GPU)
    while h.running:
        h.end(h.running[0])
    h.run_slices()
    assert h.letters(0)[:10] == "-" * 10
    h.check()
    h.tear_down()


def test_lazy_walks_cover_every_group() -> None:
    geometry = geometry_of(FullAttention("full", block_size=4), SlidingWindow("swa", block_size=8, window=16))
    h = Host(geometry, gpu_blocks=25, cpu_blocks=64, stores=StoreSettings(policy=StorePolicy.LAZY, lazy_fraction=1.0))
    serve(h, 0, 41)
    assert h.letters(0, 0)[:10] == "b" * 10
    assert "b" in h.letters(0, 1)
    h.tear_down()


# Events of stores that no request asked for (law 9, invariant 11).


def test_a_lazy_store_is_published_with_the_tokens_of_its_gpu_block() -> None:
    h = host(StorePolicy.LAZY, gpu=13, fraction=1.0)
    h.finish(compute(h, 0, 41))
    h.turn()
    h.submit_all()
    while h.running:
        h.cache.complete(h.running.pop(0).transfer_id, Outcome.OK)
    h.cache.run_slices()
    stored = [event for event in h.cache.events.take() if isinstance(event, BlockStored) and event.tier is CPU]
    tokens = [token for event in sorted(stored, key=lambda e: e.token_ids[0]) for token in event.token_ids]
    assert tokens == list(range(40))
    assert len(stored) == 1, "one dense run"
    assert stored[0].parent_hash is None


def test_blocks_registered_while_nobody_listened_are_published_in_no_tier() -> None:
    h = host(StorePolicy.LAZY, gpu=13, fraction=1.0)
    h.cache.events.is_on = False
    record = h.admit(0, 41)
    h.cache.confirm(record, 41)
    h.cache.release(record)
    h.cache.events.is_on = True
    step(h.cache)
    assert h.cache.find_blocks(h.keys(0), group=0, tier=CPU).present[:10].all()
    assert not [event for event in h.cache.events.take() if isinstance(event, BlockStored)]


def test_a_new_round_of_listening_forgets_the_origins_of_the_last() -> None:
    h = host(StorePolicy.LAZY, gpu=13, fraction=1.0)
    record = h.admit(0, 41)
    h.cache.confirm(record, 41)
    h.cache.events.is_on = False
    h.cache.events.is_on = True
    h.cache.events.take()
    h.cache.release(record)
    step(h.cache)
    assert not [event for event in h.cache.events.take() if isinstance(event, BlockStored)]


# SELECTIVE.


def test_selective_copies_a_block_at_its_second_sighting() -> None:
    h = host(StorePolicy.SELECTIVE)
    serve(h, 0, 17)
    assert h.letters(0)[:4] == "gggg"
    assert skipped(h, DeclineReason.SEEN_TOO_SELDOM) == 4
    serve(h, 0, 17)
    assert h.letters(0)[:4] == "bbbb"
    h.tear_down()


def test_selective_copies_only_what_two_prompts_share() -> None:
    h = host(StorePolicy.SELECTIVE)
    serve(h, 0, 33)
    serve(h, 2, 33)
    assert h.letters(0)[:8] == "bbbbbggg", "streams 0 and 2 share 20 tokens"
    assert h.letters(2)[:8] == "bbbbbggg"
    h.tear_down()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_selective_waits_for_as_many_sightings_as_configured(count: int) -> None:
    h = host(StorePolicy.SELECTIVE, count=count)
    for number in range(1, count + 1):
        serve(h, 0, 17)
        assert h.letters(0)[:4] == ("bbbb" if number == count else "gggg")
    h.tear_down()


def test_a_block_that_was_evicted_and_computed_again_counts_as_seen_twice() -> None:
    h = host(StorePolicy.SELECTIVE)
    serve(h, 0, 17)
    h.evict(0, range(4), tier=GPU)
    serve(h, 0, 17)
    assert h.letters(0)[:4] == "bbbb"
    h.tear_down()


def test_sightings_are_bounded_and_never_undercounted() -> None:
    sightings = Sightings(100)
    generator = np.random.default_rng(7)
    size = sightings.num_bytes
    hot: DigestArray = generator.integers(0, 2**63, (50, 4), dtype=np.uint64)
    once: DigestArray = generator.integers(0, 2**63, (3000, 4), dtype=np.uint64)
    counts = [sightings.count(hot).min() for _ in range(10)]
    assert all(least >= number for number, least in enumerate(counts, start=1))
    assert np.count_nonzero(sightings.count(once) > 1) < 0.05 * len(once)
    for _ in range(20):
        sightings.count(generator.integers(0, 2**63, (1000, 4), dtype=np.uint64))
    assert sightings.count(hot).max() < 5, "what was seen long ago is forgotten"
    assert sightings.num_bytes == size


# Holes.


@pytest.mark.parametrize("policy", [StorePolicy.EAGER, StorePolicy.SELECTIVE])
def test_a_hole_is_offered_again_while_the_request_runs(policy: StorePolicy) -> None:
    h = host(policy, count=1)
    record = compute(h, 0, 17)
    h.end_all()
    h.evict(0, [1, 2], tier=CPU)
    h.append(record, 8)
    h.extend(record, 8)
    h.confirm(record, 25)
    h.end_all()
    assert h.letters(0)[:6] == "bbbbbb"
    h.check()
    h.tear_down()


@pytest.mark.parametrize("policy", [StorePolicy.EAGER, StorePolicy.SELECTIVE])
def test_a_hole_is_offered_again_at_finish(policy: StorePolicy) -> None:
    h = host(policy, count=1)
    record = compute(h, 0, 17)
    h.end_all()
    h.evict(0, [0, 3], tier=CPU)
    h.finish(record)
    h.end_all()
    assert h.letters(0)[:4] == "bbbb"
    h.tear_down()


def test_few_holes_of_a_large_tier_wait_for_more_or_for_an_end() -> None:
    """Of 256 slots the copies of four blocks have to go before an offer looks for holes."""
    h = host(StorePolicy.EAGER, gpu=30, cpu=256)
    record = compute(h, 0, 25)
    h.end_all()
    h.evict(0, [1, 2, 3], tier=CPU)
    serve(h, 1, 9)
    assert h.letters(0)[:6] == "bbbbbb", "a request that ends looks for all of them"
    h.evict(0, [1, 2, 3], tier=CPU)
    other = compute(h, 1, 13)
    h.end_all()
    assert h.letters(0)[:6] == "bgggbb"
    h.evict(0, [5], tier=CPU)
    third = compute(h, 1, 17)
    h.end_all()
    assert h.letters(0)[:6] == "bbbbbb"
    for lease in (record, other, third):
        h.finish(lease)
    h.tear_down()


def test_a_block_whose_copy_went_came_and_went_again_is_one_hole() -> None:
    h = host(StorePolicy.EAGER, cpu=256)
    record = compute(h, 0, 17)
    h.end_all()
    h.evict(0, [1], tier=CPU)
    other = h.admit(0, 17)
    h.end_all()
    assert h.letters(0)[:4] == "bbbb", "what a request hits is offered"
    h.evict(0, [1], tier=CPU)
    before = h.cache.counters.submitted_blocks[Direction.STORE]
    h.finish(record)
    h.end_all()
    h.check()
    assert h.letters(0)[:4] == "bbbb"
    assert h.cache.counters.submitted_blocks[Direction.STORE] - before == 1
    h.release(other)
    h.tear_down()


def test_a_hole_of_a_request_that_has_left_stays() -> None:
    h = host(StorePolicy.EAGER)
    serve(h, 0, 17)
    h.evict(0, [1], tier=CPU)
    serve(h, 1, 9)
    assert h.letters(0)[:4] == "bgbb"
    h.tear_down()


def test_holes_do_not_drive_each_other_out_of_a_small_cpu_pool() -> None:
    h = host(StorePolicy.EAGER, gpu=30, cpu=4)
    record = h.admit(0, 33, reserve_tokens=32)
    h.confirm(record, 33)
    h.end_all()
    before = h.cache.counters.submitted_blocks.copy()
    for _ in range(6):
        h.append(record, 4)
        h.confirm(record, record.keys.num_tokens)
        h.end_all()
        h.check()
    after = h.cache.counters.submitted_blocks
    assert sum(after.values()) - sum(before.values()) == 6, "the new blocks, and no hole that another one must pay for"
    assert skipped(h, DeclineReason.POOL_FULL) > 0
    h.tear_down()


def test_a_hole_takes_the_place_of_a_block_that_nobody_runs_with() -> None:
    h = host(StorePolicy.EAGER, gpu=30, cpu=6)
    h.place(1, range(2), tier=CPU)
    record = compute(h, 0, 17)
    h.end_all()
    h.evict(0, [2], tier=CPU)
    h.place(2, [7], tier=CPU)
    h.finish(record)
    h.end_all()
    assert h.letters(0)[:4] == "bbbb"
    h.tear_down()


# What was taken down when a store was planned.


@pytest.mark.parametrize("policy", [StorePolicy.EAGER, StorePolicy.SELECTIVE])
def test_a_store_completes_from_the_names_of_its_planning(policy: StorePolicy) -> None:
    """Whatever becomes of the request's keys while the copy runs."""
    h = host(policy, count=1)
    record = compute(h, 0, 17)
    h.turn()
    h.submit_all()
    record.keys.truncate(4)
    h.release(record)
    h.end_all()
    assert h.cache.find_blocks(BlockKeys(range(16), hash_block_size=BLOCK), group=0, tier=CPU).present.all()


@pytest.mark.parametrize("policy", StorePolicy)
def test_without_a_cpu_tier_every_policy_rests(policy: StorePolicy) -> None:
    h = host(policy, cpu=0, fraction=1.0)
    serve(h, 0, 41)
    serve(h, 0, 41)
    assert not any(h.cache.counters.submitted_blocks.values())
    h.tear_down()


@pytest.mark.parametrize("policy", StorePolicy)
def test_a_lost_backend_stops_every_policy(policy: StorePolicy) -> None:
    h = host(policy, fraction=1.0, count=1)
    serve(h, 0, 17)
    h.cache.lose_backend()
    serve(h, 1, 17)
    assert h.letters(1)[:4] == "gggg"
    h.tear_down()


@pytest.mark.parametrize(
    ("fraction", "count"), [(0.0, 2), (1.1, 2), (float("nan"), 2), (0.5, 0), (0.5, 256), (0.5, True)]
)
def test_settings_that_make_no_policy(fraction: float, count: int) -> None:
    with pytest.raises(ConfigError):
        StoreSettings(lazy_fraction=fraction, selective_count=count)
