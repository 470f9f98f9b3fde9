"""Another thread, another loop, a forked child, too early, too late: refused, and nothing has changed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from aiokv import (
    KVRuntime,
    UsageError,
)
from aiokv.runtime.event_stream import EventStream
from aiokv.testing import FakeBackend
from tests.runtime.support import GROUP, Case, config_of, granted, is_shut, opened, prompt, state_of

# Another loop, another thread, no loop.


def in_a_thread(work: Callable[[], object]) -> BaseException | None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


@pytest.mark.allow_blocking("the test itself waits for its thread")
async def test_another_thread() -> None:
    async with opened() as case:
        lease, stream = granted(case.kv, prompt(2)), case.kv.events()
        before = state_of(case.kv)
        uses: list[Callable[[], object]] = [
            lambda: case.kv.try_acquire("other", prompt(1)),
            lambda: asyncio.run(acquire_in_another_loop(case)),
            lambda: asyncio.run(case.kv.aclose()),
            lambda: asyncio.run(case.kv.drain()),
            lambda: asyncio.run(case.kv.reset()),
            lambda: asyncio.run(case.kv.audit_sliced()),
            lambda: case.kv.audit(),
            lambda: case.kv.snapshot(),
            lambda: case.kv.capacity_generation,
            lambda: case.kv.close(),
            stream.take,
            lambda: asyncio.run(anext_of(stream)),
            lambda: lease.block_table(GROUP),
            lambda: lease.confirm(1),
            lambda: lease.truncate(1),
            lease.preempt,
            lambda: lease.try_fork("fork"),
            lambda: lease.add_done_callback(print),
            lease.finish,
            lease.release,
        ]
        for use in uses:
            assert isinstance(in_a_thread(use), UsageError)
        assert state_of(case.kv) == before
        assert not is_shut(case.backend)
        lease.release()


async def anext_of(stream: EventStream) -> object:
    return await anext(stream)


async def acquire_in_another_loop(case: Case) -> None:
    await case.kv.acquire("other", prompt(1))


def test_another_loop() -> None:
    backend = FakeBackend()
    kv = KVRuntime(config_of(backend=backend))
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    first.run_until_complete(kv.open())
    lease, stream = granted(kv, prompt(2)), kv.events()

    async def use() -> None:
        for awaited in (
            anext(stream),
            kv.acquire("other", prompt(1)),
            kv.aclose(),
            kv.drain(),
            kv.ready(),
            kv.reset(),
            kv.audit_sliced(),
        ):
            with pytest.raises(UsageError, match="event loop"):
                await awaited
        with pytest.raises(UsageError, match="event loop"):
            kv.try_acquire("other", prompt(1))
        with pytest.raises(UsageError, match="event loop"):
            lease.confirm(1)
        with pytest.raises(UsageError, match="event loop"):
            async with kv.quiesce():
                pytest.fail("it is quiet")

    second.run_until_complete(use())
    lease.release()
    first.run_until_complete(kv.aclose())
    assert is_shut(backend)
    first.close()
    second.close()


async def test_a_runtime_that_is_not_open() -> None:
    kv = KVRuntime(config_of())
    for use in (lambda: kv.try_acquire("r", [1]), kv.audit, kv.snapshot, kv.fence, lambda: kv.core):
        with pytest.raises(UsageError, match="not open"):
            use()
    for awaited in (kv.acquire("r", [1]), kv.admit("r", [1]), kv.ready(), kv.drain(), kv.reset(), kv.audit_sliced()):
        with pytest.raises(UsageError, match="not open"):
            await awaited
    assert (await kv.prepare_keys(prompt(2))).num_blocks == 2
    await kv.aclose()
    kv.close()


async def test_opening_twice_and_after_the_end() -> None:
    kv = KVRuntime(config_of())
    async with kv:
        with pytest.raises(UsageError, match="once"):
            await kv.open()
    with pytest.raises(UsageError, match="once"):
        await kv.open()
    for awaited in (kv.acquire("r", [1]), kv.admit("r", [1])):
        with pytest.raises(UsageError, match="closed"):
            await awaited
    await kv.aclose()
    await kv.aclose()


ROOT = Path(__file__).resolve().parents[2]
FORKED = """
import asyncio, gc, os, sys
import numpy as np
from aiokv import KVRuntime, LeaseState, UsageError
from tests.runtime.support import GROUP, config_of, granted, prompt, until

def outcome(use):
    try:
        use()
    except UsageError:
        return "refused"
    except BaseException as error:
        return repr(error)
    return "allowed"

def step(awaitable):
    coroutine = awaitable.__await__()
    coroutine.send(None)

def child(kv, lease):
    uses = {
        "try_acquire": lambda: kv.try_acquire("other", prompt(1)),
        "acquire": lambda: step(kv.acquire("other", prompt(1))),
        "drain": lambda: step(kv.drain()),
        "reset": lambda: step(kv.reset()),
        "aclose": lambda: step(kv.aclose()),
        "close": kv.close,
        "audit": kv.audit,
        "block_table": lambda: lease.block_table(GROUP),
        "confirm": lambda: lease.confirm(1),
        "release": lease.release,
        "finish": lease.finish,
    }
    return {name: outcome(use) for name, use in uses.items()}

def runtime_of(backend):
    if backend == "fake":
        return KVRuntime(config_of())
    return KVRuntime(config_of(backend=backend), arenas={GROUP: [np.zeros((9, 64), np.uint8)]})

def fork(kv, lease):
    pid = os.fork()
    if not pid:
        answers = child(kv, lease)
        del lease
        gc.collect()
        print(sorted(name for name, answer in answers.items() if answer != "refused"), answers, flush=True)
        os._exit(0 if set(answers.values()) == {"refused"} else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(kv.audit().leases) == 2, "the child gave something back"

async def go_on(kv, lease, dropped):
    lease.confirm(2)
    lease.finish()
    dropped.clear()
    gc.collect()
    await until(lambda: not kv.audit().leases)
    await kv.aclose()
    print("the parent is well")

async def main(backend, *, forks):
    kv = runtime_of(backend)
    await kv.open()
    lease, dropped = granted(kv, prompt(2)), [granted(kv, prompt(2, seed=1))]
    if forks:
        fork(kv, lease)
        await go_on(kv, lease, dropped)
    return kv, lease, dropped

backend, where = sys.argv[1:]
loop = asyncio.new_event_loop()
held = loop.run_until_complete(main(backend, forks=where == "in the loop"))
if where == "outside":
    fork(*held[:2])
    loop.run_until_complete(go_on(*held))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("backend", ["host", "fake"])
@pytest.mark.parametrize("where", ["in the loop", "outside"])
def test_a_forked_child_is_refused_everything_and_the_parent_goes_on(backend: str, where: str) -> None:
    """A child that touched the driver, the timers or the loop's descriptors would break its parent."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, backend, where],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the parent is well" in done.stdout
