"""A storm: many requests over small pools, copies that end in any order, well or not, and cancellations everywhere.

Results are gathered; whatever is no cancellation, timeout or deliberate error of a request fails the test, and the
storm must have tried enough of everything. Seeded, so that a failure comes back.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, final

import pytest

from aiokv import CacheGeometry, Lease, Tier
from aiokv.runtime.acquire import RequestOptions
from tests.cancellation.moods import Moods, OwnError, assert_enough
from tests.runtime.support import BLOCK, GEOMETRY, GROUP, HYBRID, Case, assert_all_given_back, opened, prompt, turns

REQUESTS: Final = 300
AT_ONCE: Final = 24
FAMILIES: Final = 5
LONGEST: Final = 9


@final
class Storm:
    """Requests, and a world that ends their copies at random."""

    def __init__(self, case: Case, *, seed: int) -> None:
        self._case = case
        self._random = random.Random(seed)
        self._blowing = True
        self.seen: Counter[str] = Counter()
        self._moods = Moods(self._random, seen=self.seen, within=40)

    async def run(self) -> list[object]:
        world = asyncio.create_task(self._turn_the_world())
        limit = asyncio.Semaphore(AT_ONCE)
        results = await asyncio.gather(
            *(self._one(limit, number) for number in range(REQUESTS)), return_exceptions=True
        )
        self._blowing = False
        await world
        return list(results)

    async def _turn_the_world(self) -> None:
        while self._blowing:
            await turns(self._random.randrange(1, 4))
            end = self._random.choice((self._case.backend.complete, self._case.backend.complete, self._fail))
            end(self._random.randrange(1, 3))
            self.seen["resets"] += await self._perhaps_reset()

    def _fail(self, n: int) -> None:
        self.seen["failed copies"] += min(n, len(self._case.backend.pending))
        self._case.backend.fail(n)

    async def _perhaps_reset(self) -> bool:
        if self._random.random() > 0.002:
            return False
        await self._case.kv.reset(self._random.choice((Tier.GPU, Tier.CPU, None)))
        return True

    async def _one(self, limit: asyncio.Semaphore, number: int) -> None:
        async with limit:
            await self._moods.run(self._request(number))

    async def _request(self, number: int) -> None:
        family, blocks = self._random.randrange(FAMILIES), self._random.randrange(1, LONGEST)
        token_ids = prompt(blocks, seed=family, extra=self._random.randrange(1, BLOCK))
        async with self._leased(f"request {number}", token_ids) as lease:
            self.seen["granted"] += 1
            self.seen["loaded"] += lease.delivered.cpu_tokens > 0
            self.seen["planned again"] += lease.delivered != lease.hit
            self._assert_slots_are_its_own(lease)
            lease.confirm(self._random.randrange(lease.prefix_tokens, len(token_ids) + 1))
            await turns(self._random.randrange(4))
            if self._random.random() < 0.3:
                lease.append(list(range(BLOCK)))
                await lease.extend(BLOCK)
                self.seen["extended"] += 1
                self._assert_slots_are_its_own(lease)
                lease.confirm(lease.num_tokens)
            if self._random.random() < 0.1:
                raise OwnError

    @asynccontextmanager
    async def _leased(self, name: str, token_ids: list[int]) -> AsyncIterator[Lease]:
        options: RequestOptions = {
            "priority": self._random.randrange(3),
            "reserve_tokens": self._random.choice((0, 0, BLOCK)),
            "align": self._random.choice((1, 1, 2 * BLOCK)),
        }
        timeout = self._random.choice((None, None, 30.0, 0.0))
        if self._random.random() < 0.5:
            async with self._case.kv.acquire(name, token_ids, timeout=timeout, **options) as lease:
                yield lease
            return
        lease = await self._case.kv.admit(name, token_ids, timeout=timeout, **options)
        try:
            await lease.ready()
            yield lease
        finally:
            lease.release()

    def _assert_slots_are_its_own(self, lease: Lease) -> None:
        """What it may write, no copy touches; what it may read, no copy writes."""
        table = lease.block_table(GROUP)
        written = set(table[lease.confirmed_tokens // BLOCK :])
        for copy in self._case.backend.pending:
            touched, filled = (
                (set(copy.target_blocks), set(copy.target_blocks))
                if copy.direction == "load"
                else (set(copy.source_blocks), set())
            )
            assert not written & touched
            assert not set(table) & filled


@pytest.mark.parametrize(("geometry", "gpu_blocks"), [(GEOMETRY, 25), (HYBRID, 41)], ids=["one group", "two groups"])
@pytest.mark.parametrize("seed", range(2))
async def test_a_storm_leaves_nothing_behind(seed: int, geometry: CacheGeometry, gpu_blocks: int) -> None:
    asyncio.get_running_loop().set_debug(False)
    async with opened(gpu_blocks=gpu_blocks, cpu_blocks=60, watermark=0.1, geometry=geometry) as case:
        storm = Storm(case, seed=seed)
        results = await asyncio.wait_for(storm.run(), 50.0)
        assert results == [None] * REQUESTS
        assert storm.seen["ended"] == REQUESTS
        enough = {"granted": 100, "loaded": 20, "failed copies": 30, "planned again": 3, "extended": 15}
        enough |= {
            "CancelledError": 20,
            "AcquireTimeout": 10,
            "TimeoutError": 5,
            "cancelled by scope": 5,
            "OwnError": 5,
        }
        assert_enough(storm.seen, enough)
        await assert_all_given_back(case)
        counters = case.kv.core.counters
        assert counters.leases_opened == sum(counters.leases_closed.values())
