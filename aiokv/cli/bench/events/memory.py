"""Bytes that events take: what the runtime keeps to be able to tell tokens, and what waits for a slow reader."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from aiokv.cli.bench.events.settings import BLOCK, EventsSettings, Listeners
from aiokv.cli.bench.events.world import World, opened_world

__all__ = ["EventBytes", "measure_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBytes:
    """Per token that the GPU tier can hold."""

    kept: float
    """By the runtime as soon as anybody listens, however many do."""
    waiting: float
    """In the backlog of a reader that does not read, per token of a stored block."""


async def measure_bytes(settings: EventsSettings) -> EventBytes:
    """Fill the pools without a listener, with one that keeps nothing, and with one more that keeps everything.

    What a round leaves behind in any case, in the records of the fake backend, is known from the first and left out.
    """
    async with opened_world(Listeners.NONE, settings=settings) as world:
        for _ in range(2 * settings.pool_prompts + 1):
            await world.run_round()
        with _traced():
            await _fill(world, settings)  # what takes the place of memory from before tracing
            sizes = [_traced_bytes()]
            await _fill(world, settings)
            sizes.append(_traced_bytes())
            async with world.kv.events(backlog=1) as listening:
                await _fill(world, settings)
                listening.take()
                sizes.append(_traced_bytes())
                async with world.kv.events() as waiting:
                    await _fill(world, settings)
                    sizes.append(_traced_bytes())
                    waiting.take()
    unheard, heard, kept = (after - before for before, after in pairwise(sizes))
    told = 2 * settings.pool_prompts * settings.blocks * BLOCK  # once for each tier
    return EventBytes(kept=(heard - unheard) / (settings.gpu_blocks * BLOCK), waiting=(kept - unheard) / told)


async def _fill(world: World, settings: EventsSettings) -> None:
    """Put new blocks into the whole GPU tier."""
    for _ in range(settings.pool_prompts):
        await world.run_round()


@contextmanager
def _traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def _traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
