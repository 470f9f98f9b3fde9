"""Streams of the engine that no fence can be taken of: captured for a while, destroyed, or never named (law 5)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiokv import BackendLost, KVRuntime, Lease, StreamCaptured, UsageError
from aiokv.core import CacheState
from aiokv.runtime import fencing
from aiokv.runtime.fencing import RETRY_S, ComputeStream, Fencing
from aiokv.testing import FakeBackend, make_resident
from aiokv.testing.fenced_backend import FencedBackend
from tests.runtime.support import BLOCK, GEOMETRY, GROUP, config_of, granted, prompt, turns

MAIN, SIDE = "main", "side"
FAILED_CALLABLE = "compute_stream() failed; the last stream that it named is used"


class Engine:
    """A runtime over streams, one of which the driver may stop to know."""

    def __init__(self, kv: KVRuntime, backend: FencedBackend) -> None:
        self.kv = kv
        self.backend = backend

    def leave_behind(self, stream: object, *, seed: int) -> None:
        """A request whose kernels run on a stream ends, and nobody says so."""
        lease = granted(self.kv, prompt(1, seed=seed))
        lease.wait_on(stream)
        lease.release()

    def start_load(self, *, seed: int) -> Lease:
        make_resident(self.kv, prompt(2, seed=seed), {GROUP: "cc"})
        return granted(self.kv, prompt(2, seed=seed))


@asynccontextmanager
async def engine(compute_stream: object = MAIN) -> AsyncIterator[Engine]:
    backend = FencedBackend(FakeBackend(manual=False))
    config = config_of(
        backend=backend, gpu_blocks=33, cpu_blocks=64, watermark=0.0, compute_stream=compute_stream, close_grace_s=1.0
    )
    async with KVRuntime(config) as kv:
        yield Engine(kv, backend)


async def test_a_stream_that_is_destroyed_before_its_lease_ends_makes_no_copy_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can say any more what its kernels use: nothing is copied, requests compute instead, and it is told."""
    monkeypatch.setattr(fencing, "PATIENCE_S", 5 * RETRY_S)
    async with engine() as case:
        loading = case.start_load(seed=1)
        lease = granted(case.kv, prompt(1, seed=2))
        lease.wait_on(SIDE)
        case.backend.refused.add(SIDE)
        await loading.ready()
        loading.release()
        lease.release()
        waiting = case.start_load(seed=3)
        await asyncio.wait_for(waiting.ready(), 10.0)
        assert (waiting.prefix_tokens, waiting.delivered.cpu_tokens) == (0, 0)
        waiting.release()
        await asyncio.wait_for(case.kv.drain(), 10.0)
        assert case.kv.core.is_backend_lost
        assert "the stream 'side' is refused" in caplog.text
        assert case.kv.audit().pins == ()


async def test_a_stream_that_is_refused_for_a_moment_costs_nothing() -> None:
    async with engine() as case:
        case.leave_behind(SIDE, seed=2)
        case.backend.refused.add(SIDE)
        loading = case.start_load(seed=1)
        await asyncio.sleep(3 * RETRY_S)
        assert case.backend.waits == [], "no copy goes before the fence"
        case.backend.refused.clear()
        await asyncio.wait_for(loading.ready(), 10.0)
        assert loading.delivered.cpu_tokens == 2 * BLOCK
        loading.release()


async def test_a_capture_may_take_as_long_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing, "PATIENCE_S", 0.0)
    async with engine() as case:
        case.leave_behind(SIDE, seed=2)
        case.backend.capturing.add(SIDE)
        loading = case.start_load(seed=1)
        await asyncio.sleep(5 * RETRY_S)
        assert not case.kv.core.is_backend_lost
        case.backend.capturing.clear()
        await asyncio.wait_for(loading.ready(), 10.0)
        assert loading.delivered.cpu_tokens == 2 * BLOCK
        loading.release()


def test_refusals_before_and_after_a_capture_are_not_one_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing, "PATIENCE_S", 0.0)
    backend = FencedBackend(FakeBackend())
    core = CacheState(GEOMETRY, gpu_blocks=9, cpu_blocks=4)
    recorder = Fencing(core, backend=backend, compute=ComputeStream(MAIN))
    core.fences.promise(SIDE)
    for state in (backend.refused, backend.capturing, backend.refused):
        state.add(SIDE)
        assert not recorder.settle()
        state.clear()
    was_lost = core.is_backend_lost
    backend.refused.add(SIDE)
    assert recorder.settle(), "the second refusal in a row comes too late"
    assert (was_lost, core.is_backend_lost, len(core.fences)) == (False, True, 0)


async def test_a_capture_is_an_error_of_its_own() -> None:
    async with engine() as case:
        case.backend.capturing.add(SIDE)
        with pytest.raises(StreamCaptured, match="captured") as told:
            case.kv.fence(SIDE)
        assert told.value.stream == SIDE
        assert isinstance(told.value, UsageError)


async def test_wait_on_says_that_a_capture_is_why_a_load_has_not_begun() -> None:
    """It was told that the lease had lost its load."""
    async with engine() as case:
        case.backend.capturing.add(MAIN)
        granted(case.kv, prompt(1, seed=2)).release()
        loading = case.start_load(seed=1)
        with pytest.raises(UsageError, match="captured"):
            loading.wait_on(SIDE)
        case.backend.capturing.clear()
        loading.wait_on(SIDE)
        await loading.ready()
        loading.release()


async def test_a_callable_that_names_no_stream_is_taken_at_its_last_word(caplog: pytest.LogCaptureFixture) -> None:
    """A lease whose end is promised a fence of no stream would keep all copies waiting."""
    named: list[str | None] = [MAIN]
    async with engine(lambda: named[-1]) as case:
        case.leave_behind(MAIN, seed=2)
        named.append(None)
        case.leave_behind(MAIN, seed=3)
        case.leave_behind(MAIN, seed=4)
        loading = case.start_load(seed=1)
        await asyncio.wait_for(loading.ready(), 10.0)
        assert loading.delivered.cpu_tokens == 2 * BLOCK
        loading.release()
        assert [record.message for record in caplog.records].count(FAILED_CALLABLE) == 1
        named.append(MAIN)
        case.leave_behind(MAIN, seed=5)
        named.append(None)
        case.leave_behind(MAIN, seed=6)
        assert [record.message for record in caplog.records].count(FAILED_CALLABLE) == 2


async def test_a_backend_without_fences_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Requests go on to end, hundreds of them a second."""
    async with engine() as case:
        case.backend.fault = BackendLost("fenced", detail="a test wanted it")
        with caplog.at_level(logging.ERROR):
            for seed in range(20):
                granted(case.kv, prompt(1, seed=seed)).release()
                await turns(3)
        assert sum("no fence can be recorded" in record.message for record in caplog.records) == 1


async def test_a_backend_that_is_lost_by_the_time_it_is_open_is_closed_again() -> None:
    """Nobody else would: who enters `async with` in vain does not leave it."""
    fake = FakeBackend()
    backend = FencedBackend(fake)
    backend.fault = BackendLost("fenced", detail="a test wanted it")
    kv = KVRuntime(config_of(backend=backend, compute_stream=MAIN, close_grace_s=1.0))
    with pytest.raises(BackendLost):
        await kv.open()
    assert fake.closed
    with pytest.raises(UsageError, match="clos"):
        kv.try_acquire("request", prompt(1))
