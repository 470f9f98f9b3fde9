"""Law 8: the event loop is never held. Prompts of 128k tokens over the fake backend, one slice of work a turn.

What is judged are counts per turn of the loop and a ratio between pool sizes; the times themselves are printed only
(`pytest -s tests/runtime/test_hold.py`), because machines that run tests are slow and shared.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, final

import numpy as np
import pytest

from aiokv import BlockKeys, Tier
from aiokv.core.slices import SLICE_BLOCKS, SLICE_PARTS
from aiokv.core.world import SCAN_LIMIT
from aiokv.testing import evict, make_resident
from tests.runtime.support import BLOCK, GROUP, Case, finish_copies, granted, opened, prompt

BLOCKS: Final = 8192
TOKENS: Final = BLOCKS * BLOCK
POOL: Final = 20_000
PER_TURN: Final = 2 * SLICE_BLOCKS
"""One slice is run by the turn, another one by the call that starts the work."""

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


@final
class Turns:
    """Watches every turn of the loop: CPU time of its thread, and how many blocks changed their state in it."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._handle: asyncio.Handle | None = None
        self.seconds: list[float] = []
        self.blocks: list[int] = []
        self._before = (time.thread_time(), self._count())

    def start(self) -> None:
        self._handle = asyncio.get_running_loop().call_soon(self._tick)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._tick()
        if self._handle is not None:
            self._handle.cancel()

    def _tick(self) -> None:
        now, counts = time.thread_time(), self._count()
        then, before = self._before
        self.seconds.append(now - then)
        self.blocks.append(max(abs(a - b) for a, b in zip(counts, before, strict=True)))
        self._before = (time.thread_time(), counts)
        self.start()

    def _count(self) -> tuple[int, ...]:
        pools = self._case.kv.core.pools()
        return (
            pools[Tier.GPU].resident,
            pools[Tier.GPU].free,
            pools[Tier.CPU].resident,
            *self._case.kv.core.counters.evicted_blocks.values(),
            *self._case.kv.core.counters.store_skipped_blocks.values(),
        )


@asynccontextmanager
async def watched(case: Case, *, what: str, per_turn: int = PER_TURN) -> AsyncIterator[None]:
    """Runs a piece of work; no turn of the loop may change more blocks than `per_turn`."""
    gc.collect()
    gc.disable()
    turns = Turns(case)
    turns.start()
    try:
        yield
    finally:
        turns.stop()
        gc.enable()
    longest = sorted(turns.seconds)[-3:]
    print(f"{what:32s} turns {len(turns.seconds):4d}  longest {[f'{1e3 * s:.2f}' for s in longest]} ms")
    assert max(turns.blocks) <= per_turn, what


def long_prompt(seed: int) -> np.ndarray:
    return np.arange(seed * TOKENS, (seed + 1) * TOKENS + 1, dtype=np.int32)


async def ended(case: Case, work: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401  # whatever it returns
    task = asyncio.ensure_future(work)
    while not task.done():
        case.backend.complete_all()
        await asyncio.sleep(0)
    return await task


@one_loop
async def test_no_turn_handles_more_than_a_slice_of_a_long_prompt() -> None:
    asyncio.get_running_loop().set_debug(False)
    async with opened(gpu_blocks=POOL, cpu_blocks=POOL) as case:
        kv = case.kv
        token_ids = long_prompt(0).tolist()
        async with watched(case, what="admit, cold, from a list"):
            lease = await kv.acquire("cold", token_ids)
            await kv.drain()
        async with watched(case, what="confirm and store"):
            lease.confirm(TOKENS)
            await ended(case, kv.drain())
        async with watched(case, what="finish"):
            lease.finish()
            await ended(case, kv.drain())
        keys = await kv.prepare_keys(long_prompt(0))
        async with watched(case, what="admit, all on GPU"):
            lease = granted(kv, keys)
            await ended(case, kv.drain())
        lease.release()
        for seed in (1, 2):
            more = await kv.prepare_keys(long_prompt(seed))
            async with watched(case, what="admit, evicting"):
                lease = await kv.acquire(f"evicting {seed}", more)
                await kv.drain()
            lease.confirm(TOKENS)
            async with watched(case, what="release, stores dropped", per_turn=TOKENS):
                lease.release()
                await ended(case, kv.drain())
        evict(kv, keys, {GROUP: range(BLOCKS)}, tier=Tier.GPU)
        async with watched(case, what="load from CPU"):
            lease = await ended(case, kv.acquire("loading", keys))
        assert lease.delivered.cpu_tokens == TOKENS
        lease.release()
        await finish_copies(case)
        async with watched(case, what="reset", per_turn=2 * SCAN_LIMIT):
            await ended(case, kv.reset())


@one_loop
async def test_no_turn_plans_more_than_a_few_small_stores() -> None:
    """Each is a transfer of its own, which costs as much as many blocks of a large one."""
    asyncio.get_running_loop().set_debug(False)
    async with opened(gpu_blocks=200, cpu_blocks=400) as case:
        leases = [granted(case.kv, prompt(1, seed=seed), name=f"request {seed}") for seed in range(64)]
        for lease in leases:
            lease.confirm(BLOCK)
        drained = asyncio.ensure_future(case.kv.drain())
        per_turn = []
        while len(case.backend.history) < len(leases):
            before = len(case.backend.history)
            await asyncio.sleep(0)
            per_turn.append(len(case.backend.history) - before)
        assert max(per_turn) <= SLICE_PARTS
        while not drained.done():
            case.backend.complete_all()
            await asyncio.sleep(0)
        for lease in leases:
            lease.release()


async def cpu_seconds(case: Case, keys: BlockKeys) -> float:
    """CPU time of admitting, confirming and storing one long prompt."""
    started = time.thread_time()
    lease = await ended(case, case.kv.acquire("round", keys))
    lease.confirm(TOKENS)
    lease.finish()
    await ended(case, case.kv.drain())
    return time.thread_time() - started


@asynccontextmanager
async def full_of_others(blocks: int) -> AsyncIterator[Case]:
    """A pool in which every slot holds somebody's block, so that whatever is admitted evicts."""
    async with opened(gpu_blocks=blocks, cpu_blocks=POOL) as case:
        filling = BlockKeys(np.arange((blocks - 1) * BLOCK, dtype=np.int32) + 100 * TOKENS, hash_block_size=BLOCK)
        make_resident(case.kv, filling, {GROUP: "g" * (blocks - 1)})
        yield case


@one_loop
async def test_the_cost_of_a_long_prompt_is_flat_in_the_size_of_the_pool() -> None:
    """The least of some rounds, taken in turns, because other programs disturb both."""
    asyncio.get_running_loop().set_debug(False)
    keys = [BlockKeys(long_prompt(seed), hash_block_size=BLOCK) for seed in range(3)]
    for prompt_keys in keys:
        prompt_keys.hash_more(BLOCKS)
    async with full_of_others(POOL) as small, full_of_others(1_000_000) as large:
        spent: dict[str, list[float]] = {"small": [], "large": []}
        for number in range(12):
            spent["small"].append(await cpu_seconds(small, keys[number % 3]))
            spent["large"].append(await cpu_seconds(large, keys[number % 3]))
    least = {name: min(seconds[3:]) for name, seconds in spent.items()}
    print({name: f"{1e3 * seconds:.1f} ms" for name, seconds in least.items()})
    assert least["large"] <= 3 * least["small"]
