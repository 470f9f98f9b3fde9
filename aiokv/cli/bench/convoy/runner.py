"""All rounds of a convoy, its figures, and what they must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np

from aiokv import KVRuntime, RuntimeConfig, run
from aiokv.backends.host import HostBackend, HostFaults, Stall
from aiokv.cli.bench.backends import TallyingBackend
from aiokv.cli.bench.convoy.rounds import Rounds, Tally
from aiokv.cli.bench.convoy.settings import GEOMETRY, GROUP, ConvoySettings
from aiokv.cli.bench.kv_bytes import KvBytes
from aiokv.cli.bench.report import BenchReport
from aiokv.cli.output import new_progress

__all__ = ["SCHEMA_VERSION", "complaints_about", "convoy"]

SCHEMA_VERSION: Final = 1
_STEPS_PER_ROUND: Final = 5


def convoy(settings: ConvoySettings) -> BenchReport:
    """Run it, in a loop of its own, with a progress bar on stderr."""
    with new_progress() as progress:
        task = progress.add_task("convoy", total=1 + (1 + settings.rounds) * _STEPS_PER_ROUND)
        figures = run(_measure(settings, step=lambda: progress.advance(task)))
    return BenchReport(
        benchmark="convoy",
        schema_version=SCHEMA_VERSION,
        figures=figures,
        complaints=complaints_about(figures, settings=settings),
    )


async def _measure(settings: ConvoySettings, *, step: Callable[[], None]) -> dict[str, Any]:
    memory = KvBytes(GEOMETRY, gpu_blocks=settings.gpu_blocks, token_words=settings.token_words)
    stalls: dict[int, Stall] = {}
    backend = TallyingBackend(HostBackend(faults=HostFaults(stall=stalls)))
    config = RuntimeConfig(
        geometry=GEOMETRY, gpu_blocks=settings.gpu_blocks, cpu_blocks=settings.cpu_blocks, backend=backend
    )
    async with KVRuntime(config, arenas=memory.arenas) as kv:
        rounds = Rounds(kv, memory=memory, backend=backend, stalls=stalls, settings=settings)
        await rounds.compute_prefix()
        step()
        await _all_ways(rounds, settings, ways=_Ways(), step=step)  # warm-up
        ways = _Ways()
        for _ in range(settings.rounds):
            await _all_ways(rounds, settings, ways=ways, step=step)
        block_bytes = backend.block_bytes(GROUP)
    return {
        "clients": settings.clients,
        "prefix_tokens": settings.blocks * GEOMETRY.hash_block_size,
        "prefix_blocks": settings.blocks,
        "block_bytes": block_bytes,
        "rounds": settings.rounds,
        **_times(ways),
        **{way: _figures(tally, block_bytes=block_bytes) for way, tally in ways.by_name().items()},
    }


@dataclass(slots=True, kw_only=True)
class _Ways:
    """In which ways it is asked for, and what was seen."""

    alone: Tally = field(default_factory=Tally)
    alone_prepared: Tally = field(default_factory=Tally)
    crowd: Tally = field(default_factory=Tally)
    crowd_prepared: Tally = field(default_factory=Tally)
    leader_cancelled: Tally = field(default_factory=Tally)

    def by_name(self) -> dict[str, Tally]:
        return {way.name: getattr(self, way.name) for way in fields(self)}


async def _all_ways(rounds: Rounds, settings: ConvoySettings, *, ways: _Ways, step: Callable[[], None]) -> None:
    for way in (
        partial(rounds.crowd, 1, tally=ways.alone),
        partial(rounds.prepared_crowd, 1, tally=ways.alone_prepared),
        partial(rounds.crowd, settings.clients, tally=ways.crowd),
        partial(rounds.prepared_crowd, settings.clients, tally=ways.crowd_prepared),
        partial(rounds.leaderless, settings.clients, tally=ways.leader_cancelled),
    ):
        await way()
        step()


def _times(ways: _Ways) -> dict[str, float]:
    """Milliseconds until the prefix is valid; percentiles over all clients of all rounds, ratios to one client alone.

    `prepared` is without converting and hashing the tokens, which one loop does for one client after the other.
    """
    times: dict[str, float] = {}
    for suffix, one, many in (("", ways.alone, ways.crowd), ("_prepared", ways.alone_prepared, ways.crowd_prepared)):
        alone = median(one.seconds)
        half, nearly_all = np.quantile(many.seconds, (0.5, 0.99)).tolist()
        times |= {
            f"alone{suffix}_ms": round(1e3 * alone, 3),
            f"crowd{suffix}_ms_p50": round(1e3 * half, 3),
            f"crowd{suffix}_ms_p99": round(1e3 * nearly_all, 3),
            f"ratio{suffix}_p50": round(half / alone, 3),
            f"ratio{suffix}_p99": round(nearly_all / alone, 3),
        }
    return times


def _figures(tally: Tally, *, block_bytes: int) -> dict[str, Any]:
    """Counts, per round where they do not depend on chance."""
    return {
        "served": tally.served,
        "cancelled": tally.cancelled,
        "batches_per_round": tally.batches / tally.rounds,
        "copies_per_round": tally.copies / tally.rounds,
        "most_copies_of_a_block": tally.most_copies_of_a_block,
        "loaded_blocks_per_round": tally.loaded_bytes / block_bytes / tally.rounds,
        "wrong_blocks": tally.wrong_blocks,
        "tokens": {source: tally.tokens[source] for source in ("gpu", "cpu", "compute", "prompt")},
    }


def complaints_about(figures: Mapping[str, Any], *, settings: ConvoySettings) -> tuple[str, ...]:
    """Each promise that was not kept, in words."""
    asked = {
        "alone": 1,
        "alone_prepared": 1,
        "crowd": settings.clients,
        "crowd_prepared": settings.clients,
        "leader_cancelled": settings.clients - 1,
    }
    return tuple(
        f"{way}: {name} is {figures[way][name]}, not {wanted}"
        for way, clients in asked.items()
        for name, wanted in {
            "served": clients * settings.rounds,
            "cancelled": settings.rounds if way == "leader_cancelled" else 0,
            "copies_per_round": settings.blocks,
            "most_copies_of_a_block": 1,
            "loaded_blocks_per_round": settings.blocks,
            "wrong_blocks": 0,
            "tokens": _all_from_cpu(clients * settings.rounds, settings),
        }.items()
        if figures[way][name] != wanted
    )


def _all_from_cpu(prompts: int, settings: ConvoySettings) -> dict[str, int]:
    """The prefix of every prompt came from the CPU tier, also for those that joined; its question was computed."""
    block = GEOMETRY.hash_block_size
    cpu, compute = prompts * settings.blocks * block, prompts * block
    return {"gpu": 0, "cpu": cpu, "compute": compute, "prompt": cpu + compute}
