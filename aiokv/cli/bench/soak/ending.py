"""The end of a run: the harvest, and whether everything comes to rest.

The *harvest* asks once more for every conversation, from the GPU tier and, after a reset, from the CPU tier alone: what
the storm has left in the cache is compared like everything before. Nothing here waits for longer than the run's grace,
and what is raised is counted: whatever is broken, the run gets to its verdict.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final

from aiokv import AcquireTimeout, Tier
from aiokv.cli.bench.soak import findings
from aiokv.cli.bench.soak.client import Client
from aiokv.cli.bench.soak.session import Session
from aiokv.cli.bench.soak.settings import BLOCK, SoakSettings
from aiokv.cli.bench.soak.world import World

__all__ = ["Ending", "noted"]


@final
class Ending:
    """Of one run, once nobody makes new requests."""

    __slots__ = ("_settings", "_world")

    def __init__(self, world: World, *, settings: SoakSettings) -> None:
        self._world = world
        self._settings = settings

    async def harvest(self, clients: Sequence[Client]) -> None:
        """Ask again for what the clients talked about last."""
        for tier in (Tier.GPU, Tier.CPU):
            if not await self._within_grace(self._world.kv.drain()):
                return  # a stuck copy: told by the orphans
            if tier is Tier.CPU and not await self._within_grace(self._world.kv.reset(Tier.GPU)):
                return
            for client in clients:
                with suppress(AcquireTimeout):
                    await self._ask_again(client, tier=tier)

    async def settle(self) -> dict[str, Any]:
        """Wait for rest, then look: what is held, and whether one request can have everything. None: cannot be told."""
        kv = self._world.kv
        found: dict[str, Any] = dict.fromkeys((*findings.HELD, "pools_conserved", "whole_pool", *findings.COUNTED))
        is_drained = False
        with noted(self._world):
            is_drained = await self._within_grace(kv.drain())
        with noted(self._world):
            self._world.note_violations(findings.find_violations(kv))
            found |= findings.end_figures(kv)
        with noted(self._world):
            found["whole_pool"] = is_drained and await self._has_whole_pool() and await self._within_grace(kv.drain())
        with noted(self._world):
            found["pools_conserved"] = findings.pools_conserved(kv)
            found |= findings.core_figures(kv)
            self._world.seen["violations"] += found["accounting_errors"]
        return found

    async def close(self) -> None:
        """Close the runtime, which takes what is left."""
        with noted(self._world):
            async with asyncio.timeout(2 * self._settings.grace_s):  # it waits for running copies for one
                await self._world.kv.aclose()

    async def _ask_again(self, client: Client, *, tier: Tier) -> None:
        world, prompt = self._world, [*client.history, 0]
        async with world.kv.acquire("harvest", prompt, timeout=1.0, **client.tenant.identity) as lease:
            Session(world, lease=lease, tenant=client.tenant, tokens=prompt, source=random.Random(0)).arrive()
            hit = lease.delivered
            world.seen[f"harvested_{tier.value}_tokens"] += hit.gpu_tokens if tier is Tier.GPU else hit.cpu_tokens

    async def _has_whole_pool(self) -> bool:
        """Invariant 12: with nobody there, one request can have every slot (or all but what no group can use)."""
        kv, settings = self._world.kv, self._settings
        blocks = (kv.config.gpu_blocks - 1 - 2 * settings.recurrent) // settings.positional
        try:
            async with kv.acquire("the whole pool", range(blocks * BLOCK), salt="nobody", timeout=1.0) as lease:
                return lease.capacity_tokens >= blocks * BLOCK
        except AcquireTimeout:
            return False

    async def _within_grace(self, waiting: Awaitable[None]) -> bool:
        """Whether it came to an end in time."""
        try:
            async with asyncio.timeout(self._settings.grace_s):
                await waiting
        except TimeoutError:
            return False
        return True


@contextmanager
def noted(world: World) -> Iterator[None]:
    """What is raised inside is counted and told, and the run goes on to its verdict."""
    try:
        yield
    except Exception as error:
        world.note_error(error)
