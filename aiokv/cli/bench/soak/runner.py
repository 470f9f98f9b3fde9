"""One run: open, load, stop, harvest, settle, look.

The clients stop by themselves when the time is over; who does not within a grace is *hung*. Then the faults stop too,
and the *harvest* asks once more for every conversation, from the GPU tier and, after a reset, from the CPU tier alone:
what the storm has left in the cache is compared like everything before.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, final

from aiokv import KVRuntime, Lease, RuntimeConfig, Tier
from aiokv.backends.host import HostBackend, HostFaults, Stall
from aiokv.cli.bench.backends import PoisoningBackend
from aiokv.cli.bench.garbage import GarbagePauses, frozen_garbage
from aiokv.cli.bench.hold import HoldMeter, run_metered
from aiokv.cli.bench.kv_bytes import KvBytes
from aiokv.cli.bench.memory import MemoryTrend
from aiokv.cli.bench.report import BenchReport
from aiokv.cli.bench.soak import findings
from aiokv.cli.bench.soak.client import Client
from aiokv.cli.bench.soak.session import Session
from aiokv.cli.bench.soak.settings import BLOCK, GEOMETRY, Sabotage, SoakSettings
from aiokv.cli.bench.soak.world import World, tenants_of
from aiokv.cli.output import new_progress
from aiokv.errors import AcquireTimeout
from aiokv.testing import FaultyBackend

__all__ = ["SCHEMA_VERSION", "soak"]

SCHEMA_VERSION: Final = 1
_TOKEN_WORDS: Final = 4
_SAMPLE_S: Final = 0.25
_SAMPLES_PER_AUDIT: Final = 4
_RESET_PAUSE_S: Final = 0.7
_RESETTING: Final = 0.8
"""Of the time of a run."""
_CLIENT_GRACE_S: Final = 20.0
_SETTLE_GRACE_S: Final = 5.0
_CORRUPT_EVERY: Final = 50
_STUCK_COPY: Final = 100


def soak(settings: SoakSettings) -> BenchReport:
    """Run it, in a loop of its own, with a progress bar on stderr."""
    meter = HoldMeter()
    with new_progress() as progress:
        task = progress.add_task("soaking", total=settings.seconds)
        run = _Run(settings, meter=meter, on_time=lambda seconds: progress.update(task, completed=seconds))
        figures = run_metered(run.run, meter=meter)
    return BenchReport(
        benchmark="soak",
        schema_version=SCHEMA_VERSION,
        figures=figures,
        complaints=findings.complaints_about(figures, settings=settings),
    )


@final
class _Run:
    """The parts of one run."""

    __slots__ = ("_backend", "_kept", "_memory", "_meter", "_on_time", "_settings", "_stall", "_trend")

    def __init__(self, settings: SoakSettings, *, meter: HoldMeter, on_time: Callable[[float], None]) -> None:
        self._settings = settings
        self._meter = meter
        self._on_time = on_time
        self._stall = Stall()
        self._kept: list[Lease] = []
        self._trend = MemoryTrend()
        self._memory = KvBytes(GEOMETRY, gpu_blocks=settings.gpu_blocks, token_words=_TOKEN_WORDS)
        host = HostBackend(faults=_sabotaged(settings.sabotage, stall=self._stall))
        self._backend = FaultyBackend(
            PoisoningBackend(host, memory=self._memory, meter=meter),
            seed=settings.seed,
            fail=settings.faults,
            late=settings.faults,
            refuse=settings.faults / 2,
        )

    async def run(self) -> dict[str, Any]:
        """The figures."""
        config = RuntimeConfig(
            geometry=GEOMETRY,
            gpu_blocks=self._settings.gpu_blocks,
            cpu_blocks=self._settings.cpu_blocks,
            store_policy=self._settings.store_policy,
            backend=self._backend,
            close_grace_s=_SETTLE_GRACE_S,
        )
        async with KVRuntime(config, arenas=self._memory.arenas) as kv:
            world = World(kv=kv, memory=self._memory, meter=self._meter, tenants=tenants_of(self._settings.seed))
            asyncio.get_running_loop().set_exception_handler(partial(_note_context, world))
            clients = [Client(world, seed=self._settings.seed, number=n) for n in range(self._settings.clients)]
            try:
                with frozen_garbage(self._meter) as pauses:
                    await self._load(world, clients, pauses=pauses)
                    self._backend.heal()
                    with _noted(world):
                        await self._harvest(world, clients)
                    return await self._settled_figures(world, pauses)
            finally:
                self._stall.release.set()

    async def _load(self, world: World, clients: Sequence[Client], *, pauses: GarbagePauses) -> None:
        """The storm itself."""
        watch = self._watch(world, pauses=pauses)
        helpers = [asyncio.create_task(watch), asyncio.create_task(self._reset_now_and_then(world))]
        running = [asyncio.create_task(client.run()) for client in clients]
        if self._settings.sabotage is Sabotage.LEASE:
            self._kept.append(await world.kv.acquire("never given back", range(BLOCK)))
        await asyncio.sleep(self._settings.seconds)
        world.is_over = True
        _, hung = await asyncio.wait(running, timeout=_CLIENT_GRACE_S)
        world.seen["hung"] += len(hung)
        for task in (*hung, *helpers):
            task.cancel()
        for ended in await asyncio.gather(*running, *helpers, return_exceptions=True):
            if isinstance(ended, Exception):
                world.note_error(ended)

    async def _watch(self, world: World, *, pauses: GarbagePauses) -> None:
        """Samples memory, and audits while everything runs."""
        loop = asyncio.get_running_loop()
        began, count = loop.time(), 0
        while True:
            if count % _SAMPLES_PER_AUDIT == 0:
                pauses.collect()
                world.seen["audits"] += 1
                world.note_violations(findings.find_violations(world.kv))
            self._trend.sample(loop.time() - began)
            self._on_time(loop.time() - began)
            count += 1
            await asyncio.sleep(_SAMPLE_S)

    async def _reset_now_and_then(self, world: World) -> None:
        """Until shortly before the end: the harvest is to find something."""
        source = random.Random(f"{self._settings.seed}/resets")
        names = {Tier.GPU: "resets_gpu", Tier.CPU: "resets_cpu", None: "resets_both"}
        ends_at = asyncio.get_running_loop().time() + self._settings.seconds * _RESETTING
        while asyncio.get_running_loop().time() < ends_at:
            await asyncio.sleep(source.random() * 2 * _RESET_PAUSE_S)
            tier = source.choice(tuple(names))
            await world.wait(world.kv.reset(tier))
            world.seen[names[tier]] += 1

    async def _harvest(self, world: World, clients: Sequence[Client]) -> None:
        for tier in (Tier.GPU, Tier.CPU):
            if not await _within_grace(world.kv.drain()):
                return  # a stuck copy: told by the orphans
            if tier is Tier.CPU:
                await world.kv.reset(Tier.GPU)
            for client in clients:
                with suppress(AcquireTimeout):
                    await self._ask_again(world, client, tier=tier)

    async def _ask_again(self, world: World, client: Client, *, tier: Tier) -> None:
        prompt = [*client.history, 0]
        async with world.kv.acquire("harvest", prompt, timeout=1.0, **client.tenant.identity) as lease:
            Session(world, lease=lease, tenant=client.tenant, tokens=prompt, source=random.Random(0)).arrive()
            hit = lease.delivered
            world.seen[f"harvested_{tier.value}_tokens"] += hit.gpu_tokens if tier is Tier.GPU else hit.cpu_tokens

    async def _settled_figures(self, world: World, pauses: GarbagePauses) -> dict[str, Any]:
        kv = world.kv
        is_drained = await _within_grace(kv.drain())
        world.note_violations(findings.find_violations(kv))
        held = findings.end_figures(kv)
        whole_pool = False
        with _noted(world):
            whole_pool = is_drained and await _has_whole_pool(kv) and await _within_grace(kv.drain())
        counted = findings.core_figures(kv)
        world.seen["violations"] += counted["accounting_errors"]
        names = (*findings.ZEROS, *findings.MIX, "requests", "audits")
        return {
            "seed": self._settings.seed,
            "seconds": self._settings.seconds,
            "clients": self._settings.clients,
            "requests": world.seen["requests"],
            **held,
            **{name: world.seen[name] for name in ("violations", "corrupt", "errors", "hung")},
            "pools_conserved": findings.pools_conserved(kv),
            "whole_pool": whole_pool,
            **findings.fault_figures(self._backend.injected),
            **findings.measured_figures(self._meter, memory=self._trend, pauses=pauses),
            **{name: world.seen[name] for name in sorted({*names, *world.seen} - held.keys() - counted.keys())},
            **counted,
            "notes": world.notes,
        }


@contextmanager
def _noted(world: World) -> Iterator[None]:
    """What is raised inside is counted and told, and the run goes on to its verdict."""
    try:
        yield
    except Exception as error:
        world.note_error(error)


async def _has_whole_pool(kv: KVRuntime) -> bool:
    """Invariant 12: with nobody there, one request can have every slot."""
    blocks = (kv.config.gpu_blocks - 1) // len(GEOMETRY.groups)
    try:
        async with kv.acquire("the whole pool", range(blocks * BLOCK), salt="nobody", timeout=1.0) as lease:
            return lease.capacity_tokens == blocks * BLOCK
    except AcquireTimeout:
        return False


async def _within_grace(waiting: Awaitable[None]) -> bool:
    """Whether it came to an end in time."""
    try:
        async with asyncio.timeout(_SETTLE_GRACE_S):
            await waiting
    except TimeoutError:
        return False
    return True


def _sabotaged(sabotage: Sabotage, *, stall: Stall) -> HostFaults:
    if sabotage is Sabotage.BYTE:
        return HostFaults(corrupt=frozenset(range(_CORRUPT_EVERY, 1_000_000, _CORRUPT_EVERY)))
    return HostFaults(stall={_STUCK_COPY: stall}) if sabotage is Sabotage.COPY else HostFaults()


def _note_context(world: World, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:  # the loop calls it
    """What a loop would only log."""
    error = context.get("exception")
    world.note_error(error if isinstance(error, BaseException) else RuntimeError(str(context.get("message"))))
