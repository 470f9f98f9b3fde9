"""The collector as hosts use it: any time, any thread, any registry; it never raises and no counter ever falls."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from aiokv import KVRuntime, Lease, RuntimeConfig
from aiokv.core.cache import CacheState
from aiokv.core.counters import LookupResult
from aiokv.observe.families import FAMILIES
from aiokv.observe.ledger import Ledger
from aiokv.observe.pools import PoolsCollector
from aiokv.testing import FakeBackend
from tests.observe.support import Scrape, opened
from tests.runtime.support import GEOMETRY, Case, finish_copies, prompt, turns


async def serve(case: Case, *, seed: int = 0, blocks: int = 3) -> None:
    async with case.kv.acquire(f"request {seed}", prompt(blocks, seed=seed)) as lease:
        lease.confirm(lease.num_tokens)


# Life.


async def test_it_is_empty_before_the_runtime_is_open_and_keeps_the_last_values_after_it_is_closed() -> None:
    kv = KVRuntime(RuntimeConfig(geometry=GEOMETRY, gpu_blocks=9, backend=FakeBackend(manual=False)))
    registry = CollectorRegistry()
    registry.register(kv.collector)
    assert generate_latest(registry) == b""
    async with kv, kv.acquire("a", prompt(3)):
        assert registry.get_sample_value("aiokv_leases", {"state": "active"}) == 1
    last = Scrape(kv.collector)
    assert last.sum("aiokv_prompt_tokens_total") == 49
    assert last("aiokv_leases", state="active") == 0
    assert not last.errors
    assert Scrape(kv.collector).samples == last.samples


async def test_one_collector_may_be_in_two_registries() -> None:
    async with opened() as case:
        registries = [CollectorRegistry(auto_describe=automatic) for automatic in (True, False)]
        for registry in registries:
            registry.register(case.kv.collector)
        await serve(case)
        await finish_copies(case)
        first, second = (generate_latest(registry) for registry in registries)
        assert first == second
        assert b"aiokv_leases_opened_total 1.0" in first


async def test_a_name_can_be_asked_for_alone() -> None:
    async with opened() as case:
        registry = CollectorRegistry()
        registry.register(case.kv.collector)
        text = generate_latest(registry.restricted_registry(["aiokv_leases_opened_total"])).decode()  # type: ignore[no-untyped-call, unused-ignore]  # typed since 0.23
        assert [line for line in text.splitlines() if not line.startswith("#")] == ["aiokv_leases_opened_total 0.0"]


def test_all_families_are_described_before_anything_runs() -> None:
    kv = KVRuntime(RuntimeConfig(geometry=GEOMETRY, gpu_blocks=9))
    described = kv.collector.describe()
    assert [(metric.name, metric.type) for metric in described] == [(f.name, f.kind.value) for f in FAMILIES]
    assert not any(metric.samples for metric in described)


async def test_two_runtimes_clash_in_one_registry_and_share_it_with_a_label_each() -> None:
    async with opened() as chat, opened(cpu_blocks=0) as batch:
        await serve(chat)
        await finish_copies(chat)
        registry = CollectorRegistry()
        registry.register(chat.kv.collector)
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            registry.register(batch.kv.collector)
        scrape = Scrape(PoolsCollector({"chat": chat.kv.collector, "batch": batch.kv.collector}))
        assert scrape("aiokv_leases_opened_total", pool="chat") == 1
        assert scrape("aiokv_leases_opened_total", pool="batch") == 0
        assert scrape.by("pool", "aiokv_pool_blocks", tier="cpu") == {"chat": 16}
        assert scrape.text.count("# TYPE aiokv_leases_opened_total ") == 1
        assert scrape("aiokv_interleaved_runs_bucket", pool="chat", le="+Inf") == 1
        pools = CollectorRegistry(auto_describe=True)
        pools.register(PoolsCollector({}))
        assert generate_latest(pools) == b""


# Threads.


@pytest.mark.parametrize("scrapers", [1, 2])
async def test_threads_may_scrape_while_the_loop_runs(scrapers: int) -> None:
    asyncio.get_running_loop().set_debug(False)
    async with opened(gpu_blocks=9, cpu_blocks=6, manual=False) as case:
        scrapes: list[list[Scrape]] = [[] for _ in range(scrapers)]
        served = asyncio.Event()

        async def scrape_on(own: list[Scrape]) -> None:
            while not served.is_set() or len(own) < 5:
                own.append(await asyncio.to_thread(Scrape, case.kv.collector))

        tasks = [asyncio.ensure_future(scrape_on(own)) for own in scrapes]
        for seed in range(80):
            await serve(case, seed=seed % 7)
        served.set()
        await asyncio.gather(*tasks)
        await case.kv.drain()
        last = Scrape(case.kv.collector)
    for own in scrapes:
        assert not any(scrape.errors for scrape in own)
        assert {scrape.sum("aiokv_pool_blocks", tier="gpu") for scrape in own} == {8}
        assert {scrape.sum("aiokv_pool_blocks", tier="cpu") for scrape in own} == {6}
        for earlier, later in zip(own, [*own[1:], last], strict=True):
            counters = [key for key in earlier.samples if key[0].endswith(("_total", "_bucket", "_count", "_sum"))]
            assert all(earlier.samples[key] <= later.samples[key] for key in counters)
    assert last.sum("aiokv_prompt_tokens_total") == 80 * 49
    assert last.sum("aiokv_transfer_inflight_blocks") == 0
    assert not last.errors


async def test_a_scrape_changes_nothing_and_the_loop_is_not_woken() -> None:
    async with opened() as case:
        await serve(case)
        await finish_copies(case)
        before = case.kv.snapshot()
        loop = asyncio.get_running_loop()
        calls: list[object] = []
        loop.call_soon_threadsafe(calls.append, "not by the scrape")
        await turns(2)
        first = await asyncio.to_thread(Scrape, case.kv.collector)
        second = Scrape(case.kv.collector)
        assert first.samples == second.samples
        assert case.kv.snapshot() == before
        assert calls == ["not by the scrape"]


# Invariants.


async def test_a_counter_that_falls_is_held_and_the_fall_is_counted_once() -> None:
    async with opened() as case:
        leases = [case.kv.try_acquire(f"{seed}", prompt(1, seed=seed)) for seed in range(3)]
        counts = case.kv.core.counters.lookups
        shown = []
        for change in (0, -2, +1, 0, +3):
            counts[LookupResult.MISS] += change
            scrape = Scrape(case.kv.collector)
            shown.append((scrape("aiokv_lookups_total", result="miss"), scrape.errors))
        assert shown == [
            (3, {}),
            (3, {"counter": 1}),
            (3, {"counter": 1}),
            (3, {"counter": 1}),
            (5, {"counter": 1}),
        ]
        for lease in leases:
            assert isinstance(lease, Lease)
            lease.release()


async def test_a_histogram_that_falls_is_held_in_every_part() -> None:
    async with opened() as case:
        await serve(case)
        runs = case.kv.core.counters.interleaved_runs
        runs[5] += 4
        before = Scrape(case.kv.collector)
        runs[5] -= 3
        after = Scrape(case.kv.collector)
        parts = [key for key in before.samples if key[0].startswith("aiokv_interleaved_runs_")]
        assert {key: before.samples[key] for key in parts} == {key: after.samples[key] for key in parts}
        assert after.errors == {"counter": 2}, "one bucket and the sum"
        await finish_copies(case)


def test_overlapping_scrapes_take_no_late_value_for_a_fall() -> None:
    ledger = Ledger()
    key = ("counter", (), 0)
    slow = ledger.open()
    fast = ledger.open()
    assert (slow.hold(key, 5), fast.hold(key, 6)) == (5, 6)
    ledger.close(fast)
    ledger.close(slow)
    page = ledger.open()
    assert page.hold(key, 6) == 6
    ledger.close(page)
    assert ledger.falls == 0


async def test_unbalanced_leases_are_found_by_a_scrape_on_the_loop() -> None:
    async with opened() as case:
        case.kv.core.counters.leases_opened += 1
        assert Scrape(case.kv.collector).errors == {"leases": 1}
        case.kv.core.counters.leases_opened -= 1
        assert Scrape(case.kv.collector).errors == {"leases": 1, "counter": 1}


async def test_a_scrape_in_a_thread_has_the_loop_look_after_its_next_step() -> None:
    async with opened() as case:
        case.kv.core.counters.leases_opened += 1
        assert not (await asyncio.to_thread(Scrape, case.kv.collector)).errors
        await serve(case)
        assert (await asyncio.to_thread(Scrape, case.kv.collector)).errors == {"leases": 1}
        case.kv.core.counters.leases_opened -= 1
        await finish_copies(case)


async def test_copies_that_vanish_and_slots_that_stay_reserved_are_found() -> None:
    async with opened() as case:
        await serve(case)
        await finish_copies(case)
        assert not Scrape(case.kv.collector).errors
        case.kv.core.counters.submitted_blocks = {d: n + 1 for d, n in case.kv.core.counters.submitted_blocks.items()}
        assert Scrape(case.kv.collector).errors == {"transfers": 1}
        assert Scrape(case.kv.collector).errors == {"transfers": 2}


@pytest.mark.parametrize(("state", "blocks", "found"), [("reserved", 1, "idle"), ("reserved", -1, "pools")])
async def test_pools_that_do_not_add_up_are_found(
    monkeypatch: pytest.MonkeyPatch, state: str, blocks: int, found: str
) -> None:
    async with opened() as case:
        pools = {tier: replace(counts, **{state: blocks}) for tier, counts in case.kv.core.pools().items()}
        monkeypatch.setattr(CacheState, "pools", lambda core: pools)
        errors = Scrape(case.kv.collector).errors
        assert errors[found] == 1
        monkeypatch.undo()


# Faults.


async def test_a_family_that_cannot_be_read_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as case:
        whole = Scrape(case.kv.collector)
        monkeypatch.setattr(case.kv.core.counters, "lookups", None)
        faulty = Scrape(case.kv.collector)
        assert set(whole.types) - set(faulty.types) == {"aiokv_lookups"}
        assert faulty.errors == {"metrics": 1}
        monkeypatch.undo()
        assert set(Scrape(case.kv.collector).types) == set(whole.types)


async def test_a_check_that_fails_stops_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as case:
        await asyncio.to_thread(Scrape, case.kv.collector)
        monkeypatch.setattr(case.kv.core.counters, "submitted_blocks", None)
        lease = case.kv.try_acquire("a", prompt(2))
        monkeypatch.undo()
        assert isinstance(lease, Lease)
        lease.release()
        assert Scrape(case.kv.collector).errors == {"metrics": 1}
