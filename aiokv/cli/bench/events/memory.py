"""Bytes that events take: what the runtime keeps to be able to tell tokens, and what waits for a slow reader."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiokv.cli.bench.events.settings import BLOCK, EventsSettings, Listeners
from aiokv.cli.bench.events.world import opened_world

__all__ = ["EventBytes", "measure_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBytes:
    """Per token that the GPU tier can hold."""

    kept: float
    """By the runtime as soon as anybody listens, however many do."""
    waiting: float
    """In the backlog of a reader that does not read, per token of a stored block."""


async def measure_bytes(settings: EventsSettings) -> EventBytes:
    """Fill the pools without and with a listener."""
    async with opened_world(Listeners.NONE, settings=settings) as world:
        for _ in range(2 * settings.pool_prompts + 1):
            await world.run_round()
        tokens = settings.gpu_blocks * BLOCK
        with _traced():
            async with world.kv.events(backlog=1):
                for _ in range(settings.pool_prompts):
                    await world.run_round()
                kept = _traced_bytes()
                async with world.kv.events() as waiting:
                    for _ in range(settings.pool_prompts):
                        await world.run_round()
                    told = 2 * settings.pool_prompts * settings.blocks * BLOCK  # once for each tier
                    backlog = _traced_bytes() - kept
                    waiting.take()
    return EventBytes(kept=kept / tokens, waiting=backlog / told)


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
