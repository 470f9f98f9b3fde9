"""One run: open, load, stop, end.

The clients stop by themselves when the time is over; who does not within a grace is *hung*. Then the faults stop too,
and `ending.py` takes over.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, final

from aiokv import KVRuntime, Lease, RuntimeConfig, Tier
from aiokv.backends.host import Stall
from aiokv.cli.bench.backends import PoisoningBackend
from aiokv.cli.bench.garbage import GarbagePauses, frozen_garbage
from aiokv.cli.bench.hold import HoldMeter, run_metered
from aiokv.cli.bench.memory import MemoryTrend
from aiokv.cli.bench.report import BenchReport
from aiokv.cli.bench.soak import findings
from aiokv.cli.bench.soak.client import Client
from aiokv.cli.bench.soak.copying import Copying
from aiokv.cli.bench.soak.damage import DamagingBackend, damage_now_and_then
from aiokv.cli.bench.soak.ending import Ending, noted
from aiokv.cli.bench.soak.keeper import Keeper
from aiokv.cli.bench.soak.ranks import RemoteRanks
from aiokv.cli.bench.soak.settings import BLOCK, Sabotage, SoakSettings
from aiokv.cli.bench.soak.watchdog import spinning_interrupted
from aiokv.cli.bench.soak.world import World, tenants_of
from aiokv.cli.output import new_progress
from aiokv.errors import AiokvError
from aiokv.model.plan import Checksum
from aiokv.testing import FaultyBackend

__all__ = ["SCHEMA_VERSION", "soak"]

SCHEMA_VERSION: Final = 1
_SAMPLE_S: Final = 0.25
_SAMPLES_PER_COLLECTION: Final = 4
_AUDIT_PAUSE_S: Final = 0.3
_AUDITS_IN_SLICES: Final = 3
"""For each one in a single hold."""
_RESET_PAUSE_S: Final = 0.7
_RESETTING: Final = 0.8
"""Of the time of a run."""
_CLIENT_GRACE_S: Final = 20.0


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

    __slots__ = (
        "_answering",
        "_backend",
        "_copying",
        "_damage",
        "_kept",
        "_memory",
        "_meter",
        "_on_time",
        "_settings",
        "_stall",
        "_trend",
    )

    def __init__(self, settings: SoakSettings, *, meter: HoldMeter, on_time: Callable[[float], None]) -> None:
        self._settings = settings
        self._meter = meter
        self._on_time = on_time
        self._stall = Stall()
        self._kept: list[Lease] = []
        self._answering: list[asyncio.Task[None]] = []
        self._trend = MemoryTrend()
        self._copying = Copying.of(settings, stall=self._stall)
        self._memory = self._copying.memory
        copier = self._copying.copier
        poisoning = PoisoningBackend(copier, memory=self._memory, meter=meter, stream=self._copying.stream)
        self._damage = DamagingBackend(poisoning, host=copier)
        self._backend = FaultyBackend(
            self._damage,
            seed=settings.seed,
            fail=settings.faults,
            late=settings.faults,
            refuse=settings.faults / 2,
        )

    async def run(self) -> dict[str, Any]:
        """The figures. `ConfigError` for what no runtime can be built from."""
        kv = KVRuntime(self._config(), arenas=self._memory.arenas)
        world = World(kv=kv, memory=self._memory, meter=self._meter, tenants=tenants_of(self._settings.seed))
        asyncio.get_running_loop().set_exception_handler(partial(_note_context, world))
        is_open = await _open(world)
        ending = Ending(world, settings=self._settings)
        with frozen_garbage(self._meter) as pauses, spinning_interrupted(asyncio.get_running_loop()):
            try:
                if is_open:
                    await self._soak(world, ending=ending, pauses=pauses)
                found = await ending.settle()
            finally:
                world.is_over = True  # whoever is still asking stops, if the run itself was cancelled
                self._stall.release.set()
                await ending.close()
        world.note_violations(self._copying.violations())
        return self._figures(world, found, pauses=pauses)

    async def _soak(self, world: World, *, ending: Ending, pauses: GarbagePauses) -> None:
        """The storm, and the harvest."""
        clients = [Client(world, seed=self._settings.seed, number=n) for n in range(self._settings.clients)]
        ranks = self._remote_ranks(world)
        if self._settings.remote_ranks:
            self._answering.append(asyncio.create_task(ranks.run()))  # it ends with the runtime
        with noted(world):
            await self._load(world, clients, pauses=pauses)
        self._backend.heal()
        ranks.is_healed = True
        with noted(world):
            await ending.harvest(clients)

    def _config(self) -> RuntimeConfig:
        return RuntimeConfig(
            geometry=self._settings.geometry,
            gpu_blocks=self._settings.gpu_blocks,
            cpu_blocks=self._settings.cpu_blocks,
            store_policy=self._settings.store_policy,
            checksum=self._settings.checksum,
            world_size=1 + self._settings.remote_ranks,
            remote_ranks=range(1, 1 + self._settings.remote_ranks),
            backend=self._backend,
            compute_stream=self._copying.stream,
            close_grace_s=self._settings.grace_s,
        )

    def _remote_ranks(self, world: World) -> RemoteRanks:
        return RemoteRanks(
            world.kv,
            ranks=range(1, 1 + self._settings.remote_ranks),
            seed=self._settings.seed,
            faults=self._settings.faults / 2,
            seen=world.seen,
        )

    async def _load(self, world: World, clients: Sequence[Client], *, pauses: GarbagePauses) -> None:
        """The storm itself."""
        keepers = [Keeper(world, tenant=tenant, seed=self._settings.seed) for tenant in world.tenants]
        helpers = [asyncio.create_task(helper) for helper in self._helpers(world, pauses=pauses)]
        running = [asyncio.create_task(run) for run in (*map(Client.run, clients), *map(Keeper.run, keepers))]
        if self._settings.sabotage is Sabotage.LEASE:
            self._kept.append(await world.kv.acquire("never given back", range(BLOCK)))
        await asyncio.sleep(self._settings.seconds)
        world.is_over = True
        _, hung = await asyncio.wait(running, timeout=_CLIENT_GRACE_S)
        world.seen["hung"] += len(hung)
        for task in (*hung, *helpers):
            task.cancel()
        ended, _ = await asyncio.wait((*running, *helpers), timeout=self._settings.grace_s)
        for task in ended:
            if not task.cancelled() and (error := task.exception()) is not None:
                world.note_error(error)

    def _helpers(self, world: World, *, pauses: GarbagePauses) -> list[Coroutine[Any, Any, None]]:
        """What goes on beside the clients until it is cancelled."""
        settings = self._settings
        helpers = [self._watch(pauses), self._audit_now_and_then(world), self._reset_now_and_then(world)]
        if settings.checksum is not Checksum.OFF:
            damage = damage_now_and_then(self._damage, world.kv, checksum=settings.checksum, seed=settings.seed)
            helpers.append(damage)
        return helpers

    async def _watch(self, pauses: GarbagePauses) -> None:
        """Samples memory."""
        loop = asyncio.get_running_loop()
        began, count = loop.time(), 0
        while True:
            if count % _SAMPLES_PER_COLLECTION == 0:
                pauses.collect()
            self._trend.sample(loop.time() - began)
            self._on_time(loop.time() - began)
            count += 1
            await asyncio.sleep(_SAMPLE_S)

    async def _audit_now_and_then(self, world: World) -> None:
        """While everything runs: one that looks at everything at once, then some in slices."""
        while True:
            with noted(world):
                world.note_violations(findings.find_violations(world.kv))
                world.seen["audits"] += 1
            for _ in range(_AUDITS_IN_SLICES):
                await asyncio.sleep(_AUDIT_PAUSE_S)
                with noted(world):
                    audit = await world.wait(world.kv.audit_sliced())
                    world.note_violations(audit.violations)
                    world.seen["audits_sliced"] += 1

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

    def _figures(self, world: World, found: dict[str, Any], *, pauses: GarbagePauses) -> dict[str, Any]:
        names = (*findings.ZEROS, *findings.MIX, "requests", "audits", "audits_sliced", "compared_states", "captured")
        return {
            "backend": self._settings.backend.value,
            **self._copying.figures,
            "seed": self._settings.seed,
            "seconds": self._settings.seconds,
            "clients": self._settings.clients,
            "groups": ",".join(self._settings.groups),
            "store_policy": self._settings.store_policy.value,
            "checksum": self._settings.checksum.value,
            "remote_ranks": self._settings.remote_ranks,
            "requests": world.seen["requests"],
            **{name: found[name] for name in findings.HELD},
            **{name: world.seen[name] for name in ("violations", "corrupt", "errors", "hung")},
            "pools_conserved": found["pools_conserved"],
            "whole_pool": found["whole_pool"],
            **findings.fault_figures(self._backend.injected),
            "flipped": self._damage.flipped,
            "flipped_loaded": self._damage.asked_for,
            **findings.measured_figures(self._meter, memory=self._trend, pauses=pauses),
            **{name: world.seen[name] for name in sorted({*names, *world.seen} - found.keys())},
            **{name: found[name] for name in findings.COUNTED},
            "notes": world.notes,
        }


async def _open(world: World) -> bool:
    """Whether there is a runtime to soak; what breaks it while it opens is counted, as it is later."""
    try:
        await world.kv.open()
        await world.kv.ready()
    except AiokvError:
        raise
    except Exception as error:
        world.note_error(error)
        return False
    return True


def _note_context(world: World, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:  # the loop calls it
    """What a loop would only log."""
    error = context.get("exception")
    world.note_error(error if isinstance(error, BaseException) else RuntimeError(str(context.get("message"))))
