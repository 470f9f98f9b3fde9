"""Many lives at once, over any backend: `Storm`; and what the KV of their tokens must be.

What is cancelled, and when, depends on a seed, so that a failure comes back.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from aiokv import KVRuntime, Lease, Tier
from tests.cancellation.lives import Engine, Life
from tests.cancellation.moods import Moods
from tests.runtime.support import turns

__all__ = ["ENOUGH", "Storm", "kv_of"]

REQUESTS: Final = 300
AT_ONCE: Final = 10
RESET_EVERY: Final = 50
ENOUGH: Final = {
    "granted": 90,
    "loaded": 15,
    "truncated": 60,
    "forked": 15,
    "shared by a fork": 10,
    "preempted": 25,
    "resumed": 15,
    "extended": 60,
    "resets": 6,
    "CancelledError": 6,
    "cancelled by scope": 1,
    "TimeoutError": 1,
}
"""Of what one storm must have tried."""


def kv_of(lease: Lease, stop: int) -> NDArray[np.uint32]:
    """Per token, what its KV must be."""
    values, value = np.zeros(stop, np.uint32), 0
    for position, token in enumerate(lease.keys.tokens(0, stop)):
        values[position] = value = zlib.crc32(token.tobytes(), value)
    return values


@final
class Storm:
    """Lives under a world that goes on turning."""

    def __init__(self, kv: KVRuntime, engine: Engine, *, seed: int, within: int) -> None:
        self._kv = kv
        self._random = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self._moods = Moods(self._random, seen=self.seen, within=within)
        self._life = Life(kv, engine, chance=self._random, seen=self.seen)
        self._blowing = True

    async def blow(self, *worlds: Callable[[], Awaitable[None]]) -> None:
        """All requests, `AT_ONCE` at a time; every exception that is no cancellation comes out."""
        turning = [asyncio.create_task(self._turn(world)) for world in worlds]
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with limit:
                await self._moods.run(self._life.run(number))
            if number % RESET_EVERY == 0:
                await self._kv.reset(self._random.choice((Tier.GPU, Tier.CPU, None)))
                self.seen["resets"] += 1

        results = await asyncio.gather(*(one(number) for number in range(REQUESTS)), return_exceptions=True)
        self._blowing = False
        await asyncio.gather(*turning)
        assert results == [None] * REQUESTS
        assert self.seen["ended"] == REQUESTS

    async def _turn(self, world: Callable[[], Awaitable[None]]) -> None:
        while self._blowing:
            await turns(self._random.randrange(1, 4))
            await world()
