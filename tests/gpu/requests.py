"""Whole requests on a runtime: every block they hit is read by a kernel that no host waited for; how soon they wake up.

Needs what `aiokv.runtime` needs beside numpy and the bindings: anyio and prometheus-client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, final

from aiokv.backends.cuda import CudaBackend
from aiokv.backends.cuda_events import stream_handle
from aiokv.model.ids import Direction, Tier
from aiokv.runtime.config import RuntimeConfig
from aiokv.runtime.run import run
from aiokv.runtime.runtime import KVRuntime
from tests.gpu.bench import BLOCK, GEOMETRY, GROUP, Bench, Found, quantiles

_GPU_BLOCKS: Final = 17
_SEEDS: Final = 8
_MOST_BLOCKS: Final = 5
_ROW_BYTES: Final = 16 << 10
_KERNEL_MICROS: Final = 100.0


@asynccontextmanager
async def _runtime(
    bench: Bench, *, tensor: object, gpu_blocks: int, cpu_blocks: int, stream: object
) -> AsyncIterator[tuple[KVRuntime, CudaBackend]]:
    """One whose CPU arena is pinned."""
    backend = CudaBackend()
    config = RuntimeConfig(
        geometry=GEOMETRY,
        gpu_blocks=gpu_blocks,
        cpu_blocks=cpu_blocks,
        watermark=0.0,
        backend=backend,
        compute_stream=stream,
    )
    async with KVRuntime(config, arenas={GROUP: [tensor]}) as kv:
        await kv.ready()
        yield kv, backend


def _prompt(seed: int, *, blocks: int) -> list[int]:
    """No token in common with those of other seeds; the last one is always computed."""
    first = (seed + 1) * 1_000_000
    return list(range(first, first + blocks * BLOCK + 1))


# Bytes.


def check_requests(bench: Bench) -> Found:
    """Requests that come back again and again to a pool too small for them, on two streams in turns."""
    return run(_serve_all(bench))


@final
class _Server:
    """Launches the kernels of requests; what they read is kept in a log, a row each block."""

    def __init__(self, bench: Bench, *, rooms: int) -> None:
        self.engine = bench.engine
        self.rows = bench.engine.rows(_GPU_BLOCKS, _ROW_BYTES)
        self.log = bench.engine.rows(rooms, _ROW_BYTES)
        self.streams = [bench.engine.stream() for _ in range(2)]
        self.wanted: list[int] = []
        self.sources = {"gpu": 0, "cpu": 0}

    async def serve(self, kv: KVRuntime, *, seed: int, blocks: int) -> None:
        """Read what was hit, write the rest, and wait for neither."""
        stream = self.streams[seed % 2]
        async with kv.admit(f"request {seed}", _prompt(seed, blocks=blocks)) as lease:
            lease.wait_on(stream)
            table, hit = lease.block_table(GROUP)[:blocks], lease.prefix_tokens // BLOCK
            self.engine.work(stream, micros=_KERNEL_MICROS)
            for position, slot in enumerate(table):
                if position < hit:
                    self.engine.copy(stream, self.rows, row=slot, target=self.log, target_row=len(self.wanted))
                    self.wanted.append(_value(seed, position))
                else:
                    self.engine.fill(stream, self.rows, row=slot, value=_value(seed, position))
            fence = kv.fence(stream)
            await lease.ready()
            lease.confirm(blocks * BLOCK, after=fence)
            self.sources["gpu"] += lease.delivered.gpu_tokens // BLOCK
            self.sources["cpu"] += lease.delivered.cpu_tokens // BLOCK


async def _serve_all(bench: Bench) -> Found:
    server, found = _Server(bench, rooms=2 * bench.sizes.requests * _MOST_BLOCKS), Found()
    place: dict[str, Any] = {"gpu_blocks": _GPU_BLOCKS, "cpu_blocks": 64, "stream": server.streams[0]}
    async with _runtime(bench, tensor=server.rows.tensor, **place) as (kv, _):
        for first in range(0, bench.sizes.requests - _SEEDS + 1, _SEEDS):
            async with asyncio.TaskGroup() as group:
                for seed in range(_SEEDS):
                    blocks = 1 + (seed + first // _SEEDS) % _MOST_BLOCKS
                    group.create_task(server.serve(kv, seed=seed, blocks=blocks))
            for _ in range(2):  # the second one hits what the first has computed
                await server.serve(kv, seed=first // _SEEDS % _SEEDS, blocks=_MOST_BLOCKS)
            await kv.drain()
        audit = await kv.audit_sliced()
    found.faults += bench.engine.settle()
    found.faults += [str(violation) for violation in audit.violations]
    log = server.log.read()
    wrong = [place for place, value in enumerate(server.wanted) if not (log[place] == value).all()]
    found.require(not wrong, f"{len(wrong)} of {len(server.wanted)} blocks that were hit had other bytes")
    for tier, blocks in server.sources.items():
        found.require(blocks, f"no request has hit the {tier} tier, so that this shows nothing")
    found.figures = {"blocks_read": len(server.wanted), "blocks_hit": server.sources}
    return found


def _value(seed: int, position: int) -> int:
    return 1 + (31 * seed + position) % 250


# Wake-ups.


def measure_wakeups(bench: Bench) -> Found:
    """From the end of a request's copy, by the device's clock, until its task goes on."""
    rows = [run(_wake(bench, waiting=waiting)) for waiting in bench.sizes.waiting]
    return Found(figures={"rows": rows})


@final
class _DeviceClock:
    """Tells points of streams by the host's clock."""

    def __init__(self, bench: Bench, *, stream: object) -> None:
        self._driver = bench.driver
        self._stream = stream_handle(stream)
        with self._driver.current():
            self._base = self._driver.create_timed_event()
        self._base_at = 0.0
        self.set()

    def set(self) -> None:
        """Compare both clocks anew. Its stream is idle, so that this takes microseconds."""
        with self._driver.current():
            self._driver.record_event(self._base, self._stream)
            while not self._driver.query_event(self._base):
                pass
            self._base_at = time.monotonic()

    def mark(self, stream: int) -> int:
        """An event at the end of what a stream has to do."""
        with self._driver.current():
            event = self._driver.create_timed_event()
            self._driver.record_event(event, stream)
            return event

    def time_of(self, event: int) -> float:
        """When it was reached, which it has been; it is free afterwards."""
        with self._driver.current():
            at = self._base_at + self._driver.seconds_between(self._base, event)
            self._driver.destroy_event(event)
            return at


async def _wake(bench: Bench, *, waiting: int) -> dict[str, Any]:
    stream = bench.engine.stream()
    blocks = 2 * waiting + 1
    rows = bench.engine.rows(blocks, bench.sizes.wake_bytes)
    clock = _DeviceClock(bench, stream=stream)
    latencies: list[float] = []
    busy_s = wall_s = 0.0
    place: dict[str, Any] = {"gpu_blocks": blocks, "cpu_blocks": waiting, "stream": stream}
    async with _runtime(bench, tensor=rows.tensor, **place) as (kv, backend):
        for number in range(waiting):
            async with kv.acquire(f"{number}", _prompt(number, blocks=1)) as lease:
                lease.confirm(BLOCK)
        await kv.drain()
        for _ in range(1 + bench.sizes.wake_rounds):
            await kv.reset(Tier.GPU)
            clock.set()
            began, began_busy = time.monotonic(), time.thread_time()
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_wait_for_load(kv, backend, number=number, clock=clock))
                    for number in range(waiting)
                ]
            busy_s, wall_s = busy_s + time.thread_time() - began_busy, wall_s + time.monotonic() - began
            latencies += [task.result() for task in tasks]
            await kv.drain()
    figures = {"in_flight": waiting, "latency_us": quantiles(latencies[waiting:])}
    return figures | {"loop_busy": round(busy_s / wall_s, 3)}


async def _wait_for_load(kv: KVRuntime, backend: CudaBackend, *, number: int, clock: _DeviceClock) -> float:
    lease = await kv.admit(f"{number}", _prompt(number, blocks=1))
    try:
        if not lease.hit.cpu_tokens:
            raise RuntimeError("a request was to load its block")
        end = clock.mark(backend.stream_of(Direction.LOAD))
        await lease.ready()
        now = time.monotonic()
    finally:
        lease.release()
    return now - clock.time_of(end)
