"""What `acquire` and `admit` return: a coroutine wherever one is wanted, and an async context manager."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack
from functools import partial

import anyio
import pytest

from aiokv import KVRuntime, Lease, LeaseState
from aiokv.testing import make_resident
from tests.runtime.support import (
    GROUP,
    assert_all_given_back,
    config_of,
    granted,
    opened,
    prompt,
    state_of,
    turns,
    until,
)


async def test_it_is_a_coroutine_and_nothing_happens_before_its_first_step() -> None:
    async with opened() as case:
        for ask in (case.kv.acquire, case.kv.admit):
            before = state_of(case.kv)
            call = ask("request", prompt(2))
            assert isinstance(call, Coroutine)
            assert asyncio.iscoroutine(call)
            await turns(3)
            assert state_of(case.kv) == before
            lease = await call
            assert lease.state is LeaseState.READY
            lease.release()


def test_it_may_be_made_before_the_runtime_is_open_and_outside_any_loop() -> None:
    kv = KVRuntime(config_of())
    call = kv.acquire("request", prompt(2))

    async def main() -> None:
        async with kv:
            (await call).release()

    asyncio.run(main())


async def test_tasks_and_task_groups_take_it() -> None:
    async with opened() as case:
        (await asyncio.create_task(case.kv.acquire("task", prompt(1)))).release()
        (await asyncio.ensure_future(case.kv.acquire("future", prompt(1)))).release()
        (await asyncio.wait_for(case.kv.acquire("wait_for", prompt(1)), 10.0)).release()
        (lease,) = await asyncio.gather(case.kv.acquire("gather", prompt(1)))
        lease.release()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(case.kv.acquire("group", prompt(1)), name="named")
        task.result().release()
        await assert_all_given_back(case)


async def test_anyio_starts_it_soon() -> None:
    """Its result goes nowhere, so this is a leak, and told."""
    async with opened() as case:
        with pytest.warns(ResourceWarning, match="started"):
            async with anyio.create_task_group() as group:
                group.start_soon(partial(case.kv.acquire, reserve_tokens=3), "started", prompt(1))
            await turns(3)
        assert case.kv.core.counters.leases_opened == 1
        await assert_all_given_back(case)


@pytest.mark.parametrize("debug", [False, True])
def test_run_until_complete_takes_it(debug: bool) -> None:  # noqa: FBT001
    loop = asyncio.new_event_loop()
    loop.set_debug(debug)
    kv = KVRuntime(config_of())
    loop.run_until_complete(kv.open())
    lease = loop.run_until_complete(kv.acquire("request", prompt(2)))
    assert isinstance(lease, Lease)
    lease.release()
    loop.run_until_complete(kv.aclose())
    loop.close()


def test_one_that_is_never_awaited_is_warned_about() -> None:
    kv = KVRuntime(config_of())
    with pytest.warns(RuntimeWarning, match="never awaited"):
        call = kv.acquire("request", prompt(2))
        del call
        gc.collect()


def test_one_that_is_closed_before_its_first_step_is_not_warned_about() -> None:
    kv = KVRuntime(config_of())
    call = kv.acquire("request", prompt(2))
    call.close()
    gc.collect()


async def test_it_is_awaited_once() -> None:
    async with opened() as case:
        call = case.kv.acquire("request", prompt(1))
        (await call).release()
        with pytest.raises(RuntimeError, match="already awaited"):
            await call
        with pytest.raises(RuntimeError, match="already awaited"):
            async with call:
                pytest.fail("it was entered twice")


async def test_admit_does_not_wait_for_loads_and_acquire_does() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        admitted = await asyncio.wait_for(case.kv.admit("admitted", prompt(3)), 10.0)
        assert admitted.state is LeaseState.LOADING
        acquiring = asyncio.create_task(case.kv.acquire("acquired", prompt(3)))
        await turns(5)
        assert not acquiring.done()
        case.backend.complete_all()
        await admitted.ready()
        (await acquiring).release()
        admitted.release()
        await assert_all_given_back(case)


async def test_admit_is_a_context_manager_too() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        async with case.kv.admit("admitted", prompt(3)) as lease:
            case.backend.complete_all()
            await lease.ready()
        assert lease.state is LeaseState.RELEASED
        await assert_all_given_back(case)


async def test_several_may_be_entered_on_an_exit_stack() -> None:
    async with opened() as case:
        async with AsyncExitStack() as stack:
            leases = [
                await stack.enter_async_context(case.kv.acquire(f"{n}", prompt(1, seed=n, extra=0))) for n in range(8)
            ]
            assert len({slot for lease in leases for slot in lease.block_table(GROUP)}) == 8
        assert all(lease.state is LeaseState.RELEASED for lease in leases)
        await assert_all_given_back(case)


async def test_one_closed_by_hand_while_it_waits_leaves_the_line() -> None:
    """Driven without a task: closing it is all the notice there is."""
    async with opened() as case:
        holder = granted(case.kv, prompt(8, extra=0))
        call = case.kv.acquire("closed", prompt(8, seed=1, extra=0))
        call.send(None)
        waiting = asyncio.create_task(case.kv.acquire("waiting", prompt(1, seed=2, extra=0)))
        await turns(2)
        call.close()
        holder.release()
        (await asyncio.wait_for(waiting, 10.0)).release()
        await assert_all_given_back(case)


async def test_one_closed_by_hand_at_the_head_of_the_line_lets_the_next_one_in() -> None:
    """The next one fits at once; nothing is freed that would wake it otherwise (law 4)."""
    async with opened() as case:
        holder = granted(case.kv, prompt(4, extra=0))
        call = case.kv.acquire("closed", prompt(8, seed=1, extra=0))
        call.send(None)
        waiting = asyncio.create_task(case.kv.acquire("waiting", prompt(1, seed=2, extra=0)))
        await turns(2)
        call.close()
        (await asyncio.wait_for(waiting, 10.0)).release()
        holder.release()
        await assert_all_given_back(case)


async def test_one_closed_by_hand_while_it_loads_is_found_by_the_loop() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        call = case.kv.acquire("closed", prompt(3))
        call.send(None)
        assert len(case.kv.audit().leases) == 1
        with pytest.warns(ResourceWarning, match="closed"):
            call.close()
            await until(lambda: not case.kv.audit().leases)
            await turns(2)
        await assert_all_given_back(case)


async def test_a_body_in_an_async_generator_gives_back_when_the_generator_is_closed() -> None:
    async with opened() as case:

        async def tokens() -> AsyncGenerator[Lease, None]:
            async with case.kv.acquire("request", prompt(2)) as lease:
                while True:
                    yield lease

        stream = tokens()
        lease = await anext(stream)
        await stream.aclose()
        assert lease.state is LeaseState.RELEASED
        await assert_all_given_back(case)


async def test_wait_for_that_gives_up_leaves_nothing_behind() -> None:
    async with opened() as case:
        holder = granted(case.kv, prompt(8, extra=0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(case.kv.acquire("late", prompt(1, seed=1)), 0.001)
        holder.release()
        await assert_all_given_back(case)
