"""What a runtime does while its CPU arena is being pinned: who waits for it, who need not, what is told of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import final

import pytest

from aiokv import KVRuntime, StorePolicy, UsageError
from aiokv.backends.base import Backend, Pinning
from aiokv.backends.pinned import PinnedArena
from aiokv.model.pinning import PinState
from aiokv.testing import FakeBackend
from aiokv.testing.passing_backend import PassingBackend
from tests.backends.registrar import RecordingRegistrar
from tests.observe.support import Scrape
from tests.runtime.staged_pinning import TOTAL, PinningBackend, StagedPinning
from tests.runtime.support import BLOCK, config_of, opened, prompt, turns, until


@final
class ArenaBackend(PassingBackend):
    """Another backend beside a real arena, which is closed before it."""

    def __init__(self, inner: Backend, arena: PinnedArena) -> None:
        super().__init__(inner)
        self._arena = arena

    @property
    def pinning(self) -> Pinning:
        return self._arena.pinning

    def close(self, *, deadline_s: float) -> bool:
        return self._arena.close(deadline_s=deadline_s) and super().close(deadline_s=deadline_s)


@asynccontextmanager
async def pinning() -> AsyncIterator[tuple[KVRuntime, StagedPinning]]:
    """A runtime whose arena is in the midst of being pinned."""
    staged = StagedPinning()
    async with KVRuntime(config_of(backend=PinningBackend(FakeBackend(manual=False), staged))) as kv:
        yield kv, staged


def count_copied(fake: FakeBackend) -> int:
    return sum(len(copy.source_blocks) for copy in fake.history)


async def test_without_a_device_a_runtime_is_ready_at_once() -> None:
    async with opened() as case:
        ready = asyncio.create_task(case.kv.ready())
        await turns()
        assert ready.done()
        assert case.kv.pinning.state is PinState.NOT_NEEDED


@pytest.mark.parametrize("end", [StagedPinning.pin, StagedPinning.give_up])
async def test_ready_waits_until_the_arena_is_pinned_or_known_to_stay_unpinned(
    end: Callable[[StagedPinning], None],
) -> None:
    async with pinning() as (kv, staged):
        waiting = [asyncio.create_task(kv.ready()) for _ in range(3)]
        await turns(5)
        assert not any(task.done() for task in waiting)
        assert kv.pinning.state is PinState.PINNING
        end(staged)
        await asyncio.wait_for(asyncio.gather(*waiting), 10.0)
        assert kv.pinning.is_settled
        await asyncio.wait_for(kv.ready(), 10.0)


@pytest.mark.parametrize("policy", StorePolicy)
@pytest.mark.parametrize("end", [StagedPinning.pin, StagedPinning.give_up])
async def test_requests_are_served_meanwhile_and_stored_only_afterwards(
    policy: StorePolicy, end: Callable[[StagedPinning], None]
) -> None:
    """The arena may not be copied to before. What is hit later on is stored then."""
    fake = FakeBackend(manual=False)
    staged = StagedPinning()
    config = config_of(
        backend=PinningBackend(fake, staged),
        cpu_blocks=16,
        store_policy=policy,
        selective_count=1,
        lazy_fraction=1.0,
    )
    async with KVRuntime(config) as kv:
        for hit in (0, 3):
            async with kv.acquire("early", prompt(3), timeout=10.0) as lease:
                assert lease.hit.gpu_tokens == hit * BLOCK
                lease.confirm(lease.num_tokens)
            await asyncio.wait_for(kv.drain(), 10.0)
        assert count_copied(fake) == 0
        end(staged)
        await asyncio.wait_for(kv.ready(), 10.0)
        async with kv.acquire("late", prompt(3), timeout=10.0) as lease:
            lease.confirm(lease.num_tokens)
        await asyncio.wait_for(kv.drain(), 10.0)
        assert count_copied(fake) == 3


async def test_who_gives_up_waiting_leaves_nothing_behind() -> None:
    async with pinning() as (kv, staged):
        for _ in range(10):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(kv.ready(), 0.001)
        assert len(staged.waiting) == 1, "the runtime's own"
        staged.pin()
        await kv.ready()


async def test_who_waits_while_the_runtime_is_closed_is_told() -> None:
    async with pinning() as (kv, _):
        waiting = asyncio.create_task(kv.ready())
        await turns(2)
        await kv.aclose()
        with pytest.raises(UsageError, match="closed"):
            await asyncio.wait_for(waiting, 10.0)


async def test_a_capture_waits_for_the_registration_in_progress_and_holds_off_the_next() -> None:
    async with pinning() as (kv, staged):
        inside, leave = asyncio.Event(), asyncio.Event()

        async def capture() -> None:
            async with kv.quiesce():
                inside.set()
                await leave.wait()

        capturing = asyncio.create_task(capture())
        await turns(5)
        assert not inside.is_set()
        assert staged.pauses == 1
        staged.end_call()
        await asyncio.wait_for(inside.wait(), 10.0)
        assert staged.pauses == 1
        leave.set()
        await capturing
        assert staged.pauses == 0
        lease = await asyncio.wait_for(kv.acquire("afterwards", prompt(1)), 10.0)
        lease.release()


async def test_a_capture_that_is_given_up_while_it_waits_lets_everything_go_on() -> None:
    async with pinning() as (kv, staged):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001), kv.quiesce():
                pytest.fail("a registration is in progress")
        assert staged.pauses == 0
        staged.end_call()
        lease = await asyncio.wait_for(kv.acquire("afterwards", prompt(1)), 10.0)
        lease.release()


async def test_metrics_tell_how_far_it_is_and_that_it_is_unpinned() -> None:
    async with pinning() as (kv, staged):

        def told() -> tuple[float, float]:
            scrape = Scrape(kv.collector)
            return scrape("aiokv_degraded", reason="unpinned"), scrape("aiokv_pinned_bytes")

        assert told() == (0, 0)
        staged.pin()
        assert told() == (0, TOTAL)
        staged.give_up()
        assert told() == (1, 0)
        assert "out of memory" in kv.pinning.reason
    assert told() == (0, 0), "a closed runtime is not degraded"


async def test_an_arena_that_is_pinned_by_its_own_thread_is_awaited_from_the_loop() -> None:
    """The real thread against the real waits: what is registered, paused and told crosses between the two."""
    registrar = RecordingRegistrar(gated=True)
    arena = PinnedArena(blocks=8, block_bytes=4096, registrar=registrar, most_chunk_bytes=8192)
    async with KVRuntime(config_of(backend=ArenaBackend(FakeBackend(), arena))) as kv:
        ready = asyncio.create_task(kv.ready())
        await until(lambda: registrar.entered.acquire(blocking=False))
        threading.Timer(0.05, registrar.let, (1,)).start()
        async with asyncio.timeout(10.0), kv.quiesce():
            assert len(registrar.registered) == 1
            registrar.let(3)
            await turns(20)
            assert len(registrar.registered) == 1
            assert not ready.done()
        await asyncio.wait_for(ready, 10.0)
        assert kv.pinning.state is PinState.PINNED
    assert registrar.registered == {}
