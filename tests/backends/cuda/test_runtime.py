"""A whole runtime on the CUDA backend and the fake driver: stored blocks come back, faults cost the CPU tier only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, final

from aiokv import Hit, KVRuntime
from aiokv.testing import evict
from tests.backends.cuda.rig import Rig, Tensor
from tests.backends.support import device_settings
from tests.fakecuda import FakeDriver
from tests.runtime.support import BLOCK, GROUP, assert_nothing_held, config_of, prompt

GPU_BLOCKS: Final = 17
WIDTH: Final = 256


@final
class Engine:
    """Requests over device memory, every block of which names its content."""

    def __init__(self, kv: KVRuntime, *, tensor: Tensor, fake: FakeDriver) -> None:
        self.kv = kv
        self.tensor = tensor
        self.fake = fake

    async def serve(self, seed: int, blocks: int) -> Hit:
        """One request: what it hits must be what was computed for these tokens, the rest it computes."""
        async with self.kv.acquire(f"request {seed}", prompt(blocks, seed=seed)) as lease:
            table, ready = lease.block_table(GROUP)[:blocks], lease.prefix_tokens // BLOCK
            for position, slot in enumerate(table[:ready]):
                found = self.fake.read(self.tensor.pointer + slot * WIDTH, WIDTH)
                assert found == content(seed, position), "served wrong bytes"
            for position in range(ready, blocks):
                self.fake.write(self.tensor.pointer + table[position] * WIDTH, content(seed, position))
            lease.confirm(blocks * BLOCK)
            return lease.delivered


def content(seed: int, position: int) -> bytes:
    return bytes([1 + (31 * seed + position) % 250]) * WIDTH


@asynccontextmanager
async def engine_on(rig: Rig, **settings: Any) -> AsyncIterator[Engine]:  # noqa: ANN401  # those of RuntimeConfig
    tensor = rig.dense(GPU_BLOCKS, WIDTH)
    settings |= device_settings()
    config = config_of(gpu_blocks=GPU_BLOCKS, cpu_blocks=32, backend="auto", watermark=0.0, **settings)
    async with KVRuntime(config, arenas={GROUP: [tensor]}) as kv:
        await kv.ready()
        yield Engine(kv, tensor=tensor, fake=rig.fake)


async def test_blocks_of_the_cpu_tier_come_back(watched_rig: Rig) -> None:
    async with engine_on(watched_rig) as engine:
        assert (await engine.serve(1, 8)).compute_tokens == 8 * BLOCK + 1
        await engine.kv.drain()
        evict(engine.kv, prompt(8, seed=1), {GROUP: (1, 2, 5)})
        hit = await engine.serve(1, 8)
        assert (hit.gpu_tokens, hit.cpu_tokens) == (5 * BLOCK, 3 * BLOCK)
        await engine.kv.drain()
        assert_nothing_held(engine.kv)


async def test_many_requests_under_pressure_are_served_right_bytes(watched_rig: Rig) -> None:
    watched_rig.fake.set_timing(latency_us=200)
    async with engine_on(watched_rig) as engine:
        for turn in range(6):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(engine.serve(seed, 1 + (seed + turn) % 5)) for seed in range(8)]
            assert len([task.result() for task in tasks]) == 8
        await engine.kv.drain()
        assert_nothing_held(engine.kv)


async def test_a_lost_context_costs_the_cpu_tier_and_no_request(rig: Rig) -> None:
    async with engine_on(rig, close_grace_s=0.5) as engine:
        await engine.serve(1, 4)
        await engine.kv.drain()
        rig.fake.inject("cuEventQuery", code=700)
        await engine.serve(2, 4)
        await engine.kv.drain()
        assert (await engine.serve(3, 4)).compute_tokens == 4 * BLOCK + 1
        assert (await engine.serve(3, 4)).gpu_tokens == 4 * BLOCK
    assert rig.fake.violations() == []


async def test_a_refused_load_is_planned_again(watched_rig: Rig) -> None:
    async with engine_on(watched_rig) as engine:
        await engine.serve(1, 4)
        await engine.kv.drain()
        evict(engine.kv, prompt(4, seed=1), {GROUP: (1,)})
        watched_rig.fake.inject("cuMemcpyBatchAsync", code=2)
        hit = await engine.serve(1, 4)
        assert (hit.gpu_tokens, hit.cpu_tokens) == (BLOCK, 0)
        await engine.kv.drain()
        assert_nothing_held(engine.kv)
