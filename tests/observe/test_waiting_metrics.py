"""What waiting costs: wake-ups after copies, the lag of the loop, cancellations and what they leave behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from aiokv import AcquireTimeout, KVRuntime, Lease, RuntimeConfig, Tier
from aiokv.backends.base import EventStatus, WakeMode
from aiokv.backends.host import HostBackend, HostFaults, Stall
from aiokv.model.ids import Direction
from aiokv.observe.stats import Stats
from aiokv.runtime.bridge import Bridge, Watched
from aiokv.testing import make_resident
from tests.observe.support import Scrape, opened
from tests.runtime.support import GEOMETRY, GROUP, Case, finish_copies, prompt, turns, until

BUSY_S = 0.02
WAKE = "aiokv_bridge_wake_latency_seconds"
LAG = "aiokv_loop_lag_seconds"
CLEANUP = "aiokv_cancel_cleanup_seconds"


def hold_the_loop() -> None:
    """Work of the host that lets nobody else run."""
    until_then = time.monotonic() + BUSY_S
    while time.monotonic() < until_then:
        sum(range(1000))


async def loading(case: Case, *, seed: int = 0, blocks: int = 3) -> asyncio.Task[Lease]:
    """A request that waits for the one load of its whole prompt."""
    make_resident(case.kv, prompt(blocks, seed=seed), {GROUP: "c" * blocks})
    before = len(case.backend.pending)
    task = asyncio.ensure_future(case.kv.acquire(f"request {seed}", prompt(blocks, seed=seed)))
    await until(lambda: len(case.backend.pending) > before)
    return task


async def cancelled(task: asyncio.Task[Lease]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# Wake-ups.


async def test_a_wake_up_is_timed_from_the_bell_until_the_request_goes_on() -> None:
    asyncio.get_running_loop().set_debug(False)
    async with opened() as case:
        task = await loading(case)
        case.backend.complete_all()
        hold_the_loop()
        (await task).release()
        scrape = Scrape(case.kv.collector)
        assert scrape(f"{WAKE}_count", bridge="doorbell") == 1
        assert scrape(f"{WAKE}_sum", bridge="doorbell") >= BUSY_S
        assert scrape.values_of("bridge") == {"doorbell"}


async def test_each_request_that_waits_is_woken_once_and_who_does_not_wait_is_not_counted() -> None:
    async with opened() as case:
        tasks = [await loading(case), asyncio.ensure_future(case.kv.acquire("joins", prompt(3)))]
        await turns(20)
        polled = case.kv.try_acquire("polls", prompt(3))
        case.backend.complete_all()
        leases = await asyncio.gather(*tasks)
        hit = await case.kv.acquire("hits", prompt(3))
        assert Scrape(case.kv.collector)(f"{WAKE}_count", bridge="doorbell") == 2
        for lease in (*leases, polled, hit):
            assert isinstance(lease, Lease)
            lease.release()


async def test_a_request_that_goes_on_without_its_load_is_no_wake_up() -> None:
    async with opened() as case:
        task = await loading(case)
        case.backend.fail(direction="load")
        (await task).release()
        gone = await loading(case, seed=1)
        await cancelled(gone)
        await finish_copies(case)
        assert Scrape(case.kv.collector)(f"{WAKE}_count", bridge="doorbell") == 0


@asynccontextmanager
async def on_the_host(stall: Stall) -> AsyncIterator[KVRuntime]:
    """A runtime that really copies and is polled; its second copy stands still until `stall` lets it go."""
    backend = HostBackend(faults=HostFaults(stall={1: stall}))
    config = RuntimeConfig(geometry=GEOMETRY, gpu_blocks=9, cpu_blocks=16, watermark=0.0, backend=backend)
    async with KVRuntime(config, arenas={GROUP: [np.zeros((9, 256), np.uint8)]}) as kv:
        try:
            yield kv
        finally:
            stall.release.set()


async def test_a_polled_copy_is_timed_from_when_it_must_have_ended() -> None:
    asyncio.get_running_loop().set_debug(False)
    stall = Stall()
    async with on_the_host(stall) as kv:
        async with kv.acquire("stores", prompt(3)) as lease:
            lease.confirm(lease.num_tokens)
        await kv.drain()
        await kv.reset(Tier.GPU)
        began = time.monotonic()
        task = asyncio.ensure_future(kv.acquire("loads", prompt(3)))
        await asyncio.to_thread(stall.reached.wait)
        stall.release.set()
        (await task).release()
        taken = time.monotonic() - began
        scrape = Scrape(kv.collector)
        assert scrape(f"{WAKE}_count", bridge="poll") == 1
        assert 0.0 <= scrape(f"{WAKE}_sum", bridge="poll") <= taken
        assert scrape(f"{LAG}_count") > 0


class TimedEvent:
    """Remembers when it last said that it runs."""

    def __init__(self) -> None:
        self.status = EventStatus.PENDING
        self.seen_running = 0.0
        self.queries = 0

    def query(self) -> EventStatus:
        self.queries += 1
        if self.status is EventStatus.PENDING:
            self.seen_running = time.monotonic()
        return self.status

    def detail(self) -> str:
        return ""

    def corrupt_copies(self) -> tuple[int, ...]:
        return ()


@pytest.mark.parametrize("expected_s", [0.0, 1e-3, 10.0])
async def test_a_poll_never_dates_an_end_before_it_saw_the_copy_run(expected_s: float) -> None:
    bridge = Bridge(asyncio.get_running_loop(), wake_mode=WakeMode.POLL, stats=Stats())
    event = TimedEvent()
    ended: list[float] = []
    watched = Watched(event=event, expected_s=lambda: expected_s, on_end=lambda *_: ended.append(bridge.ended_at))
    bridge.watch(Direction.LOAD, watched)
    await until(lambda: event.queries >= 2)
    event.status = EventStatus.DONE
    await until(lambda: bool(ended))
    assert event.seen_running <= ended[0] <= time.monotonic()
    bridge.close()


# The loop.


async def test_what_holds_the_loop_shows_as_lag_of_the_next_step() -> None:
    asyncio.get_running_loop().set_debug(False)
    async with opened(gpu_blocks=33) as case:
        before = Scrape(case.kv.collector)(f"{LAG}_sum")
        lease = await case.kv.acquire("a", prompt(20))
        lease.confirm(lease.num_tokens)
        hold_the_loop()
        await turns(3)
        assert Scrape(case.kv.collector)(f"{LAG}_sum") - before >= BUSY_S
        lease.release()
        await finish_copies(case)


async def test_an_idle_runtime_measures_no_lag() -> None:
    async with opened() as case:
        await finish_copies(case)
        idle = Scrape(case.kv.collector)(f"{LAG}_count")
        await turns(50)
        await asyncio.sleep(BUSY_S)
        assert Scrape(case.kv.collector)(f"{LAG}_count") == idle


# Cancellations.


async def test_a_request_cancelled_while_it_is_hashed_was_at_its_lookup() -> None:
    async with opened() as case:
        task = asyncio.ensure_future(case.kv.acquire("long", prompt(3_000)))
        await turns(2)
        await cancelled(task)
        scrape = Scrape(case.kv.collector)
        assert scrape.by("stage", "aiokv_cancellations_total") == {"lookup": 1}
        assert scrape.sum("aiokv_lookups_total") == scrape.sum("aiokv_leases_opened_total") == 0
        assert scrape(f"{CLEANUP}_count") == 0, "it held nothing"


async def test_a_resumption_cancelled_while_it_is_hashed_was_at_its_lookup() -> None:
    async with opened(gpu_blocks=4_000, cpu_blocks=0) as case:
        lease = await case.kv.acquire("a", prompt(1))
        lease.append(list(range(16 * 3_000)))
        preempted = lease.preempt()
        task = asyncio.ensure_future(preempted.resume())
        await turns(2)
        await cancelled(task)
        assert Scrape(case.kv.collector).by("stage", "aiokv_cancellations_total") == {"lookup": 1}


async def test_a_refused_request_is_no_cancellation() -> None:
    async with opened() as case:
        with pytest.raises(Exception, match="empty prompt"):
            await case.kv.acquire("empty", [])
        assert Scrape(case.kv.collector).by("stage", "aiokv_cancellations_total") == {}


async def test_a_cancellation_is_cleaned_up_when_its_running_copy_has_ended() -> None:
    async with opened() as case:
        await cancelled(await loading(case))
        during = Scrape(case.kv.collector)
        assert during(f"{CLEANUP}_count") == 0
        assert during.by("tier", "aiokv_orphan_buffers") == {"gpu": 3}
        hold_the_loop()
        await finish_copies(case)
        after = Scrape(case.kv.collector)
        assert after(f"{CLEANUP}_count") == 1
        assert after(f"{CLEANUP}_sum") >= BUSY_S
        assert after.by("tier", "aiokv_orphan_buffers") == {}
        assert not after.errors


async def test_a_cancellation_without_running_copies_is_cleaned_up_at_once() -> None:
    async with opened() as case:
        entered = asyncio.Event()

        async def hold() -> None:
            async with case.kv.acquire("holds", prompt(2)):
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.ensure_future(hold())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        scrape = Scrape(case.kv.collector)
        assert scrape.by("how", "aiokv_leases_closed_total") == {"cancelled": 1}
        assert scrape(f"{CLEANUP}_count") == 1


async def test_a_copy_dropped_before_its_turn_is_cleaned_up_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiokv.runtime.transfers.STREAM_DEPTH", 1)
    async with opened(gpu_blocks=17) as case:
        first = await loading(case, seed=0)
        make_resident(case.kv, prompt(2, seed=1), {GROUP: "cc"})
        second = asyncio.ensure_future(case.kv.acquire("behind", prompt(2, seed=1)))
        await turns(20)
        await cancelled(second)
        scrape = Scrape(case.kv.collector)
        assert scrape(f"{CLEANUP}_count") == 1
        assert scrape.by("direction", "aiokv_transfer_dropped_blocks_total") == {"load": 2}
        assert scrape.by("tier", "aiokv_orphan_buffers") == {}
        case.backend.complete_all()
        (await first).release()


async def test_copies_that_others_want_are_no_orphans_and_who_shared_them_waits_for_their_end() -> None:
    async with opened() as case:
        leaver = await loading(case)
        stayer = asyncio.ensure_future(case.kv.acquire("stays", prompt(3)))
        await turns(20)
        await cancelled(leaver)
        assert Scrape(case.kv.collector).by("tier", "aiokv_orphan_buffers") == {}
        await cancelled(stayer)
        assert Scrape(case.kv.collector).by("tier", "aiokv_orphan_buffers") == {"gpu": 3}
        adopter = asyncio.ensure_future(case.kv.acquire("adopts", prompt(3)))
        await turns(20)
        adopted = Scrape(case.kv.collector)
        assert adopted.by("tier", "aiokv_orphan_buffers") == {}
        assert adopted(f"{CLEANUP}_count") == 0
        case.backend.complete_all()
        (await adopter).release()
        assert Scrape(case.kv.collector)(f"{CLEANUP}_count") == 2
        assert case.kv.audit().violations == ()


async def test_stores_that_run_on_after_a_cancellation_are_orphans_and_those_of_a_finished_request_are_not() -> None:
    async with opened() as case:
        finished = await case.kv.acquire("finishes", prompt(2))
        finished.confirm(finished.num_tokens)
        finished.finish()
        await until(lambda: len(case.backend.pending) == 1)
        assert Scrape(case.kv.collector).by("tier", "aiokv_orphan_buffers") == {}
        with pytest.raises(asyncio.CancelledError):
            async with case.kv.acquire("is cancelled", prompt(3, seed=1)) as lease:
                lease.confirm(lease.num_tokens)
                await until(lambda: len(case.backend.pending) == 2)
                raise asyncio.CancelledError
        assert Scrape(case.kv.collector).by("tier", "aiokv_orphan_buffers") == {"cpu": 3}
        await finish_copies(case)
        ended = Scrape(case.kv.collector)
        assert ended.by("tier", "aiokv_orphan_buffers") == {}
        assert ended(f"{CLEANUP}_count") == 1


async def test_slots_of_a_lost_backend_stay_orphans() -> None:
    async with opened() as case:
        task = await loading(case)
        case.backend.lose()
        (await task).release()
        await finish_copies(case)
        assert Scrape(case.kv.collector).by("tier", "aiokv_orphan_buffers") == {"gpu": 3, "cpu": 3}


async def test_many_cancelled_requests_are_each_cleaned_up_once() -> None:
    async with opened(gpu_blocks=129, cpu_blocks=128) as case:
        tasks = [await loading(case, seed=seed, blocks=2) for seed in range(20)]
        for task in tasks:
            await cancelled(task)
        assert Scrape(case.kv.collector).by("tier", "aiokv_orphan_buffers") == {"gpu": 40}
        await finish_copies(case)
        scrape = Scrape(case.kv.collector)
        assert scrape(f"{CLEANUP}_count") == scrape("aiokv_leases_closed_total", how="cancelled") == 20
        assert scrape.by("tier", "aiokv_orphan_buffers") == {}


async def test_a_timeout_while_loading_is_a_cancellation_that_is_cleaned_up() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        with pytest.raises(AcquireTimeout):
            await case.kv.acquire("late", prompt(3), timeout=BUSY_S)
        await finish_copies(case)
        scrape = Scrape(case.kv.collector)
        assert scrape.by("stage", "aiokv_cancellations_total") == {"inflight": 1}
        assert scrape(f"{CLEANUP}_count") == 1
