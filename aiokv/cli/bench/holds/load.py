"""The clients of each phase: a mix over full pools, and prompts that nobody has seen, one after the other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import final

from aiokv import KVRuntime, RuntimeConfig, Tier
from aiokv.backends.base import DeviceEvent
from aiokv.cli.bench.garbage import GarbagePauses
from aiokv.cli.bench.hold import HoldMeter
from aiokv.cli.bench.holds.clients import Client
from aiokv.cli.bench.holds.settings import GEOMETRY, HoldSettings, Turn
from aiokv.core.counters import EvictReason
from aiokv.model.plan import CopyBatch
from aiokv.testing import FakeBackend
from aiokv.testing.passing_backend import PassingBackend

__all__ = ["Phase", "churn", "mixed"]

_EVERY_TURN = tuple(Turn)


@dataclass(slots=True, kw_only=True)
class Phase:
    """What one phase saw."""

    meter: HoldMeter = field(default_factory=HoldMeter)
    tally: Counter[str] = field(default_factory=Counter)
    """Requests, altogether and by turn; tokens by source; blocks evicted from each tier."""
    pauses: GarbagePauses | None = None


async def mixed(settings: HoldSettings, *, phase: Phase, step: Callable[[], None]) -> None:
    """Every client fills its part of the pools, then asks in every way, each beginning with another one."""
    async with _runtime(settings.gpu_blocks, cpu_blocks=settings.cpu_blocks, phase=phase) as kv:

        async def work(number: int) -> None:
            client = Client(number, kv=kv, meter=phase.meter, settings=settings, tally=phase.tally)
            turns = [_EVERY_TURN[(number + i) % len(Turn)] for i in range(settings.rounds * len(Turn))]
            for turn in (Turn.COLD, *turns):
                await client.ask(turn)
                step()

        await asyncio.gather(*(work(number) for number in range(settings.clients)))


async def churn(settings: HoldSettings, *, phase: Phase, step: Callable[[], None]) -> None:
    """Clients ask for what nobody has seen until the pool was filled and so many blocks more have gone through it."""
    left = iter(range(settings.churn_prompts))
    async with _runtime(settings.churn_slots + 1, cpu_blocks=settings.churn_cpu_slots, phase=phase) as kv:

        async def work(number: int) -> None:
            client = Client(number, kv=kv, meter=phase.meter, settings=settings, tally=phase.tally)
            for _ in left:
                await client.ask(Turn.COLD)
                step()

        await asyncio.gather(*(work(number) for number in range(settings.churn_clients)))


@asynccontextmanager
async def _runtime(gpu_blocks: int, *, cpu_blocks: int, phase: Phase) -> AsyncIterator[KVRuntime]:
    backend = _UntimedBackend(FakeBackend(manual=False), meter=phase.meter)
    config = RuntimeConfig(geometry=GEOMETRY, gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks, backend=backend)
    async with KVRuntime(config) as kv:
        yield kv
        await kv.drain()
        for tier in Tier:
            phase.tally[f"{tier.value}_evicted"] = kv.core.counters.evicted_blocks[tier, EvictReason.CAPACITY]


@final
class _UntimedBackend(PassingBackend):
    """What the fake backend checks of a submission is the test's, no part of a step of aiokv."""

    __slots__ = ("_meter",)

    def __init__(self, inner: FakeBackend, *, meter: HoldMeter) -> None:
        super().__init__(inner)
        self._meter = meter

    def submit(self, batch: CopyBatch) -> DeviceEvent:
        """See `Backend`."""
        return self._meter.exclude(super().submit, batch)
