"""Prompts, lookups, leases and cancellations: what the metrics say equals what the runtime did."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import ValuesView

import pytest

from aiokv import AcquireTimeout, Deferred, Lease
from aiokv.core.cache import CacheState
from aiokv.observe.metrics import Collector, RuntimeFacts
from aiokv.observe.stats import Stats
from aiokv.testing import exhaustive_sources, make_resident
from tests.observe.support import Scrape, opened
from tests.runtime.support import BLOCK, GEOMETRY, GROUP, Case, finish_copies, prompt, turns, until

PROMPT_TOKENS = "aiokv_prompt_tokens_total"


def taken(granted: Lease | Deferred) -> Lease:
    assert isinstance(granted, Lease)
    return granted


def sources_of(case: Case) -> dict[str, float]:
    return Scrape(case.kv.collector).by("source", PROMPT_TOKENS)


async def test_sources_sum_to_the_prompts_and_each_is_the_oracles() -> None:
    rng = random.Random(20)
    expected = {"gpu": 0, "cpu": 0, "compute": 0}
    prompt_tokens = 0
    async with opened(gpu_blocks=65, cpu_blocks=64, manual=False) as case:
        for seed in range(24):
            tokens = prompt(rng.randint(1, 6), seed=seed, extra=rng.randint(0, BLOCK - 1))
            letters = "".join(rng.choice("gcb-") for _ in range(len(tokens) // BLOCK))
            make_resident(case.kv, tokens, {GROUP: letters})
            async with case.kv.acquire(f"request {seed}", tokens):
                pass
            await case.kv.reset()
            prompt_tokens += len(tokens)
            for source in exhaustive_sources(GEOMETRY, len(tokens), {GROUP: letters}):
                expected[source] += 1
        await case.kv.drain()
        scrape = Scrape(case.kv.collector)
    assert scrape.by("source", PROMPT_TOKENS) == expected
    assert all(expected.values())
    assert scrape.sum(PROMPT_TOKENS, phase="first") == scrape.sum(PROMPT_TOKENS) == prompt_tokens
    assert not scrape.errors


async def test_a_joined_load_counts_as_cpu_for_each_and_as_one_copy() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(4), {GROUP: "cccc"})
        leases = [taken(case.kv.try_acquire(f"{number}", prompt(4))) for number in range(3)]
        await until(lambda: len(case.backend.pending) == 1)
        running = Scrape(case.kv.collector)
        assert running.by("direction", "aiokv_transfer_inflight_blocks") == {"load": 4}
        assert running.sum(PROMPT_TOKENS) == 0
        case.backend.complete_all()
        for lease in leases:
            await lease.ready()
        scrape = Scrape(case.kv.collector)
        assert scrape.by("source", PROMPT_TOKENS) == {"cpu": 3 * 64, "compute": 3}
        assert scrape.by("direction", "aiokv_transfer_submitted_blocks_total") == {"load": 4}
        for lease in leases:
            lease.release()


async def test_a_failed_load_counts_what_was_delivered_and_what_was_promised_in_vain() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(5), {GROUP: "gcgcb"})
        lease = taken(case.kv.try_acquire("a", prompt(5)))
        assert (lease.hit.gpu_tokens, lease.hit.cpu_tokens) == (48, 32)
        await until(lambda: bool(case.backend.pending))
        case.backend.fail(direction="load")
        await lease.ready()
        scrape = Scrape(case.kv.collector)
        delivered = {"gpu": lease.delivered.gpu_tokens, "compute": lease.delivered.compute_tokens}
        assert scrape.by("source", PROMPT_TOKENS) == delivered == {"gpu": 16, "compute": 65}
        assert scrape("aiokv_load_failed_tokens_total", source="cpu", reason="error") == 64
        assert scrape.by("outcome", "aiokv_transfer_blocks_total", direction="load") == {"error": 2}
        assert scrape("aiokv_transfer_bytes_total", direction="load") == 0
        lease.release()


async def test_a_request_cancelled_while_loading_is_attributed_once() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        task = asyncio.ensure_future(case.kv.acquire("a", prompt(3)))
        await until(lambda: bool(case.backend.pending))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sources_of(case) == {"cpu": 48, "compute": 1}
        await finish_copies(case)
        scrape = Scrape(case.kv.collector)
        assert scrape.by("source", PROMPT_TOKENS) == {"cpu": 48, "compute": 1}
        assert scrape.by("stage", "aiokv_cancellations_total") == {"inflight": 1}
        assert scrape.by("how", "aiokv_leases_closed_total") == {"cancelled": 1}
        assert not scrape.errors


@pytest.mark.parametrize("way", ["cancel", "timeout"])
async def test_a_request_that_was_never_admitted_is_no_prompt(way: str) -> None:
    async with opened(gpu_blocks=5, cpu_blocks=0) as case:
        holder = taken(case.kv.try_acquire("holder", prompt(3)))
        timeout = 0.0 if way == "timeout" else None
        task = asyncio.ensure_future(case.kv.acquire("late", prompt(3, seed=1), timeout=timeout))
        await turns(20)
        if way == "cancel":
            task.cancel()
        with pytest.raises(AcquireTimeout if way == "timeout" else asyncio.CancelledError):
            await task
        scrape = Scrape(case.kv.collector)
        assert scrape.sum(PROMPT_TOKENS) == 49
        assert scrape.by("stage", "aiokv_cancellations_total") == {"queued": 1}
        assert scrape("aiokv_lookups_total", result="deferred") >= 1
        assert scrape.by("reason", "aiokv_alloc_failures_total", tier="gpu")["capacity"] >= 1
        assert scrape("aiokv_leases_opened_total") == 1
        holder.release()


async def test_retries_of_a_waiting_request_are_lookups_but_one_prompt() -> None:
    async with opened(gpu_blocks=5, cpu_blocks=0) as case:
        holders = [taken(case.kv.try_acquire(f"{n}", prompt(1, seed=n, extra=0))) for n in range(4)]
        task = asyncio.ensure_future(case.kv.acquire("late", prompt(4, seed=9, extra=0)))
        for holder in holders:
            await turns(20)
            holder.release()
        lease = await task
        scrape = Scrape(case.kv.collector)
        assert scrape("aiokv_lookups_total", result="deferred") == 4
        assert scrape("aiokv_lookups_total", result="miss") == 5
        assert scrape("aiokv_lookup_duration_seconds_count") == scrape.sum("aiokv_lookups_total") == 9
        assert scrape.sum(PROMPT_TOKENS) == 4 * BLOCK + 4 * BLOCK
        lease.release()


async def test_lookups_are_counted_by_what_they_found() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(4), {GROUP: "gggg"})
        make_resident(case.kv, prompt(4, seed=1), {GROUP: "gg--"})
        for seed in range(3):
            taken(case.kv.try_acquire(f"{seed}", prompt(4, seed=seed))).release()
        assert Scrape(case.kv.collector).by("result", "aiokv_lookups_total") == {"hit": 1, "partial": 1, "miss": 1}


async def test_switches_between_the_tiers_fall_into_buckets() -> None:
    async with opened(gpu_blocks=33, cpu_blocks=32, manual=False) as case:
        for seed, letters in enumerate(["gggg", "ggcc", "gcgcgc", "----"]):
            make_resident(case.kv, prompt(len(letters), seed=seed), {GROUP: letters})
            async with case.kv.acquire(f"{seed}", prompt(len(letters), seed=seed)):
                pass
        scrape = Scrape(case.kv.collector)
        buckets = {bound: scrape("aiokv_interleaved_runs_bucket", le=bound) for bound in ("0.0", "1.0", "4.0", "8.0")}
        assert buckets == {"0.0": 2, "1.0": 3, "4.0": 3, "8.0": 4}
        assert scrape("aiokv_interleaved_runs_sum") == 0 + 1 + 5 + 0
        assert scrape("aiokv_interleaved_runs_count") == 4


async def test_leases_are_counted_by_how_they_end() -> None:
    async with opened() as case:
        finished, released, kept = (taken(case.kv.try_acquire(f"{n}", prompt(1, seed=n))) for n in range(3))
        finished.finish()
        released.release()
        with pytest.raises(ZeroDivisionError):
            async with case.kv.acquire("failing", prompt(1, seed=4)):
                raise ZeroDivisionError
        await finish_copies(case)
        scrape = Scrape(case.kv.collector)
        assert scrape.by("how", "aiokv_leases_closed_total") == {"finished": 1, "released": 2}
        assert scrape("aiokv_leases_opened_total") == 4
        assert scrape("aiokv_leases", state="active") == 1
        assert scrape("aiokv_lease_duration_seconds_count") == 3
        assert kept.request_id == "2"
    closed = Scrape(case.kv.collector)
    assert closed.by("how", "aiokv_leases_closed_total") == {"finished": 1, "released": 2, "shutdown": 1}
    assert closed("aiokv_leases", state="active") == 0
    assert closed("aiokv_lease_duration_seconds_count") == 4
    assert not closed.errors
    kept.release()


async def test_a_lease_that_was_garbage_collected_is_a_leak_of_its_own_kind() -> None:
    async with opened() as case:
        lease = taken(case.kv.try_acquire("leaked", prompt(1)))
        with pytest.warns(ResourceWarning, match="'leaked'"):
            del lease
            gc.collect()
            await until(lambda: not case.kv.core.live_leases)
            await turns(3)
        scrape = Scrape(case.kv.collector)
        assert scrape.by("how", "aiokv_leases_closed_total") == {"finalizer": 1}
        assert scrape("aiokv_leases", state="active") == 0


class InterruptedOnce(dict[int, float]):
    """A dictionary that the loop's thread changes while the first reader looks."""

    interruptions = 1

    def values(self) -> ValuesView[float]:  # type: ignore[override]  # the view of a plain dictionary has no public name
        if self.interruptions:
            self.interruptions -= 1
            raise RuntimeError("dictionary changed size during iteration")
        return super().values()


@pytest.mark.parametrize("entries", [{1: 5.0, 2: 9.0}, InterruptedOnce({1: 5.0, 2: 9.0})], ids=["still", "busy"])
def test_the_age_of_the_oldest_lease_needs_no_threshold(entries: dict[int, float]) -> None:
    stats = Stats()
    collector = Collector(clock=lambda: 12.0)
    core = CacheState(GEOMETRY, gpu_blocks=5)
    collector.attach(core, stats=stats, facts=RuntimeFacts(version="1", backend="none"))
    assert Scrape(collector)("aiokv_lease_age_seconds_max") == 0.0
    stats.opened_at = entries
    assert Scrape(collector)("aiokv_lease_age_seconds_max") == 7.0
    del entries[1]
    assert Scrape(collector)("aiokv_lease_age_seconds_max") == 3.0


async def test_the_age_follows_the_leases_of_a_runtime() -> None:
    async with opened() as case:
        first = taken(case.kv.try_acquire("a", prompt(1)))
        second = taken(case.kv.try_acquire("b", prompt(1, seed=1)))
        age = Scrape(case.kv.collector)("aiokv_lease_age_seconds_max")
        assert Scrape(case.kv.collector)("aiokv_lease_age_seconds_max") > age > 0
        first.release()
        second.release()
        assert Scrape(case.kv.collector)("aiokv_lease_age_seconds_max") == 0
