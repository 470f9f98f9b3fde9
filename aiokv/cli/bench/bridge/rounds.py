"""Requests whose prompt lies in the CPU tier: each loads one block, and is timed from the end of that copy on.

As many wait as are to be in flight; whoever has its block makes room and the next one asks, so that the number stays.
Afterwards the GPU tier is emptied, and the same prompts can be asked for again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final

from aiokv import BlockKeys, CacheGeometry, FullAttention, KVRuntime, Lease, RuntimeConfig, Tier
from aiokv.cli.bench.bridge.clocked import ClockedBackend
from aiokv.cli.bench.bridge.paced import PacedBackend, PacedCudaBackend
from aiokv.cli.bench.bridge.settings import BridgeSettings
from aiokv.testing import make_resident

__all__ = ["Crowd", "WakeUps", "opened_crowd"]

GROUP: Final = "full"
_BLOCK: Final = 16
_GEOMETRY: Final = CacheGeometry(groups=(FullAttention(GROUP, block_size=_BLOCK),), hash_block_size=_BLOCK)
_SLOTS_PER_REQUEST: Final = 2
_WARM_UP: Final = 60
"""Completions that do not count: a backend learns from them how long copies take, after those that took no time."""
_SETUP_BATCH: Final = 100
_WATCHED_AHEAD: Final = 4


@dataclass(slots=True, kw_only=True)
class WakeUps:
    """What the completions of one round showed."""

    latencies_s: list[float] = field(default_factory=list)
    """From the end of a copy until the task that waits for it runs; of those copies whose end was seen."""
    completions: int = 0
    loop_s: float = 0.0
    """CPU time of the loop's thread over all of them: each also lets one request out and the next one in."""
    wall_s: float = 0.0
    """What they took by the clock."""
    least_in_flight: int = 1 << 62
    """Transfers that had not ended when a task was woken."""


@final
class Crowd:
    """All requests of one size, in the order in which they ask, which is that of their copies."""

    __slots__ = (
        "_asked",
        "_backend",
        "_completions",
        "_ended",
        "_found",
        "_prompts",
        "_size",
        "_started",
        "_woken",
        "kv",
    )

    def __init__(self, kv: KVRuntime, *, backend: PacedBackend, size: int, completions: int) -> None:
        self.kv = kv
        self._backend = backend
        self._size = size
        self._completions = completions
        self._prompts: list[BlockKeys] = []
        self._asked = self._ended = 0
        self._started = (0.0, 0.0)
        self._woken: list[tuple[int, float]] = []
        self._found = WakeUps()

    async def prepare(self) -> None:
        """Have the block of every prompt in the CPU tier."""
        for number in range(self._size + _WARM_UP + self._completions):
            keys = self.kv.keys([number] * (_BLOCK + 1))
            make_resident(self.kv, keys, {GROUP: "c"})
            self._prompts.append(keys)
            if number % _SETUP_BATCH == 0:
                await asyncio.sleep(0)

    async def run_round(self) -> WakeUps:
        """Until so many completions have been seen; then nothing is in flight, and the GPU tier is empty."""
        self._asked = self._ended = 0
        self._woken.clear()
        self._found = WakeUps()
        self._backend.hold()
        over = asyncio.get_running_loop().create_future()
        waiting = [asyncio.create_task(self._ask(over)) for _ in range(self._size)]
        try:
            while self._asked < self._size:  # noqa: ASYNC110  # nobody tells when
                await asyncio.sleep(0)
            self._backend.start()
            await asyncio.wait([over, *waiting], return_when=asyncio.FIRST_COMPLETED)  # one that fails ends it, too
            self._found.loop_s, self._found.wall_s = (
                now - began for now, began in zip(_clocks(), self._started, strict=True)
            )
            self._backend.hurry()
            await asyncio.gather(*waiting)
        finally:
            await _ended(waiting)
        await self.kv.drain()
        await self.kv.reset(Tier.GPU)
        self._tell_latencies()
        return self._found

    async def _ask(self, over: asyncio.Future[None]) -> None:
        while not over.done():
            place, lease = self._admit()
            try:
                await lease.ready()
                if not over.done():
                    self._note(place, over=over)
            finally:
                lease.release()

    def _admit(self) -> tuple[int, Lease]:
        place = self._asked
        self._asked += 1
        lease = self.kv.try_acquire(str(place), self._prompts[place])
        if not isinstance(lease, Lease) or lease.hit.cpu_tokens != _BLOCK:
            raise RuntimeError(f"a request was to load one block, but got {lease!r}")
        return place, lease

    def _note(self, place: int, *, over: asyncio.Future[None]) -> None:
        now = time.monotonic()
        self._ended += 1
        for ahead in range(1, _WATCHED_AHEAD + 1):
            self._backend.watch(place + ahead)
        if self._ended <= _WARM_UP:
            self._started = _clocks()
            return
        self._woken.append((place, now))
        self._found.least_in_flight = min(self._found.least_in_flight, self._asked - self._ended + 1)
        if self._ended == _WARM_UP + self._completions:
            over.set_result(None)

    def _tell_latencies(self) -> None:
        self._found.completions = len(self._woken)
        for place, now in self._woken:
            done_at = self._backend.done_at(place)
            if done_at is not None:
                self._found.latencies_s.append(now - done_at)


def _clocks() -> tuple[float, float]:
    """CPU time of this thread, and the time."""
    return time.thread_time(), time.monotonic()


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Whatever ended the round, a Ctrl-C too, none of its requests goes on or complains behind it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def opened_crowd(size: int, *, settings: BridgeSettings, driver: object = None) -> AsyncIterator[Crowd]:
    """A crowd on a runtime of its own, with `size` transfers in flight: on the fake `driver`, or else on a clock."""
    slots = _SLOTS_PER_REQUEST * (size + _WARM_UP + settings.completions)
    sizes: dict[str, Any] = {"geometry": _GEOMETRY, "gpu_blocks": 1 + slots, "cpu_blocks": 2 + slots, "watermark": 0.0}
    backend: PacedBackend
    if driver is None:
        backend, arenas = ClockedBackend(copy_s=settings.copy_s), {}
    else:
        backend = device = PacedCudaBackend(driver, blocks=1 + slots, copy_us=settings.copy_us)
        arenas, sizes["compute_stream"] = {GROUP: [device.tensor]}, device.compute_stream
    async with KVRuntime(RuntimeConfig(**sizes, backend=backend), arenas=arenas) as kv:
        await kv.ready()
        crowd = Crowd(kv, backend=backend, size=size, completions=settings.completions)
        try:
            await crowd.prepare()
            yield crowd
        finally:
            backend.hurry()
