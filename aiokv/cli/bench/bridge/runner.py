"""All wake-ups, their figures, and what they must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np

from aiokv import run
from aiokv.backends.cuda_driver import CudaDriver
from aiokv.cli.bench.bridge.idle import Idle, listen_to_idle
from aiokv.cli.bench.bridge.rounds import WakeUps, opened_crowd
from aiokv.cli.bench.bridge.settings import BUDGET, BridgeBackend, BridgeSettings
from aiokv.cli.bench.device import DriverKind, load_fake_driver
from aiokv.cli.bench.garbage import collections_off
from aiokv.cli.bench.report import BenchReport
from aiokv.cli.bench.summary import Spread, describe_interpreter
from aiokv.cli.output import new_still_progress
from aiokv.errors import ConfigError

__all__ = ["SCHEMA_VERSION", "bridge", "complaints_about"]

SCHEMA_VERSION: Final = 2


def bridge(settings: BridgeSettings) -> BenchReport:
    """Run it, in a loop of its own, with progress on stderr; `ConfigError` says what the device asked for misses."""
    driver = _find_driver(settings)
    with new_still_progress() as progress, collections_off():
        task = progress.add_task("bridge", total=1 + settings.repeats * len(settings.in_flight))
        found = run(_measure(settings, driver=driver, step=lambda: progress.update(task, advance=1, refresh=True)))
    return BenchReport(
        benchmark="bridge",
        schema_version=SCHEMA_VERSION,
        figures=found.figures,
        complaints=complaints_about(found.figures),
        cases=found.cases,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Of the whole, and of each number in flight."""

    figures: Mapping[str, Any]
    cases: tuple[Mapping[str, Any], ...]


async def _measure(settings: BridgeSettings, *, driver: object, step: Callable[[], None]) -> _Found:
    seen: dict[int, list[WakeUps]] = {size: [] for size in settings.in_flight}
    async with AsyncExitStack() as stack:
        crowds = {
            size: await stack.enter_async_context(opened_crowd(size, settings=settings, driver=driver))
            for size in settings.in_flight
        }
        step()
        for _ in range(settings.repeats):
            for size, crowd in crowds.items():
                seen[size].append(await crowd.run_round())
                step()
        idle = await listen_to_idle(crowds[max(crowds)].kv, seconds=settings.idle_ms / 1e3)
    figures = {
        "driver": (BridgeBackend.CLOCKED if driver is None else DriverKind.FAKE).value,
        "gc": "off",
        "repeats": settings.repeats,
        "completions": settings.completions,
        "copy_us": settings.copy_us,
        "ratio": round(_ratio(seen), 3),
        "budget": BUDGET,
        "idle": _idle_figures(idle),
        **describe_interpreter(),
    }
    cases = [{"in_flight": size} | _figures(found) for size, found in seen.items()]
    return _Found(figures=figures, cases=tuple(cases))


def _find_driver(settings: BridgeSettings) -> object:
    """The fake driver, also beside a real one: that does not end copies when it is told to. None: a clock will do."""
    if settings.backend is BridgeBackend.CLOCKED:
        return None
    try:
        driver = load_fake_driver(why="copies that end when they are told to need the fake CUDA driver of a checkout")
        CudaDriver.load()
    except ConfigError:
        if settings.backend is BridgeBackend.CUDA:
            raise
        return None
    return driver


def _figures(found: Sequence[WakeUps]) -> dict[str, Any]:
    latencies = [1e6 * latency for one in found for latency in one.latencies_s]
    p50, p90, p99 = np.quantile(latencies, (0.5, 0.9, 0.99)).tolist()
    return {
        "completions": sum(one.completions for one in found),
        "timed": len(latencies),
        "least_in_flight": min(one.least_in_flight for one in found),
        "latency_us": {"p50": round(p50, 1), "p90": round(p90, 1), "p99": round(p99, 1)},
        "loop_us_per_request": Spread.of([1e6 * one.loop_s / one.completions for one in found]).figures(),
        "loop_share": round(sum(one.loop_s for one in found) / sum(one.wall_s for one in found), 4),
    }


def _ratio(seen: Mapping[int, Sequence[WakeUps]]) -> float:
    """Of the medians with most and with fewest in flight, each the best repeat's: noise only adds."""
    fewest, most = (min(median(one.latencies_s) for one in seen[size]) for size in (min(seen), max(seen)))
    return most / fewest


def _idle_figures(idle: Idle) -> dict[str, Any]:
    return {
        "seconds": idle.seconds,
        "polls": idle.polls,
        "thread_wakeups": idle.wakeups,
        "loop_share": round(idle.loop_s / idle.seconds, 5),
    }


def complaints_about(figures: Mapping[str, Any]) -> tuple[str, ...]:
    """Each promise that was not kept, in words."""
    complaints = []
    if figures["ratio"] > BUDGET:
        complaints.append(f"with most in flight a wake-up takes {figures['ratio']} times as long, not {BUDGET}")
    if figures["idle"]["polls"]:
        complaints.append(f"{figures['idle']['polls']} polls with nothing in flight")
    return tuple(complaints)
