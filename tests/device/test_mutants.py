"""That the oracles see it: with one guard switched off each of them reports, with all guards on none does.

Each case stops the engine's streams at the moment that matters, so that nothing depends on who is faster.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, final

import pytest

from aiokv import CopyBatch, Direction, KVRuntime
from aiokv.backends.base import Backend, DeviceEvent, EventStatus
from aiokv.backends.cuda import CudaBackend
from aiokv.backends.cuda_driver import CudaDriver
from aiokv.testing import evict
from aiokv.testing.passing_backend import PassingBackend
from tests.backends.cuda.rig import Rig
from tests.device.engine import DeviceEngine
from tests.device.slots import find_unheld
from tests.device.weather import opened
from tests.runtime.support import BLOCK, GEOMETRY, GROUP, granted, prompt, until

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])
BATCH: Final = "cuMemcpyBatchAsync"


@final
class DeafCopies(PassingBackend):
    """Copies in these directions wait for no fence."""

    def __init__(self, inner: Backend, *, deaf_to: Collection[Direction]) -> None:
        super().__init__(inner)
        self._deaf_to = deaf_to

    def submit(self, batch: CopyBatch) -> DeviceEvent:
        return super().submit(replace(batch, after=None) if batch.direction in self._deaf_to else batch)


@final
class DeafStreams(PassingBackend):
    """The engine's streams wait for nothing."""

    def wait(self, stream: object, fence_or_event: object) -> None:
        """Deaf."""


@final
class FreeingAtCancel(PassingBackend):
    """A copy counts as over as soon as nobody waits for it any more: so its blocks are freed when its request is."""

    kv: KVRuntime | None = None

    def submit(self, batch: CopyBatch) -> DeviceEvent:
        return _WantedEvent(super().submit(batch), is_wanted=lambda: self._is_wanted(batch))

    def _is_wanted(self, batch: CopyBatch) -> bool:
        assert self.kv is not None
        return any(move.sources is batch.source_blocks and move.waiters for move in self.kv.core.transfers())


@final
class _WantedEvent:
    def __init__(self, inner: DeviceEvent, *, is_wanted: Callable[[], bool]) -> None:
        self._inner = inner
        self._is_wanted = is_wanted

    def query(self) -> EventStatus:
        status = self._inner.query()
        return EventStatus.FAILED if status is EventStatus.PENDING and not self._is_wanted() else status

    def detail(self) -> str:
        return self._inner.detail()

    def corrupt_copies(self) -> Sequence[int]:
        return self._inner.corrupt_copies()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A runtime whose pool one request of four blocks fills."""

    kv: KVRuntime
    engine: DeviceEngine
    cuda: CudaBackend

    def compute(self, *, seed: int, stream: int) -> None:
        """A request that writes its blocks on `stream`, confirms and leaves."""
        lease = granted(self.kv, prompt(4, seed=seed, extra=0))
        self.engine.streams[:] = [stream]
        lease.confirm(4 * BLOCK, after=self.engine.compute(lease, 4 * BLOCK))
        self.engine.check(lease)
        lease.finish()

    async def keep_in_cpu_tier(self, *, seed: int) -> None:
        """What is computed comes back by a load only."""
        self.compute(seed=seed, stream=self.engine.streams[0])
        await self.kv.drain()
        evict(self.kv, prompt(4, seed=seed, extra=0), {GROUP: tuple(range(4))})


Wrap = Callable[[Backend], Backend]


def as_it_is(backend: Backend) -> Backend:
    return backend


@asynccontextmanager
async def staged(rig: Rig, wrap: Wrap) -> AsyncIterator[Stage]:
    rig.fake.adversaries()
    engine, cuda = DeviceEngine(rig, GEOMETRY, gpu_blocks=5), CudaBackend()
    backend = wrap(cuda)
    async with opened(engine, backend, geometry=GEOMETRY, gpu_blocks=5, cpu_blocks=16) as kv:
        if isinstance(backend, FreeingAtCancel):
            backend.kv = kv
        yield Stage(kv=kv, engine=engine, cuda=cuda)
        rig.fake.release()
        await kv.drain()


def judged(rig: Rig, wrap: Wrap, *, word: str) -> None:
    """Something was seen if and only if a guard was off."""
    found = [text for text in rig.fake.violations() if word in text]
    assert bool(found) is (wrap is not as_it_is), rig.fake.violations()


def deaf_stores(backend: Backend) -> Backend:
    return DeafCopies(backend, deaf_to=(Direction.STORE,))


def deaf_loads(backend: Backend) -> Backend:
    return DeafCopies(backend, deaf_to=(Direction.LOAD,))


def guard_off(mutant: Wrap) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("wrap", [as_it_is, mutant])


@guard_off(deaf_stores)
async def test_a_store_that_does_not_wait_for_its_writers_is_seen(rig: Rig, wrap: Wrap) -> None:
    async with staged(rig, wrap) as stage:
        stream = stage.engine.streams[0]
        rig.fake.hold(stream)
        before = rig.fake.calls(BATCH)
        stage.compute(seed=1, stream=stream)
        await until(lambda: rig.fake.calls(BATCH) > before)
        rig.fake.release(stream)
    judged(rig, wrap, word="hazard: a copy")


@guard_off(deaf_loads)
async def test_a_load_that_does_not_wait_for_the_last_reader_is_seen(rig: Rig, wrap: Wrap) -> None:
    async with staged(rig, wrap) as stage:
        stream = stage.engine.streams[0]
        await stage.keep_in_cpu_tier(seed=1)
        lease = granted(stage.kv, prompt(4, seed=2, extra=0))
        rig.fake.hold(stream)
        stage.engine.streams[:] = [stream]
        stage.engine.compute(lease, 4 * BLOCK)  # unconfirmed: nothing is stored of it
        lease.release()
        before = rig.fake.calls(BATCH)
        loading = granted(stage.kv, prompt(3, seed=1))
        await until(lambda: rig.fake.calls(BATCH) > before)
        rig.fake.release(stream)
        await loading.ready()
        loading.release()
    judged(rig, wrap, word="hazard: a copy")


@guard_off(DeafStreams)
async def test_compute_that_does_not_wait_for_the_last_reader_is_seen(rig: Rig, wrap: Wrap) -> None:
    async with staged(rig, wrap) as stage:
        first, second = stage.engine.streams
        lease = granted(stage.kv, prompt(4, seed=2, extra=0))
        rig.fake.hold(first)
        stage.engine.streams[:] = [first]
        stage.engine.compute(lease, 4 * BLOCK)
        lease.release()
        stage.compute(seed=3, stream=second)
        rig.fake.release(first)
    judged(rig, wrap, word="hazard: a kernel")


@guard_off(FreeingAtCancel)
async def test_blocks_that_are_freed_when_a_request_is_cancelled_are_seen(rig: Rig, wrap: Wrap) -> None:
    async with staged(rig, wrap) as stage:
        await stage.keep_in_cpu_tier(seed=1)
        rig.fake.hold(stage.cuda.stream_of(Direction.LOAD))
        lease = granted(stage.kv, prompt(3, seed=1))
        await until(lambda: rig.fake.inflight() > 0)
        lease.release()
        found: list[str] = []

        def is_seen() -> bool:
            found[:] = find_unheld(stage.kv, stage.cuda, fake=rig.fake, arrays=stage.engine.arrays)
            return bool(found)

        if wrap is as_it_is:
            taken = stage.kv.try_acquire("next", prompt(2, seed=5, extra=0))
            assert not is_seen(), taken
        else:
            await until(is_seen)
            assert any("GPU slot" in text for text in found)
            assert any("CPU slot" in text for text in found)
        rig.fake.release()


def do_not_exchange(driver: CudaDriver, mode: object) -> object:
    return mode


@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "unguarded"])
async def test_a_driver_call_that_breaks_a_capture_is_seen(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *, is_guarded: bool
) -> None:
    async with staged(rig, as_it_is) as stage:
        if not is_guarded:
            monkeypatch.setattr(CudaDriver, "exchange_capture_mode", do_not_exchange)
        rig.fake.begin_capture(stage.engine.spare, mode=0)
        await stage.keep_in_cpu_tier(seed=1)
        is_whole = True
        try:
            rig.fake.end_capture(stage.engine.spare)
        except RuntimeError:
            is_whole = False
        assert is_whole is is_guarded
