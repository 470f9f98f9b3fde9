"""What went wrong in the metrics of other caches, each tried here once. Those not here have no counterpart in aiokv.

Events whose tokens and hashes disagree: `test_event_metrics.py`. Names that promtool refuses: `test_metric_names.py`.
"""

from __future__ import annotations

import asyncio

import pytest

from aiokv import CapacityError, Lease, UsageError
from aiokv.observe.families import FAMILIES, Kind
from aiokv.testing import make_resident
from tests.observe.support import Scrape, opened
from tests.runtime.support import BLOCK, GROUP, Case, finish_copies, prompt, turns, until

TOKENS = "aiokv_prompt_tokens_total"
BLOCKS = "aiokv_prompt_blocks_total"


def taken(granted: object) -> Lease:
    assert isinstance(granted, Lease)
    return granted


async def started(case: Case, *, blocks: int, seed: int = 0) -> asyncio.Future[Lease]:
    task = asyncio.ensure_future(case.kv.acquire(f"request {seed}", prompt(blocks, seed=seed)))
    await turns(20)
    return task


async def test_a_counter_driven_negative_after_a_preemption() -> None:
    """Local hits were the cached tokens of now less the external ones of the first admission."""
    async with opened(gpu_blocks=33) as case:
        make_resident(case.kv, prompt(8), {GROUP: "c" * 8})
        task = await started(case, blocks=8)
        case.backend.complete_all()
        lease = await task
        preempted = lease.preempt()
        await finish_copies(case)
        await case.kv.reset()
        make_resident(case.kv, prompt(8), {GROUP: "g"})
        taken(preempted.try_resume()).release()
        scrape = Scrape(case.kv.collector)
        assert scrape.by("source", TOKENS, phase="first") == {"cpu": 128, "compute": 1}
        assert scrape.by("source", TOKENS, phase="resumed") == {"gpu": 16, "compute": 113}
        assert min(scrape.samples.values()) >= 0
        assert not scrape.errors


async def test_a_request_counted_at_every_retry_of_its_admission() -> None:
    async with opened(gpu_blocks=5, cpu_blocks=0) as case:
        holder = taken(case.kv.try_acquire("holder", prompt(3)))
        waiter = await started(case, blocks=3, seed=1)
        for _ in range(5):
            case.kv.try_acquire("polls", prompt(3, seed=2))
            await turns(3)
        assert Scrape(case.kv.collector).sum(TOKENS) == 49
        holder.release()
        (await waiter).release()
        assert Scrape(case.kv.collector).sum(TOKENS) == 98


async def test_a_recomputation_after_a_preemption_shown_as_a_prefix_hit() -> None:
    """Random prompts: nothing is shared, whatever was preempted; the headline counts first admissions."""
    async with opened(gpu_blocks=33) as case:
        for seed in range(6):
            lease = taken(case.kv.try_acquire(f"{seed}", prompt(4, seed=seed)))
            lease.confirm(lease.num_tokens)
            preempted = lease.preempt()
            await finish_copies(case)
            taken(preempted.try_resume()).release()
        scrape = Scrape(case.kv.collector)
        assert scrape.by("source", TOKENS, phase="first") == {"compute": 6 * 65}
        assert scrape.by("source", TOKENS, phase="resumed") == {"gpu": 6 * 64, "compute": 6}


async def test_tiers_whose_denominators_differ() -> None:
    """The second tier's queries were the whole prompt, not what the first had left."""
    async with opened(gpu_blocks=33) as case:
        make_resident(case.kv, prompt(6), {GROUP: "ggcc--"})
        task = await started(case, blocks=6)
        case.backend.complete_all()
        (await task).release()
        scrape = Scrape(case.kv.collector)
        assert scrape.by("source", TOKENS) == {"gpu": 32, "cpu": 32, "compute": 33}
        assert scrape.by("source", BLOCKS) == {"gpu": 2, "cpu": 2, "compute": 2}
        assert scrape.sum(TOKENS) == 97


async def test_a_request_counted_again_without_hits_once_its_load_has_ended() -> None:
    async with opened(gpu_blocks=33) as case:
        make_resident(case.kv, prompt(4), {GROUP: "cccc"})
        task = await started(case, blocks=4)
        assert Scrape(case.kv.collector).sum(TOKENS) == 0
        case.backend.complete_all()
        lease = await task
        counted = Scrape(case.kv.collector).by("source", TOKENS)
        lease.confirm(lease.num_tokens)
        lease.finish()
        await finish_copies(case)
        assert Scrape(case.kv.collector).by("source", TOKENS) == counted == {"cpu": 64, "compute": 1}


async def test_requests_that_pass_the_cache_by_counted_as_misses() -> None:
    """Those that are refused are not admitted: neither a prompt nor a lookup."""
    async with opened(gpu_blocks=5) as case:
        with pytest.raises(CapacityError):
            case.kv.try_acquire("never fits", prompt(50))
        with pytest.raises(UsageError):
            case.kv.try_acquire("empty", [])
        scrape = Scrape(case.kv.collector)
        assert scrape.sum(TOKENS) == scrape.sum(BLOCKS) == scrape.sum("aiokv_lookups_total") == 0


async def test_a_hit_that_stays_counted_although_its_load_failed() -> None:
    async with opened(gpu_blocks=33) as case:
        make_resident(case.kv, prompt(4), {GROUP: "gccc"})
        task = await started(case, blocks=4)
        case.backend.fail(direction="load")
        (await task).release()
        scrape = Scrape(case.kv.collector)
        assert scrape.by("source", TOKENS) == {"gpu": 16, "compute": 49}
        assert scrape.by("source", BLOCKS) == {"gpu": 1, "compute": 3}
        assert scrape.by("reason", "aiokv_load_failed_tokens_total", source="cpu") == {"error": 48}


@pytest.mark.parametrize(("end", "reason"), [("fail", "error"), ("corrupt", "corrupt"), ("lose", "lost")])
async def test_a_load_that_failed_without_saying_how(end: str, reason: str) -> None:
    async with opened(gpu_blocks=33) as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        task = await started(case, blocks=2)
        getattr(case.backend, end)()
        (await task).release()
        scrape = Scrape(case.kv.collector)
        assert scrape.by("reason", "aiokv_load_failed_tokens_total") == {reason: 32}
        assert scrape.by("outcome", "aiokv_transfer_blocks_total", direction="load") == {reason: 2}


def test_a_hit_rate_shown_as_a_gauge() -> None:
    """Ratios are for recording rules: what a window of them was is lost, and so is what they were of."""
    gauges = {family.name for family in FAMILIES if family.kind is Kind.GAUGE}
    assert not [name for name in gauges if any(word in name for word in ("rate", "ratio", "hit", "speed", "perc"))]


@pytest.mark.parametrize("cpu_blocks", [0, 16])
async def test_series_of_a_tier_that_nobody_fills(cpu_blocks: int) -> None:
    async with opened(cpu_blocks=cpu_blocks) as case:
        scrape = Scrape(case.kv.collector)
        tiers = {"gpu", "cpu"} if cpu_blocks else {"gpu"}
        assert scrape.values_of("tier") == tiers
        assert scrape.values_of("source") == tiers | {"compute"}
        assert ("aiokv_bridge_wake_latency_seconds" in scrape.types) == bool(cpu_blocks)


async def test_labels_that_grow_with_requests_and_tenants() -> None:
    async with opened(gpu_blocks=33) as case:
        series = set(Scrape(case.kv.collector).samples)
        for seed in range(20):
            async with case.kv.acquire(f"request {seed}", prompt(3, seed=seed), salt=f"tenant {seed}") as lease:
                lease.confirm(lease.num_tokens)
            await finish_copies(case)
        after = Scrape(case.kv.collector)
        assert set(after.samples) == series
        assert "request" not in {value for _, labels in after.samples for _, value in labels}


async def test_stores_that_were_not_made_and_say_nothing() -> None:
    """The last block of a finished request is not full: it has no hash and ends with its lease."""
    async with opened(gpu_blocks=33) as case:
        async with case.kv.acquire("a", prompt(2, extra=5)) as lease:
            lease.confirm(lease.num_tokens)
        await finish_copies(case)
        lease = await case.kv.acquire("published in part", prompt(3, seed=1, extra=0))
        lease.confirm(lease.num_tokens, publish_to=BLOCK)
        lease.finish()
        await finish_copies(case)
        unread = await case.kv.acquire("computes nothing", prompt(2, seed=2, extra=5))
        unread.finish()
        await until(lambda: not case.kv.core.live_leases)
        skipped = Scrape(case.kv.collector).by("reason", "aiokv_store_skipped_blocks_total")
        assert skipped == {"unhashed": 1 + 2}
