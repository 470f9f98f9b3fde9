"""A runtime on the fake device, and what the device does while a storm of requests goes on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, final

from aiokv import CacheGeometry, KVRuntime, RuntimeConfig
from aiokv.backends.base import Backend
from aiokv.backends.cuda import CudaBackend
from tests.device.engine import DeviceEngine
from tests.device.slots import find_unheld
from tests.runtime.support import turns

__all__ = ["Weather", "opened"]

OUT_OF_MEMORY: Final = 2


@final
class Weather:
    """What the device does meanwhile, a little at every turn of the storm's world."""

    def __init__(self, kv: KVRuntime, engine: DeviceEngine, *, backend: CudaBackend, seed: int) -> None:
        self._kv = kv
        self._engine = engine
        self._backend = backend
        self._random = random.Random(seed)
        self.broken: list[str] = []
        """Captures that did not survive."""
        self.unheld: list[str] = []
        self.seen: Counter[str] = Counter()

    async def turn(self) -> None:
        fake, drawn = self._engine.fake, self._random.random()
        if drawn < 0.1:
            fake.hold()
            await turns(self._random.randrange(15))
            self.look()
            fake.release()
            self.seen["held"] += 1
        elif drawn < 0.12:
            fake.inject("cuMemcpyBatchAsync", nth=self._random.randrange(1, 3), code=OUT_OF_MEMORY)
            self.seen["refused by the driver"] += 1
        elif drawn < 0.17:
            await self._capture()
        elif drawn < 0.7:
            self.look()

    async def _capture(self) -> None:
        """Another part of the engine captures a graph in global mode: no call of aiokv's may break it."""
        fake = self._engine.fake
        fake.begin_capture(self._engine.spare, mode=0)
        await turns(self._random.randrange(1, 10))
        try:
            fake.end_capture(self._engine.spare)
        except RuntimeError as error:
            self.broken.append(str(error))
        self.seen["captured"] += 1

    def look(self) -> None:
        self.seen["looked at copies"] += self._engine.fake.inflight() > 0
        engine = self._engine
        self.unheld += find_unheld(self._kv, self._backend, fake=engine.fake, arrays=engine.arrays)


@asynccontextmanager
async def opened(
    engine: DeviceEngine,
    backend: Backend,
    *,
    geometry: CacheGeometry,
    **settings: Any,  # noqa: ANN401  # those of `RuntimeConfig`
) -> AsyncIterator[KVRuntime]:
    config = RuntimeConfig(
        geometry=geometry, backend=backend, watermark=0.05, compute_stream=engine.streams[0], **settings
    )
    async with KVRuntime(config, arenas={group: [array] for group, array in engine.arrays.items()}) as kv:
        await kv.ready()
        engine.kv = kv
        engine.fake.watch_loop_thread()
        yield kv
        engine.fake.unwatch_loop_thread()
