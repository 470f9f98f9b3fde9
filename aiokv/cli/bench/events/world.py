"""A busy runtime, and its listeners: each round is a new prompt, computed, stored and finished.

With full pools a round registers every block twice, once in each tier, and evicts as many: four changes per block.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, final

import numpy as np

from aiokv import KVRuntime, Lease, RuntimeConfig
from aiokv.cli.bench.events.settings import BLOCK, GEOMETRY, EventsSettings, Listeners
from aiokv.model.events import BlockRemoved, BlockStored, CacheEvent, EventsDropped
from aiokv.model.ids import Tier
from aiokv.runtime.event_stream import EventStream
from aiokv.testing import FakeBackend

__all__ = ["Reader", "World", "opened_world"]

_READERS: Final = {Listeners.NONE: 0, Listeners.ONE: 1, Listeners.FOUR: 4, Listeners.SLOW: 0}
_SLOW_BACKLOG: Final = 4
_VOCABULARY: Final = 150_000


@final
class Reader:
    """Reads a stream and counts what it is told."""

    __slots__ = ("blocks", "dropped", "events")

    def __init__(self) -> None:
        self.events = 0
        self.dropped = 0
        self.blocks: Counter[tuple[type[CacheEvent], Tier]] = Counter()

    async def read(self, stream: EventStream) -> None:
        """Until the stream ends."""
        async for event in stream:
            self.note(event)

    def note(self, event: CacheEvent) -> None:
        """One event."""
        if isinstance(event, EventsDropped):
            self.dropped += event.count
            return
        self.events += 1
        if isinstance(event, BlockStored | BlockRemoved):
            self.blocks[type(event), event.tier] += len(event.block_hashes)


@final
class World:
    """One runtime. What listens to it has heard everything from the first round on."""

    __slots__ = ("_blocks", "_random", "_slow", "kv", "readers", "rounds")

    def __init__(self, kv: KVRuntime, *, readers: list[Reader], slow: EventStream | None, blocks: int) -> None:
        self.kv = kv
        self.readers = readers
        self._slow = slow
        self._blocks = blocks
        self._random = np.random.default_rng(0)
        self.rounds = 0

    async def run_round(self) -> float:
        """One request from its admission until nothing is queued, sliced or running; CPU seconds of this thread.

        Readers run in it, too: what they take, and how often they are woken, is in it.
        """
        keys = self.kv.keys(self._random.integers(0, _VOCABULARY, self._blocks * BLOCK, np.int32))
        keys.hash_more(keys.num_blocks)
        self.rounds += 1
        began = time.thread_time()
        lease = self.kv.try_acquire(str(self.rounds), keys)
        if not isinstance(lease, Lease) or lease.hit.compute_tokens != self._blocks * BLOCK:
            raise RuntimeError(f"a request was to compute a new prompt, but got {lease!r}")
        lease.confirm(self._blocks * BLOCK)
        lease.finish()
        await self.kv.drain()
        while not self._have_read():  # noqa: ASYNC110  # nobody tells when
            await asyncio.sleep(0)
        return time.thread_time() - began

    def read_slowly(self) -> Reader:
        """What the slow listener finds at last."""
        reader = Reader()
        for event in () if self._slow is None else self._slow.take():
            reader.note(event)
        return reader

    def _have_read(self) -> bool:
        stored = self.rounds * self._blocks
        return all(reader.blocks[BlockStored, tier] >= stored for reader in self.readers for tier in Tier)


@asynccontextmanager
async def opened_world(listeners: Listeners, *, settings: EventsSettings) -> AsyncIterator[World]:
    """A runtime on a fake backend whose copies end at once, with these listeners."""
    config = RuntimeConfig(
        geometry=GEOMETRY,
        gpu_blocks=settings.gpu_blocks,
        cpu_blocks=settings.cpu_blocks,
        watermark=0.0,
        backend=FakeBackend(manual=False),
    )
    readers = [Reader() for _ in range(_READERS[listeners])]
    async with KVRuntime(config) as kv, AsyncExitStack() as stack:
        tasks = [asyncio.create_task(reader.read(await stack.enter_async_context(kv.events()))) for reader in readers]
        slow = None
        if listeners is Listeners.SLOW:
            slow = await stack.enter_async_context(kv.events(backlog=_SLOW_BACKLOG))
        yield World(kv, readers=readers, slow=slow, blocks=settings.blocks)
        await stack.aclose()
        await asyncio.gather(*tasks)
