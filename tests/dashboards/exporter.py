"""A process with a runtime that does a little of everything, and its metrics: `python -m tests.dashboards.exporter`.

Prints the port of its metrics, and works until its standard input is closed. Real memory, real copies, some of which
fail; more conversations than the GPU pool holds; cancellations, preemptions, forks, truncations, hints, a slow reader
of events.
"""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import suppress
from typing import Final

import numpy as np
from prometheus_client import CollectorRegistry, start_http_server

from aiokv import (
    AcquireTimeout,
    CacheGeometry,
    FullAttention,
    KVRuntime,
    Lease,
    ResidenceHint,
    RuntimeConfig,
)
from aiokv.backends.host import HostBackend
from aiokv.testing import FaultyBackend

BLOCK: Final = 16
GPU_BLOCKS: Final = 256
CPU_BLOCKS: Final = 512
BLOCK_BYTES: Final = 16 * 1024
CONVERSATIONS: Final = 24
CLIENTS: Final = 8
SYSTEM_PROMPT: Final = list(range(4 * BLOCK))


async def main() -> None:
    """Serve until standard input ends."""
    config = RuntimeConfig(
        geometry=CacheGeometry(groups=(FullAttention("full", block_size=BLOCK),), hash_block_size=BLOCK),
        gpu_blocks=GPU_BLOCKS,
        cpu_blocks=CPU_BLOCKS,
        backend=FaultyBackend(HostBackend(), seed=1, fail=0.03),
        lease_age_limit_s=60.0,
    )
    arenas = {"full": [np.zeros((GPU_BLOCKS, BLOCK_BYTES), np.uint8)]}
    async with KVRuntime(config, arenas=arenas) as kv, asyncio.TaskGroup() as group:
        registry = CollectorRegistry()
        registry.register(kv.collector)
        exporter, _ = start_http_server(0, addr="127.0.0.1", registry=registry)
        print(exporter.server_port, flush=True)
        work = [group.create_task(_talk(kv, random.Random(seed))) for seed in range(CLIENTS)]
        work += [group.create_task(_keep_hints(kv)), group.create_task(_read_events(kv))]
        await asyncio.to_thread(sys.stdin.read)
        for task in work:
            task.cancel()
        exporter.shutdown()


async def _talk(kv: KVRuntime, chance: random.Random) -> None:
    """One client: it takes up any of the conversations, which grow turn by turn and then begin again."""
    turns = dict.fromkeys(range(CONVERSATIONS), 0)
    while True:
        conversation = chance.randrange(CONVERSATIONS)
        turns[conversation] = turn = turns[conversation] % 6 + 1
        words = random.Random(conversation)
        prompt = SYSTEM_PROMPT + [words.randrange(1000, 9000) for _ in range(turn * 10 * BLOCK + 7)]
        with suppress(AcquireTimeout, TimeoutError):
            async with asyncio.timeout(0.004 if chance.random() < 0.1 else 5.0):
                await _serve(kv, prompt, chance=chance)
        await asyncio.sleep(0.01)


async def _serve(kv: KVRuntime, prompt: list[int], *, chance: random.Random) -> None:
    """One request: some are forked, truncated, or preempted and resumed before they end."""
    async with kv.acquire("request", prompt, reserve_tokens=2 * BLOCK) as lease:
        _compute(lease)
        await asyncio.sleep(0.005)
        what = chance.random()
        if what < 0.1:
            fork = lease.try_fork("sample")
            if isinstance(fork, Lease):
                fork.release()
        elif what < 0.2:
            lease.truncate(lease.num_tokens - BLOCK)
        elif what < 0.3:
            resumed = await lease.preempt().resume()
            _compute(resumed)
            resumed.finish()


def _compute(lease: Lease) -> None:
    lease.append(range(BLOCK))
    lease.confirm(lease.num_tokens)


async def _keep_hints(kv: KVRuntime) -> None:
    while True:
        kept = kv.keep(SYSTEM_PROMPT, tenant="acme")
        await asyncio.sleep(0.2)
        if isinstance(kept, ResidenceHint):
            kept.release()
        kv.keep(list(range(GPU_BLOCKS * BLOCK)), tenant="greedy")


async def _read_events(kv: KVRuntime) -> None:
    async with kv.events(backlog=64) as stream:
        async for _ in stream:
            await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(main())
