"""All figures of being watched, and what they must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from aiokv import run
from aiokv.cli.bench.events.memory import EventBytes, measure_bytes
from aiokv.cli.bench.events.scrapes import Scrape, scrape_while_busy
from aiokv.cli.bench.events.settings import EventsSettings, Listeners
from aiokv.cli.bench.events.world import World, opened_world
from aiokv.cli.bench.garbage import collections_off
from aiokv.cli.bench.report import BenchReport
from aiokv.cli.bench.summary import Spread, describe_interpreter
from aiokv.cli.output import new_still_progress
from aiokv.model.events import BlockStored
from aiokv.model.ids import Tier

__all__ = ["SCHEMA_VERSION", "complaints_about", "events"]

SCHEMA_VERSION: Final = 1


def events(settings: EventsSettings) -> BenchReport:
    """Run it, in a loop of its own, with progress on stderr."""
    with new_still_progress() as progress:
        task = progress.add_task("events", total=settings.repeats + 2)
        found = run(_measure(settings, step=lambda: progress.update(task, advance=1, refresh=True)))
    return BenchReport(
        benchmark="events",
        schema_version=SCHEMA_VERSION,
        figures=found.figures,
        complaints=complaints_about(found.figures, cases=found.cases),
        cases=found.cases,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Of the whole, and of each crowd of listeners."""

    figures: Mapping[str, Any]
    cases: tuple[Mapping[str, Any], ...]


async def _measure(settings: EventsSettings, *, step: Callable[[], None]) -> _Found:
    seconds: dict[Listeners, list[float]] = {listeners: [] for listeners in Listeners}
    scrapes: list[Scrape] = []
    async with AsyncExitStack() as stack:
        worlds = {
            listeners: await stack.enter_async_context(opened_world(listeners, settings=settings))
            for listeners in Listeners
        }
        for world in worlds.values():
            for _ in range(2 * settings.pool_prompts + 1):
                await world.run_round()
        step()
        with collections_off():
            for _ in range(settings.repeats):
                for listeners, world in worlds.items():
                    seconds[listeners].append(await world.run_round())
                scrapes.append(await scrape_while_busy(worlds[Listeners.NONE]))
                step()
        cases = [
            {"listeners": listeners.value}
            | _figures(seconds[listeners], without=seconds[Listeners.NONE], blocks=settings.blocks)
            | _heard(world, settings)
            for listeners, world in worlds.items()
        ]
    in_memory = await measure_bytes(settings)
    step()
    figures = {
        "driver": "fake",
        "gc": "off",
        "repeats": settings.repeats,
        "blocks": settings.blocks,
        "bytes_per_token": _byte_figures(in_memory),
        "scrape": _scrape_figures(scrapes, without=seconds[Listeners.NONE]),
        **describe_interpreter(),
    }
    return _Found(figures=figures, cases=tuple(cases))


def _figures(taken: Sequence[float], *, without: Sequence[float], blocks: int) -> dict[str, Any]:
    """Of the loop's thread, for a block that is registered in both tiers and evicts one in each."""
    more = [1e6 * (one - other) / blocks for one, other in zip(taken, without, strict=True)]
    return {
        "us_per_block": Spread.of([1e6 * one / blocks for one in taken]).figures(),
        "more_us_per_block": Spread.of(more).figures(),
    }


def _heard(world: World, settings: EventsSettings) -> dict[str, int]:
    """What the listeners were told: all of them everything, or how much was lost."""
    slow = world.read_slowly()
    samples = [sample for family in world.kv.collector.collect() for sample in family.samples]
    published = sum(sample.value for sample in samples if sample.name == "aiokv_kv_events_published_total")
    stored = world.rounds * settings.blocks
    return {
        "events": int(published),
        "unheard_blocks": sum(
            abs(stored - reader.blocks[BlockStored, tier]) for reader in world.readers for tier in Tier
        ),
        "dropped": slow.dropped + sum(reader.dropped for reader in world.readers),
        "kept": slow.events,
    }


def _byte_figures(found: EventBytes) -> dict[str, float]:
    return {"kept_by_runtime": round(found.kept, 3), "waiting_for_a_reader": round(found.waiting, 3)}


def _scrape_figures(scrapes: Sequence[Scrape], *, without: Sequence[float]) -> dict[str, Any]:
    more = [1e6 * (scrape.loop_s - alone) for scrape, alone in zip(scrapes, without, strict=True)]
    return {
        "thread_ms": round(median(1e3 * scrape.thread_s for scrape in scrapes), 3),
        "more_loop_us": round(median(more), 1),
        "page_bytes": max(scrape.num_bytes for scrape in scrapes),
        "on_loop": sum(not scrape.is_off_loop for scrape in scrapes),
    }


def complaints_about(figures: Mapping[str, Any], *, cases: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Each promise that was not kept, in words."""
    complaints = [
        f"listeners {case['listeners']}: {case['unheard_blocks']} blocks were not told, or told twice"
        for case in cases
        if case["unheard_blocks"]
    ]
    complaints += [
        f"a slow reader was told of {told} events of {case['events']}"
        for case in cases
        if case["listeners"] == Listeners.SLOW.value and (told := case["dropped"] + case["kept"]) != case["events"]
    ]
    if figures["scrape"]["on_loop"]:
        complaints.append("a scrape has run on the loop")
    return tuple(complaints)
