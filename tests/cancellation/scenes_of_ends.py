"""How runtimes begin and end: `open`, `aclose`, `async with`, and whoever is still waiting for something meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import pytest

from aiokv import KVRuntime, Lease, LeaseState, RuntimeConfig, UsageError
from aiokv.testing import FakeBackend, make_resident
from tests.cancellation.scenarios import hold
from tests.cancellation.scenes import Act, Scenes, all_served, preempted_request
from tests.runtime.support import (
    BLOCK,
    GEOMETRY,
    GROUP,
    Case,
    assert_nothing_held,
    granted,
    is_shut,
    opened,
    plug_in,
    prompt,
    turns,
    until,
)

__all__ = ["END_SCENES"]

END_SCENES: Final = Scenes()


def a_new_runtime(backend: FakeBackend) -> KVRuntime:
    plugged = plug_in(backend, gpu_blocks=9)
    config = RuntimeConfig(
        geometry=GEOMETRY,
        gpu_blocks=9,
        cpu_blocks=9,
        watermark=0.0,
        backend=plugged.backend,
        compute_stream=plugged.compute_stream,
        close_grace_s=0.0,
    )
    return KVRuntime(config, arenas=plugged.arenas)


async def assert_over(case: Case) -> None:
    """Shut by whoever began it; nothing held, nobody let in."""
    await until(partial(is_shut, case.backend))
    await case.kv.aclose()
    assert_nothing_held(case.kv)
    with pytest.raises(UsageError):
        case.kv.try_acquire("late", prompt(1))


# open


@END_SCENES.add(suspensions=1)
async def open_() -> AsyncIterator[Act]:
    """A backend that was opened for nobody would keep its arena and its thread."""
    backend = FakeBackend()
    kv = a_new_runtime(backend)
    yield Act(begin=kv.open)
    await kv.aclose()
    await until(partial(is_shut, backend))


@END_SCENES.add(suspensions=4)
async def a_whole_life() -> AsyncIterator[Act]:
    """Cancelled while it opens, is used, or closes, with a copy that never ends."""
    backend = FakeBackend()
    kv = a_new_runtime(backend)

    async def live() -> None:
        async with kv:
            make_resident(kv, prompt(3), {GROUP: "c--"})
            lease = granted(kv, prompt(3))
            await turns(2)
            assert lease.prefix_tokens == BLOCK

    yield Act(begin=live)
    await kv.aclose()
    await until(partial(is_shut, backend))
    with suppress(UsageError):  # it was never opened
        assert_nothing_held(kv)


# aclose


@END_SCENES.add(suspensions=1)
async def aclose_while_copies_run() -> AsyncIterator[Act]:
    """The drain goes on when its caller is cancelled."""
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        await turns(2)
        yield Act(begin=case.kv.aclose, moves=(case.backend.complete,))
        await assert_over(case)
        assert lease.state is LeaseState.RELEASED


@END_SCENES.add(suspensions=1)
async def aclose_by_two() -> AsyncIterator[Act]:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        granted(case.kv, prompt(3)).release()
        await turns(2)
        tasks = [asyncio.create_task(case.kv.aclose())]
        yield Act(begin=case.kv.aclose, moves=(case.backend.complete,))
        await all_served(tasks)
        await assert_over(case)


@asynccontextmanager
async def a_stuck_copy() -> AsyncIterator[Case]:
    """A load that never ends, and a runtime that waits for it no longer than the loop takes to turn."""
    backend = FakeBackend()
    async with a_new_runtime(backend) as kv:
        make_resident(kv, prompt(3), {GROUP: "ccc"})
        granted(kv, prompt(3)).release()
        await turns(2)
        assert len(backend.pending) == 1
        yield Case(kv=kv, backend=backend)


@END_SCENES.add(suspensions=1)
async def aclose_with_a_stuck_copy() -> AsyncIterator[Act]:
    """It is reported, its memory is kept; that it ends at last changes nothing (law 4)."""
    async with a_stuck_copy() as case:
        yield Act(begin=case.kv.aclose)
        await assert_over(case)
        before = case.kv.snapshot()
        assert before.gpu.quarantined == 3
        case.backend.complete_all()
        await turns(2)
        assert case.kv.snapshot() == before


# Those who wait while the runtime ends. Every one of them is told.


Begin = Callable[[], Coroutine[Any, Any, object]]


async def acquire_and_leave(case: Case, token_ids: list[int]) -> None:
    async with case.kv.acquire("request", token_ids):
        pass


def add_who_waits(wait: Callable[[Case, list[Lease]], Begin]) -> None:
    """Somebody waits for what `wait` says, beside what is put into the list and held, while the runtime is closed."""

    async def stage() -> AsyncIterator[Act]:
        async with opened() as case:
            make_resident(case.kv, prompt(3), {GROUP: "ccc"})
            held: list[Lease] = []
            begin = wait(case, held)
            tasks: list[asyncio.Task[Any]] = []

            async def told_of_the_end() -> None:
                with suppress(UsageError):
                    await begin()

            def close() -> None:
                tasks.append(asyncio.create_task(case.kv.aclose()))

            yield Act(begin=told_of_the_end, moves=(close, case.backend.complete_all, case.backend.complete_all))
            await all_served(tasks)
            await assert_over(case)
            assert all(lease.state is LeaseState.RELEASED for lease in held)

    stage.__name__ = f"aclose_while_one_waits_{wait.__name__}"
    END_SCENES.add(suspensions=1)(stage)


def in_line(case: Case, held: list[Lease]) -> Begin:
    held.append(hold(case, blocks=8))
    return lambda: acquire_and_leave(case, prompt(2, seed=1))


def for_its_loads(case: Case, held: list[Lease]) -> Begin:
    return lambda: acquire_and_leave(case, prompt(3))


def for_a_lease_to_be_ready(case: Case, held: list[Lease]) -> Begin:
    held.append(granted(case.kv, prompt(3)))
    return held[0].ready


def for_room(case: Case, held: list[Lease]) -> Begin:
    held += [hold(case, blocks=4), hold(case, blocks=4, seed=901)]
    return lambda: held[0].extend(BLOCK)


def to_be_resumed(case: Case, held: list[Lease]) -> Begin:
    preempted = preempted_request(case, prompt(2, seed=1))
    held.append(hold(case, blocks=8))
    return preempted.resume


def for_the_drain(case: Case, held: list[Lease]) -> Begin:
    granted(case.kv, prompt(3)).release()
    return case.kv.drain


def for_events(case: Case, held: list[Lease]) -> Begin:
    async def read() -> None:
        async for _ in case.kv.events():
            pass

    return read


def inside_quiesce(case: Case, held: list[Lease]) -> Begin:
    held.append(granted(case.kv, prompt(3)))

    async def capture() -> None:
        async with case.kv.quiesce():
            await turns(12)

    return capture


for _wait in (
    in_line,
    for_its_loads,
    for_a_lease_to_be_ready,
    for_room,
    to_be_resumed,
    for_the_drain,
    for_events,
    inside_quiesce,
):
    add_who_waits(_wait)
