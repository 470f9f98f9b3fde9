"""A runtime whose engine computes on streams of its own: its kernels, loads and stores are ordered on the device alone.

Every block names its content. Kernels write what is computed and read what was hit; the host waits for neither, and
the fake driver tells whatever two of them do to the same bytes without an order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, final

from aiokv import KVRuntime
from tests.backends.cuda.rig import Rig, Tensor
from tests.fakecuda import Kernel, Launched
from tests.runtime.support import BLOCK, GROUP, assert_nothing_held, config_of, prompt

GPU_BLOCKS: Final = 17
WIDTH: Final = 64


def content(seed: int, position: int) -> bytes:
    return bytes([1 + (31 * seed + position) % 250]) * WIDTH


@final
class Engine:
    """Launches the kernels of requests on two streams, in turns."""

    def __init__(self, kv: KVRuntime, *, rig: Rig, tensor: Tensor, streams: list[int]) -> None:
        self.kv = kv
        self.fake = rig.fake
        self.tensor = tensor
        self.streams = streams
        self.reads: list[tuple[Launched, list[bytes]]] = []
        self.hits = {"gpu": 0, "cpu": 0}

    async def serve(self, seed: int, blocks: int) -> None:
        stream = self.streams[seed % len(self.streams)]
        async with self.kv.admit(f"request {seed}", prompt(blocks, seed=seed)) as lease:
            lease.wait_on(stream)
            table, hit = lease.block_table(GROUP)[:blocks], lease.prefix_tokens // BLOCK
            read, write = Kernel(duration_us=40), Kernel(duration_us=40)
            for slot in table[:hit]:
                read.read(self.tensor.pointer + slot * WIDTH, num_bytes=WIDTH)
            for position in range(hit, blocks):
                write.write(self.tensor.pointer + table[position] * WIDTH, content(seed, position))
            if hit:
                wanted = [content(seed, position) for position in range(hit)]
                self.reads.append((self.fake.launch(stream, read), wanted))
            if hit < blocks:
                self.fake.launch(stream, write)
            fence = self.kv.fence(stream)
            await lease.ready()
            lease.confirm(blocks * BLOCK, after=fence)
            self.hits["gpu"] += lease.delivered.gpu_tokens // BLOCK
            self.hits["cpu"] += lease.delivered.cpu_tokens // BLOCK


@asynccontextmanager
async def engine_on(rig: Rig) -> AsyncIterator[Engine]:
    tensor, streams = rig.dense(GPU_BLOCKS, WIDTH), [rig.stream(), rig.stream()]
    config = config_of(gpu_blocks=GPU_BLOCKS, cpu_blocks=64, backend="cuda", watermark=0.0, compute_stream=streams[0])
    async with KVRuntime(config, arenas={GROUP: [tensor]}) as kv:
        await kv.ready()
        yield Engine(kv, rig=rig, tensor=tensor, streams=streams)


async def test_kernels_loads_and_stores_are_ordered_without_the_host(watched_rig: Rig) -> None:
    watched_rig.fake.set_timing(latency_us=60)
    async with engine_on(watched_rig) as engine:
        for turn in range(12):
            async with asyncio.TaskGroup() as group:
                for seed in range(8):
                    group.create_task(engine.serve(seed, 1 + (seed + turn) % 5))
            await engine.serve(turn % 8, 4)
            await engine.serve(turn % 8, 4)
        await engine.kv.drain()
        assert_nothing_held(engine.kv)
    assert watched_rig.fake.drain()
    assert engine.hits["cpu"] > 0
    assert engine.hits["gpu"] > 0
    for launched, wanted in engine.reads:
        assert (launched.result() or []) == wanted
