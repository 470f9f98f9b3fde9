"""A storm over real memory: whatever is cancelled, a hit is the bytes that were computed for these tokens.

Every block's bytes name its content. A block reused too early, registered before its copy had ended, or found under
another prompt's hash would show.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv import KVRuntime
from aiokv.backends.host import HostBackend, HostFaults
from tests.runtime.support import BLOCK, GROUP, assert_nothing_held, config_of, prompt, turns

GPU_BLOCKS = 21
CPU_BLOCKS = 30
FAMILIES = 6
LONGEST = 6
ROUNDS = 60
AT_ONCE = 8


def content(family: int, position: int) -> int:
    return 1 + family * LONGEST + position


class Talk:
    """Requests one after the other, each over a prompt of one family, each maybe cancelled."""

    def __init__(self, kv: KVRuntime, arena: NDArray[np.uint8], *, seed: int) -> None:
        self._kv = kv
        self._arena = arena
        self._random = random.Random(seed)
        self.seen: Counter[str] = Counter()

    async def run(self) -> None:
        for _ in range(ROUNDS):
            task = asyncio.create_task(self._one())
            if self._random.random() < 0.7:
                await turns(self._random.randrange(12))
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self.seen["cancelled"] += task.cancelled()

    async def _one(self) -> None:
        family, blocks = self._random.randrange(FAMILIES), self._random.randrange(1, LONGEST + 1)
        async with self._kv.acquire("request", prompt(blocks, seed=family)) as lease:
            table, ready = lease.block_table(GROUP), lease.prefix_tokens // BLOCK
            self._check(table[:ready], family)
            for position in range(ready, blocks):
                self._arena[table[position]] = content(family, position)
                await turns(self._random.randrange(3))
            self._check(table[:blocks], family)
            lease.confirm(blocks * BLOCK)
            self.seen["computed"] += blocks - ready
            self.seen["hit"] += lease.delivered.gpu_tokens > 0
            self.seen["loaded"] += lease.delivered.cpu_tokens > 0

    def _check(self, slots: tuple[int, ...], family: int) -> None:
        found = [(int(self._arena[slot].min()), int(self._arena[slot].max())) for slot in slots]
        assert found == [(content(family, position),) * 2 for position in range(len(slots))]


@pytest.mark.parametrize(
    "faults", [HostFaults(), HostFaults(fail=frozenset(range(3, 400, 7)))], ids=["well", "failing"]
)
async def test_every_hit_is_what_was_computed_for_these_tokens(faults: HostFaults) -> None:
    asyncio.get_running_loop().set_debug(False)
    arena = np.zeros((GPU_BLOCKS, 2, 512), np.uint8)
    config = config_of(gpu_blocks=GPU_BLOCKS, cpu_blocks=CPU_BLOCKS, backend=HostBackend(faults=faults))
    async with KVRuntime(config, arenas={GROUP: [arena]}) as kv:
        talks = [Talk(kv, arena, seed=seed) for seed in range(AT_ONCE)]
        async with asyncio.TaskGroup() as group:
            for talk in talks:
                group.create_task(talk.run())
        await kv.drain()
        assert_nothing_held(kv)
    seen = sum((talk.seen for talk in talks), Counter())
    assert not {what for what in ("cancelled", "computed", "hit", "loaded") if seen[what] < 15}, seen
