"""The live state: the same numbers as the snapshot and the metrics, from any thread, and nothing that is secret."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, ItemsView
from types import FrameType
from typing import Any

import pytest

from aiokv import KVRuntime, Lease, RuntimeConfig, Tier, UsageError
from aiokv.core.cache import CacheState
from aiokv.model.pinning import PinState
from aiokv.observe.live import NOT_OPEN, LiveState
from aiokv.observe.metrics import Collector, RuntimeFacts
from aiokv.observe.stats import Stats
from aiokv.testing import FakeBackend, make_resident
from tests.observe.support import Scrape, opened
from tests.runtime.support import BLOCK, GEOMETRY, GROUP, Case, finish_copies, granted, prompt, turns


async def live_of(case: Case, *, cells: int = 512) -> LiveState:
    return await asyncio.to_thread(case.kv.collector.live, cells=cells)


async def serve(case: Case, *, seed: int, blocks: int = 3) -> None:
    async with case.kv.acquire(f"request {seed}", prompt(blocks, seed=seed)) as lease:
        lease.confirm(lease.num_tokens)


# The numbers.


@pytest.mark.parametrize("leave", [Lease.release, Lease.finish])
async def test_what_a_lease_let_go_of_is_seen_to_be_free_though_nothing_happens_afterwards(
    leave: Callable[[Lease], None],
) -> None:
    async with opened(gpu_blocks=33, manual=False) as case:
        lease = granted(case.kv, prompt(4), reserve_tokens=2 * BLOCK)
        await lease.ready()
        lease.confirm(2 * BLOCK)
        await case.kv.drain()
        leave(lease)
        await turns(4)
        gpu = (await live_of(case)).tiers[Tier.GPU]
        assert (gpu.pinned, gpu.states["reserved"], gpu.states["resident"]) == (0, 0, 2)


async def test_what_a_lease_let_go_of_as_the_runtime_closed_is_seen_to_be_free() -> None:
    async with opened(gpu_blocks=33, manual=False) as case:
        lease = granted(case.kv, prompt(4))
        await lease.ready()
        lease.confirm(2 * BLOCK)
        await case.kv.drain()
        lease.release()
        await case.kv.aclose()
        gpu = (await live_of(case)).tiers[Tier.GPU]
        assert (gpu.pinned, gpu.states["reserved"]) == (0, 0)


async def test_pools_and_maps_are_those_of_the_snapshot() -> None:
    async with opened(gpu_blocks=33, cpu_blocks=40, manual=False) as case:
        for seed in range(5):
            await serve(case, seed=seed, blocks=4)
        await case.kv.drain()
        held = granted(case.kv, prompt(3, seed=4), reserve_tokens=2 * BLOCK)
        await held.ready()
        await turns(3)
        state, snapshot = await live_of(case), case.kv.snapshot()
        for tier, counts in ((Tier.GPU, snapshot.gpu), (Tier.CPU, snapshot.cpu)):
            assert counts is not None
            shown = state.tiers[tier]
            assert shown.states == {state.value: slots for state, slots in counts.by_state().items()}
            assert sum(shown.states.values()) == shown.slots
            assert shown.pinned == counts.resident - counts.evictable
            cells = Counter(shown.cells)
            assert cells["p"] == shown.pinned
            assert cells["c"] == counts.evictable
            assert cells["r"] == counts.reserved
            assert cells["."] == counts.free
        assert state.tiers[Tier.GPU].pinned == 3
        assert state.tiers[Tier.GPU].states["reserved"] == 3
        held.release()


async def test_cells_stand_for_more_slots_where_there_are_fewer_cells() -> None:
    async with opened(gpu_blocks=17, cpu_blocks=0) as case:
        make_resident(case.kv, prompt(8), {GROUP: "gggggggg"})
        tier = (await live_of(case, cells=4)).tiers[Tier.GPU]
        assert (tier.cell_slots, tier.cells) == (4, "cc..")


async def test_totals_are_those_of_the_metrics() -> None:
    async with opened(gpu_blocks=9, cpu_blocks=16, manual=False) as case:
        for seed in range(20):
            await serve(case, seed=seed % 4)
        await case.kv.drain()
        state, scrape = await live_of(case), Scrape(case.kv.collector)
    for source, tokens in state.prompt_tokens.items():
        assert tokens == scrape.sum("aiokv_prompt_tokens_total", source=source)
    assert state.prompt_tokens["cpu"] > 0
    assert sum(state.prompt_tokens.values()) == 20 * 49
    for direction, transfers in state.transfers.items():
        name = direction.value
        assert transfers.bytes == scrape("aiokv_transfer_bytes_total", direction=name) > 0
        assert transfers.ended_blocks["ok"] == scrape("aiokv_transfer_blocks_total", direction=name, outcome="ok")
        assert (transfers.queued_blocks, transfers.inflight_blocks) == (0, 0)
    for tier, blocks in state.evictions.items():
        assert blocks == scrape("aiokv_evictions_total", tier=tier.value, reason="capacity")
    assert state.evictions[Tier.GPU] > 0


async def test_a_reset_evicts_nothing() -> None:
    async with opened(manual=False) as case:
        await serve(case, seed=1)
        await case.kv.drain()
        await case.kv.reset(Tier.GPU)
        state, scrape = await live_of(case), Scrape(case.kv.collector)
    assert scrape.sum("aiokv_evictions_total", tier="gpu") > 0
    assert state.evictions == {Tier.GPU: 0, Tier.CPU: 0}


async def test_copies_that_run_are_in_flight() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(4), {GROUP: "cccc"})
        lease = granted(case.kv, prompt(4))
        await turns(3)
        loads = (await live_of(case)).as_json()["transfers"]
        assert isinstance(loads, dict)
        assert loads["load"]["queued_blocks"] + loads["load"]["inflight_blocks"] == 4
        lease.release()
        await finish_copies(case)


async def test_the_oldest_leases_come_first_and_who_waits_is_counted() -> None:
    async with opened(gpu_blocks=13, cpu_blocks=0) as case:
        leases = [granted(case.kv, prompt(0, seed=seed), name=f"lease {seed}") for seed in range(12)]
        waiting = [asyncio.ensure_future(case.kv.admit(f"late {seed}", prompt(0, seed=40 + seed))) for seed in range(3)]
        await turns(3)
        state = (await live_of(case)).leases
        assert (state.active, state.overdue, state.waiting) == (12, 0, 3)
        assert [lease.request_id for lease in state.oldest] == [f"lease {seed}" for seed in range(8)]
        ages = [lease.age_s for lease in state.oldest]
        assert ages == sorted(ages, reverse=True)
        assert {(lease.state, lease.blocks) for lease in state.oldest} == {("ready", 1)}
        for request in waiting:
            request.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        leases[0].release()
        after = (await live_of(case)).leases
        assert (after.active, after.waiting, after.oldest[0].request_id) == (11, 0, "lease 1")


def test_overdue_leases_are_told_apart_and_ages_follow_the_clock() -> None:
    now = 12.0
    collector = Collector(clock=lambda: now)
    stats = Stats()
    collector.attach(CacheState(GEOMETRY, gpu_blocks=5), stats=stats, facts=RuntimeFacts(version="1", backend="none"))
    stats.overdue_leases = 2
    now = 19.5
    state = collector.live()
    assert state.uptime_s == 7.5
    assert (state.leases.overdue, state.leases.active) == (2, -2), "read as the metrics read them"
    assert state.as_json()["uptime_s"] == 7.5


async def test_without_a_cpu_tier_nothing_tells_of_one() -> None:
    async with opened(cpu_blocks=0) as case:
        await serve(case, seed=1)
        body = (await live_of(case)).as_json()
    assert "cpu" not in json.dumps(body)
    assert body["transfers"] == {}
    assert body["evictions"] == {"gpu": 0}


async def test_the_body_has_the_fields_that_clients_rely_on() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(2), name="req-1")
        body: Any = json.loads(json.dumps((await live_of(case)).as_json()))
        lease.release()
    assert body.keys() == {
        "schema_version", "version", "backend", "block_tokens", "uptime_s", "degraded", "is_accepting", "tiers",
        "prompt_tokens", "transfers", "leases", "evictions",
    }  # fmt: skip
    assert (body["schema_version"], body["backend"], body["block_tokens"]) == (1, "fake", BLOCK)
    assert body["tiers"].keys() == {"gpu", "cpu"}
    assert body["tiers"]["gpu"].keys() == {"slots", "states", "pinned", "cell_slots", "cells"}
    assert body["prompt_tokens"].keys() == {"gpu", "cpu", "compute"}
    assert body["transfers"].keys() == {"load", "store"}
    assert body["transfers"]["load"].keys() == {"queued_blocks", "inflight_blocks", "ended_blocks", "bytes"}
    assert body["leases"].keys() == {"active", "overdue", "waiting", "oldest"}
    assert body["leases"]["oldest"][0].keys() == {"request_id", "age_s", "state", "blocks"}


async def test_it_tells_no_tokens_hashes_salts_or_tenants() -> None:
    async with opened(manual=False) as case:
        tokens = prompt(3, seed=7)
        with case.kv.keep(tokens, tenant="tenant-secret"):
            lease = granted(case.kv, tokens, salt="salt-secret", adapter="adapter-secret")
            lease.confirm(lease.num_tokens)
            text = json.dumps((await live_of(case)).as_json())
            lease.release()
    assert "secret" not in text
    assert str(tokens[0]) not in text


# Life.


async def test_before_it_is_open_there_is_no_state_and_no_standing() -> None:
    kv = KVRuntime(RuntimeConfig(geometry=GEOMETRY, gpu_blocks=9, backend=FakeBackend(manual=False)))
    assert kv.collector.standing() == NOT_OPEN
    with pytest.raises(UsageError, match="not open"):
        kv.collector.live()
    async with kv:
        standing = kv.collector.standing()
        assert (standing.is_open, standing.is_accepting, standing.degraded) == (True, True, ())
        assert standing.pinning.state is PinState.NOT_NEEDED
        assert (await asyncio.to_thread(kv.collector.live)).is_accepting
    closed = await asyncio.to_thread(kv.collector.live)
    assert not closed.is_accepting
    assert not kv.collector.standing().is_accepting
    assert kv.collector.standing().is_open


async def test_it_stops_accepting_when_closing_begins() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        lease = granted(case.kv, prompt(2))
        await turns(3)
        closing = asyncio.ensure_future(case.kv.aclose())
        await turns(2)
        assert not closing.done()
        assert not case.kv.collector.standing().is_accepting
        case.backend.complete_all()
        await closing
        lease.release()


async def test_a_lost_backend_is_degraded_and_accepts() -> None:
    async with opened() as case:
        case.kv.core.lose_backend()
        assert case.kv.collector.standing().degraded == ("backend_lost",)
        state = await live_of(case)
        assert (state.degraded, state.is_accepting) == (("backend_lost",), True)


# Threads.


async def test_threads_may_look_while_the_loop_serves() -> None:
    asyncio.get_running_loop().set_debug(False)
    states: list[LiveState] = []
    served = threading.Event()
    async with opened(gpu_blocks=9, cpu_blocks=6, manual=False) as case:

        def look_on() -> None:
            while not served.is_set() or len(states) < 5:
                states.append(case.kv.collector.live(cells=3))

        looking = asyncio.ensure_future(asyncio.to_thread(look_on))
        for seed in range(60):
            await serve(case, seed=seed % 7)
        served.set()
        await looking
    for state in states:
        assert {tier: sum(shown.states.values()) for tier, shown in state.tiers.items()} == {Tier.GPU: 8, Tier.CPU: 6}
        assert {len(shown.cells) for shown in state.tiers.values()} == {3}
        assert all(0 < lease.blocks <= 8 or lease.state == "held" for lease in state.leases.oldest)
    totals = [sum(state.prompt_tokens.values()) for state in states]
    assert totals == sorted(totals)


async def test_looking_changes_nothing() -> None:
    async with opened() as case:
        await serve(case, seed=1)
        await finish_copies(case)
        before = case.kv.snapshot()
        first, second = await live_of(case), await live_of(case)
        assert case.kv.snapshot() == before
        assert first.tiers == second.tiers


class Interrupted(dict[int, float]):
    """A dictionary that the loop's thread changes again and again while others look."""

    interruptions = 0

    def items(self) -> ItemsView[int, float]:  # type: ignore[override]  # the view of a plain dictionary has no name
        if self.interruptions:
            self.interruptions -= 1
            raise RuntimeError("dictionary changed size during iteration")
        return super().items()


@pytest.mark.parametrize(("interruptions", "listed"), [(0, 1), (1, 1), (1000, 0)])
async def test_leases_that_change_under_the_reader_are_read_again(interruptions: int, listed: int) -> None:
    async with opened() as case:
        lease = case.kv.try_acquire("a", prompt(1))
        assert isinstance(lease, Lease)
        (record,) = case.kv.core.leases()
        stats, collector = Stats(), Collector()
        collector.attach(case.kv.core, stats=stats, facts=RuntimeFacts(version="1", backend="none"))
        stats.opened_at = busy = Interrupted({record.lease_id: 0.0, 99: 1.0})
        busy.interruptions = interruptions
        assert len(collector.live().leases.oldest) == listed
        lease.release()


async def test_a_lease_that_goes_between_two_looks_is_left_out() -> None:
    """The loop's thread may go on between any two calls of who looks: here it does once the lease was seen."""
    async with opened() as case:
        lease = granted(case.kv, prompt(1))
        gone: list[str] = []

        def go_on(frame: FrameType, event: str, argument: object) -> None:
            if event == "return" and frame.f_code.co_qualname == "LeaseTable.__contains__":
                sys.setprofile(None)
                lease.release()
                gone.append(lease.request_id)

        sys.setprofile(go_on)
        try:
            state = case.kv.collector.live()
        finally:
            sys.setprofile(None)
        assert gone
        assert state.leases.oldest == ()
