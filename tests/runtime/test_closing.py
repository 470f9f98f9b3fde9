"""How a runtime ends: drained under a deadline, by its loop or without one, and with copies that never end."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest
import uvloop

from aiokv import KVRuntime, Lease, LeaseReleased, LeaseState, RuntimeConfig, UsageError
from aiokv.backends.host import HostBackend, HostFaults, Stall
from aiokv.testing import FakeBackend, make_resident
from tests.runtime.support import (
    BLOCK,
    GEOMETRY,
    GROUP,
    Case,
    assert_nothing_held,
    finish_copies,
    granted,
    is_shut,
    opened,
    prompt,
    turns,
    until,
)

every_loop = pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
NewLoop = Callable[[], asyncio.AbstractEventLoop]


def runtime_of(backend: FakeBackend | HostBackend, *, close_grace_s: float = 30.0) -> KVRuntime:
    config = RuntimeConfig(
        geometry=GEOMETRY, gpu_blocks=17, cpu_blocks=16, backend=backend, close_grace_s=close_grace_s, watermark=0.0
    )
    arenas = {GROUP: [np.zeros((17, 512), np.uint8)]} if isinstance(backend, HostBackend) else {}
    return KVRuntime(config, arenas=arenas)


@asynccontextmanager
async def a_stuck_copy(*, close_grace_s: float = 0.0) -> AsyncIterator[Case]:
    """A load is submitted and does not end."""
    backend = FakeBackend()
    kv = runtime_of(backend, close_grace_s=close_grace_s)
    await kv.open()
    make_resident(kv, prompt(3), {GROUP: "ccc"})
    granted(kv, prompt(3)).release()
    assert len(backend.pending) == 1
    yield Case(kv=kv, backend=backend)
    await kv.aclose()


def store_something(kv: KVRuntime, *, seed: int = 0) -> None:
    lease = granted(kv, prompt(2, seed=seed))
    lease.confirm(2 * BLOCK)
    lease.finish()


# aclose


async def test_aclose_waits_for_running_copies_and_then_closes_the_backend() -> None:
    async with opened() as case:
        store_something(case.kv)
        closing = asyncio.create_task(case.kv.aclose())
        await turns(10)
        assert not closing.done()
        assert not is_shut(case.backend)
        case.backend.complete_all()
        await closing
        assert is_shut(case.backend)
        assert_nothing_held(case.kv)


async def test_aclose_twice_and_at_the_same_time_closes_once() -> None:
    async with opened() as case:
        store_something(case.kv)
        closings = [asyncio.create_task(case.kv.aclose()) for _ in range(3)]
        await turns(5)
        case.backend.complete_all()
        await asyncio.gather(*closings)
        await case.kv.aclose()


async def test_aclose_begins_again_if_its_task_was_cancelled_before_it_began() -> None:
    async with opened() as case:
        store_something(case.kv)
        closing = asyncio.create_task(case.kv.aclose())
        await turns(1)
        for task in asyncio.all_tasks():
            if task.get_name() == "aiokv drain":
                task.cancel()
        await asyncio.wait([closing])
        again = asyncio.create_task(case.kv.aclose())
        await turns(3)
        case.backend.complete_all()
        await again
        assert is_shut(case.backend)


async def test_aclose_gives_back_the_leases_and_poisons_them() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(3))
        await case.kv.aclose()
        for use in (lambda: lease.block_table(GROUP), lambda: lease.confirm(1), lambda: lease.append([1])):
            with pytest.raises(LeaseReleased):
                use()
        lease.finish()
        lease.release()
        assert_nothing_held(case.kv)


async def test_aclose_lets_nobody_in() -> None:
    async with opened() as case:
        store_something(case.kv)
        closing = asyncio.create_task(case.kv.aclose())
        await turns(2)
        with pytest.raises(UsageError, match="clos"):
            case.kv.try_acquire("late", prompt(1))
        with pytest.raises(UsageError, match="clos"):
            await case.kv.acquire("late", prompt(1))
        case.backend.complete_all()
        await closing


async def test_aclose_tells_who_waits_for_capacity() -> None:
    async with opened() as case:
        holding = granted(case.kv, prompt(8, extra=0))
        waiting = asyncio.create_task(case.kv.acquire("waiting", prompt(1)))
        await turns(2)
        await case.kv.aclose()
        with pytest.raises(UsageError):
            await waiting
        assert holding.state is LeaseState.RELEASED


async def test_aclose_tells_who_waits_for_loads() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        waiting = asyncio.create_task(case.kv.acquire("waiting", prompt(3)))
        await turns(2)
        closing = asyncio.create_task(case.kv.aclose())
        await until(waiting.done)
        case.backend.complete_all()
        await closing
        with pytest.raises(LeaseReleased):
            await waiting


@pytest.mark.parametrize("end", ["aclose", "close"])
@pytest.mark.parametrize("turns_before", range(5))
async def test_whoever_is_on_the_way_in_is_told_of_the_end(turns_before: int, end: str) -> None:
    async with opened() as case:
        loop = asyncio.get_running_loop()
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        other = granted(case.kv, prompt(8, seed=1, extra=0))
        waiting = asyncio.create_task(case.kv.acquire("waiting", prompt(3)))
        await turns(2)
        other.release()
        await turns(turns_before)
        loop.call_soon(case.kv.close if end == "close" else lambda: loop.create_task(case.kv.aclose()))
        await until(waiting.done)
        case.backend.complete_all()
        with pytest.raises(UsageError):
            await waiting
        await case.kv.aclose()
        assert_nothing_held(case.kv)


async def test_aclose_inside_quiesce_sees_copies_end() -> None:
    async with opened() as case:
        store_something(case.kv)
        async with case.kv.quiesce():
            closing = asyncio.create_task(case.kv.aclose())
            await turns(3)
            case.backend.complete_all()
            await asyncio.wait_for(closing, 10.0)


async def test_quiesce_is_refused_once_the_runtime_is_closing() -> None:
    """It would keep the drain from seeing copies end, until its grace is over."""
    async with opened() as case:
        store_something(case.kv)
        closing = asyncio.create_task(case.kv.aclose())
        await turns(3)
        with pytest.raises(UsageError, match="closing"):
            async with case.kv.quiesce():
                pass
        case.backend.complete_all()
        await asyncio.wait_for(closing, 10.0)


# A copy that never ends.


async def test_a_stuck_copy_is_reported_and_its_blocks_are_never_used_again(caplog: pytest.LogCaptureFixture) -> None:
    async with a_stuck_copy() as case:
        caplog.clear()
        with caplog.at_level(logging.ERROR, logger="aiokv"):
            await case.kv.aclose()
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "1 cop" in caplog.text
        assert_nothing_held(case.kv)
        assert case.kv.snapshot().gpu.quarantined == 3


async def test_a_copy_that_ends_after_the_close_changes_nothing() -> None:
    async with a_stuck_copy() as case:
        await case.kv.aclose()
        before = case.kv.snapshot()
        case.backend.complete_all()
        await turns(5)
        assert case.kv.snapshot() == before


async def test_a_copy_thread_that_dies_during_the_close_does_not_hold_it_up(caplog: pytest.LogCaptureFixture) -> None:
    """What it had not ended is out of use; the drain does not wait out its grace for a dead thread."""
    kv = runtime_of(HostBackend(faults=HostFaults(kill=frozenset({1}))))
    await kv.open()
    store_something(kv)
    store_something(kv, seed=1)
    await asyncio.wait_for(kv.aclose(), 10.0)
    assert "died" in caplog.text
    assert_nothing_held(kv)
    snapshot = kv.snapshot()
    assert snapshot.cpu is not None
    assert (snapshot.gpu.quarantined, snapshot.cpu.quarantined) == (2, 2)
    with pytest.raises(UsageError):
        kv.try_acquire("late", prompt(1))


async def test_copies_that_still_queue_for_the_stream_are_dropped_by_a_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """More copies than a stream takes: what the backend never saw is not counted as stuck."""
    asyncio.get_running_loop().set_debug(False)
    async with opened(gpu_blocks=1300, cpu_blocks=1300, close_grace_s=0.0) as case:
        for seed in range(600):
            lease = granted(case.kv, prompt(1, seed=seed))
            lease.confirm(BLOCK)
            lease.finish()
        await until(lambda: case.kv.core.unfinished_transfers == 600)
        running = len(case.backend.pending)
        assert running < 600
        await case.kv.aclose()
        assert f"{running} cop" in caplog.text
        assert_nothing_held(case.kv)
        assert case.kv.snapshot().cpu is not None


# Without the loop.


@every_loop
@pytest.mark.parametrize("with_aclose", [False, True], ids=["left open", "aclose left running"])
def test_a_loop_that_ends_under_a_running_store_leaves_it_to_close(new_loop: NewLoop, with_aclose: bool) -> None:  # noqa: FBT001
    backend = FakeBackend()
    kv = runtime_of(backend)
    closings: list[asyncio.Task[None]] = []

    async def main() -> None:
        await kv.open()
        store_something(kv)
        await until(lambda: len(backend.pending) == 1)
        if with_aclose:
            closings.append(asyncio.create_task(kv.aclose()))
            await turns(2)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    kv.close()
    kv.close()
    assert backend.closed
    assert_nothing_held(kv)


@every_loop
def test_close_waits_for_the_host_copies_that_a_dead_loop_left(new_loop: NewLoop) -> None:
    stall = Stall()
    backend = HostBackend(faults=HostFaults(stall={0: stall}))
    kv = runtime_of(backend)

    async def main() -> None:
        await kv.open()
        store_something(kv)
        await until(stall.reached.is_set)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    stall.release.set()
    kv.close()
    assert_nothing_held(kv)
    snapshot = kv.snapshot()
    assert snapshot.cpu is not None
    assert (snapshot.cpu.resident, snapshot.cpu.quarantined) == (2, 0)


@every_loop
def test_close_after_a_loop_that_died_with_requests_in_every_state(new_loop: NewLoop) -> None:
    backend = FakeBackend()
    kv = runtime_of(backend)
    loop = new_loop()
    loop.set_exception_handler(lambda *_: None)  # "Task was destroyed but it is pending!" is the point here
    tasks: list[asyncio.Task[Lease]] = []
    drains: list[asyncio.Task[None]] = []

    async def main() -> None:
        await kv.open()
        make_resident(kv, prompt(3), {GROUP: "ccc"})
        tasks.append(asyncio.create_task(kv.acquire("loading", prompt(3))))
        tasks.append(asyncio.create_task(kv.acquire("holding", prompt(11, seed=1))))
        await turns(3)
        tasks.append(asyncio.create_task(kv.acquire("waiting", prompt(12, seed=2))))
        tasks.append(asyncio.create_task(kv.acquire("hashing", prompt(10, seed=3), timeout=60.0)))
        await until(tasks[1].done)
        tasks[1].result().confirm(5 * BLOCK)
        drains.append(asyncio.create_task(kv.drain()))
        await turns(3)

    loop.run_until_complete(main())
    loop.close()
    kv.close()
    assert_nothing_held(kv)
    tasks.clear()
    drains.clear()
    gc.collect()
    assert_nothing_held(kv)


@every_loop
def test_requests_that_die_with_their_loop_raise_nothing_when_they_are_collected(new_loop: NewLoop) -> None:
    """Their coroutines are closed by the collector, before anybody calls `close`."""
    kv = runtime_of(FakeBackend())
    loop = new_loop()
    loop.set_exception_handler(lambda *_: None)
    tasks: list[asyncio.Task[Lease]] = []

    async def main() -> None:
        await kv.open()
        make_resident(kv, prompt(3), {GROUP: "ccc"})
        holding = granted(kv, prompt(10, seed=1))
        tasks.extend(
            asyncio.create_task(kv.acquire(name, token_ids))
            for name, token_ids in (("loading", prompt(3)), ("waiting", prompt(10, seed=2)))
        )
        await turns(3)
        holding.release()

    loop.run_until_complete(main())
    loop.close()
    tasks.clear()
    gc.collect()
    kv.close()
    assert_nothing_held(kv)


def test_close_before_open_and_after_aclose_does_nothing() -> None:
    kv = runtime_of(FakeBackend())
    kv.close()

    async def main() -> None:
        other = runtime_of(FakeBackend())
        async with other:
            pass
        other.close()

    asyncio.run(main())


async def test_close_on_a_living_loop_ends_everything_at_once() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(3))
        waiting = asyncio.create_task(case.kv.acquire("waiting", prompt(8, extra=0)))
        await turns(2)
        case.kv.close()
        with pytest.raises(UsageError):
            await waiting
        with pytest.raises(LeaseReleased):
            lease.block_table(GROUP)
        await case.kv.aclose()


# drain


async def test_drain_waits_for_what_is_queued_sliced_and_running() -> None:
    async with opened() as case:
        store_something(case.kv)
        drains = [asyncio.create_task(case.kv.drain()) for _ in range(2)]
        await turns(5)
        assert not any(drain.done() for drain in drains)
        case.backend.complete_all()
        await asyncio.gather(*drains)
        assert case.kv.snapshot().transfers == ()


async def test_who_gave_up_waiting_for_a_drain_is_not_kept() -> None:
    """A runtime that is never idle, and a probe that asks for a drain with a deadline again and again."""
    async with opened() as case:
        store_something(case.kv)
        for _ in range(500):
            with anyio.move_on_after(0):
                await case.kv.drain()
        gc.collect()
        assert sum(issubclass(type(kept), asyncio.Future) and kept.done() for kept in gc.get_objects()) < 100
        await finish_copies(case)


async def test_drain_does_not_wait_for_leases_and_lets_requests_in() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(2))
        await asyncio.wait_for(case.kv.drain(), 10.0)
        store_something(case.kv, seed=1)
        draining = asyncio.create_task(case.kv.drain())
        await turns(2)
        other = granted(case.kv, prompt(1, seed=2))
        await finish_copies(case)
        await draining
        lease.release()
        other.release()


async def test_a_grace_longer_than_a_thread_can_wait_is_no_fault() -> None:
    """Nothing is running: the runtime is closed at once, and its arenas are freed."""
    kv = runtime_of(HostBackend(), close_grace_s=1e300)
    async with kv:
        store_something(kv)
    assert_nothing_held(kv)
