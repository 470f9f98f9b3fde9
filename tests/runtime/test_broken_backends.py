"""Backends of embedders that raise what no backend may: a request pays with its loads, never with its blocks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from aiokv import KVRuntime, Lease
from aiokv.backends.base import BackendLayout, DeviceEvent, EventStatus
from aiokv.backends.no_streams import NoStreams
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch
from aiokv.testing import FakeBackend, make_resident
from tests.runtime.support import BLOCK, GROUP, assert_nothing_held, config_of, granted, prompt


class Fault(Exception):
    """What a driver's bindings might raise."""


class BrokenEvent:
    """Raises or answers nonsense instead of saying how its copy ended."""

    def __init__(self, where: str) -> None:
        self._where = where

    def query(self) -> EventStatus:
        if self._where == "query":
            raise Fault
        if self._where == "no status":
            return None  # type: ignore[return-value]  # as a careless backend might
        return EventStatus.CORRUPT if self._where == "corrupt copies" else EventStatus.FAILED

    def detail(self) -> str:
        if self._where == "detail":
            raise Fault
        return "it failed"

    def corrupt_copies(self) -> Sequence[int]:
        raise Fault


class BrokenBackend(NoStreams):
    """A `FakeBackend` that raises in one place, from the moment on that `breaks` is set."""

    def __init__(self, where: str) -> None:
        self._fake = FakeBackend(manual=False)
        self._where = where
        self.breaks = False
        self.name = self._fake.name
        self.wake_mode = self._fake.wake_mode
        self.pinning = self._fake.pinning

    def open(self, layout: BackendLayout) -> None:
        self._fake.open(layout)

    def attach_doorbell(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._fake.attach_doorbell(ring)

    def submit(self, batch: CopyBatch) -> DeviceEvent:
        self._raise_at("submit")
        event = self._fake.submit(batch)
        return BrokenEvent(self._where) if self.breaks and self._where != "estimate" else event

    def block_bytes(self, group: str) -> int:
        self._raise_at("block bytes")
        return self._fake.block_bytes(group)

    def eta_seconds(self, direction: Direction, num_bytes: int) -> float:
        self._raise_at("estimate")
        return self._fake.eta_seconds(direction, num_bytes)

    def close(self, *, deadline_s: float) -> bool:
        self._fake.close(deadline_s=deadline_s)
        self._raise_at("close")
        return True

    def _raise_at(self, where: str) -> None:
        if self.breaks and self._where == where:
            raise Fault


@asynccontextmanager
async def broken_at(where: str) -> AsyncIterator[tuple[KVRuntime, BrokenBackend]]:
    """A runtime whose backend works so far, and two blocks in the CPU tier."""
    backend = BrokenBackend(where)
    async with KVRuntime(config_of(backend=backend, cpu_blocks=16, watermark=0.0, close_grace_s=1.0)) as kv:
        make_resident(kv, prompt(2), {GROUP: "cc"})
        yield kv, backend


LOSING = ["submit", "block bytes", "query", "no status", "detail"]


@pytest.mark.parametrize("where", LOSING)
async def test_a_backend_that_raises_has_lost_its_copies_and_serving_goes_on(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Law 4: nobody knows whether the copy runs, so its targets are never used again; everything else is."""
    async with broken_at(where) as (kv, backend):
        backend.breaks = True
        lease = await asyncio.wait_for(kv.acquire("request", prompt(2)), 10.0)
        assert lease.delivered.compute_tokens == 2 * BLOCK + 1
        lease.confirm(2 * BLOCK)
        lease.finish()
        await asyncio.wait_for(kv.drain(), 10.0)
        again = await asyncio.wait_for(kv.acquire("again", prompt(2)), 10.0)
        assert again.delivered.gpu_tokens == 2 * BLOCK
        again.release()
        assert_nothing_held(kv)
        assert kv.snapshot().gpu.quarantined == 2
    assert "backend is lost" in caplog.text
    assert "Fault" in caplog.text or where == "no status"


async def test_a_backend_that_cannot_tell_how_long_a_copy_takes_loses_nothing() -> None:
    async with broken_at("estimate") as (kv, backend):
        backend.breaks = True
        lease = await asyncio.wait_for(kv.acquire("request", prompt(2)), 10.0)
        assert lease.delivered.cpu_tokens == 2 * BLOCK
        lease.finish()
        await asyncio.wait_for(kv.drain(), 10.0)
        assert_nothing_held(kv)


async def test_a_lease_is_handed_out_although_the_backend_raises_under_its_admission() -> None:
    """Law 2: what has been pinned has a holder, who gives it back."""
    async with broken_at("submit") as (kv, backend):
        backend.breaks = True
        lease = kv.try_acquire("request", prompt(2))
        assert isinstance(lease, Lease)
        lease.release()
        await asyncio.wait_for(kv.drain(), 10.0)
        assert_nothing_held(kv)


async def test_a_backend_that_cannot_name_the_corrupt_copies_fails_them_all() -> None:
    """Nothing is known of the sources, which stay; the backend is not lost."""
    async with broken_at("corrupt copies") as (kv, backend):
        backend.breaks = True
        lease = await asyncio.wait_for(kv.acquire("request", prompt(2)), 10.0)
        assert lease.delivered.compute_tokens == 2 * BLOCK + 1
        lease.release()
        backend.breaks = False
        async with kv.acquire("again", prompt(2), timeout=10.0) as lease:
            assert lease.delivered.cpu_tokens == 2 * BLOCK


@pytest.mark.parametrize("end", ["aclose", "close"])
async def test_a_backend_that_raises_at_the_end_does_not_keep_the_runtime_half_open(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with broken_at("close") as (kv, backend), kv.events() as stream:
        backend.breaks = True
        lease = granted(kv, prompt(1, seed=1))
        caplog.set_level(logging.ERROR, logger="aiokv")
        if end == "aclose":
            await kv.aclose()
        else:
            kv.close()
        assert "could not be closed" in caplog.text
        with pytest.raises(StopAsyncIteration):
            while True:
                await asyncio.wait_for(anext(stream), 10.0)
        lease.release()
        assert_nothing_held(kv)
        count = len(caplog.records)
        await kv.aclose()
        assert len(caplog.records) == count, "closed once"
