"""All figures of being watched, and what they must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

from aiokv import run
from aiokv.cli.bench.events.memory import EventBytes, measure_bytes
from aiokv.cli.bench.events.scrapes import Scrape, scrape_while_busy
from aiokv.cli.bench.events.settings import EventsSettings, Listeners
from aiokv.cli.bench.events.world import World, opened_world
from aiokv.cli.bench.garbage import collections_off
from aiokv.cli.bench.report import BenchReport
from aiokv.cli.bench.spread import spread_of
from aiokv.cli.output import new_still_progress
from aiokv.model.events import BlockStored
from aiokv.model.ids import Tier

__all__ = ["SCHEMA_VERSION", "complaints_about", "events"]

SCHEMA_VERSION: Final = 1


def events(settings: EventsSettings) -> BenchReport:
    """Run it, in a loop of its own, with progress on stderr."""
    with new_still_progress() as progress:
        task = progress.add_task("events", total=settings.repeats + 2)
        figures = run(_measure(settings, step=lambda: progress.update(task, advance=1, refresh=True)))
    return BenchReport(
        benchmark="events", schema_version=SCHEMA_VERSION, figures=figures, complaints=complaints_about(figures)
    )


async def _measure(settings: EventsSettings, *, step: Callable[[], None]) -> dict[str, Any]:
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
        heard = {listeners.value: _heard(world, settings) for listeners, world in worlds.items()}
    in_memory = await measure_bytes(settings)
    step()
    return {
        "driver": "fake",
        "garbage_collection": "off",
        "repeats": settings.repeats,
        "blocks": settings.blocks,
        **{
            f"listeners_{listeners.value}": _figures(taken, without=seconds[Listeners.NONE], blocks=settings.blocks)
            | heard[listeners.value]
            for listeners, taken in seconds.items()
        },
        "bytes_per_token": _byte_figures(in_memory),
        "scrape": _scrape_figures(scrapes, without=seconds[Listeners.NONE]),
    }


def _figures(taken: Sequence[float], *, without: Sequence[float], blocks: int) -> dict[str, float]:
    """Of the loop's thread, for a block that is registered in both tiers and evicts one in each."""
    more = [1e6 * (one - other) / blocks for one, other in zip(taken, without, strict=True)]
    return spread_of("us_per_block", [1e6 * one / blocks for one in taken]) | spread_of("more_us_per_block", more)


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
        **spread_of("thread_ms", [1e3 * scrape.thread_s for scrape in scrapes]),
        **spread_of("more_loop_us", more),
        "page_bytes": max(scrape.num_bytes for scrape in scrapes),
        "on_loop": sum(not scrape.is_off_loop for scrape in scrapes),
    }


def complaints_about(figures: Mapping[str, Any]) -> tuple[str, ...]:
    """Each promise that was not kept, in words."""
    complaints = [
        f"{name}: {found['unheard_blocks']} blocks were not told, or told twice"
        for name, found in figures.items()
        if name.startswith("listeners_") and found["unheard_blocks"]
    ]
    slow = figures["listeners_slow"]
    if slow["events"] != slow["dropped"] + slow["kept"]:
        complaints.append(f"a slow reader was told of {slow['dropped'] + slow['kept']} events of {slow['events']}")
    if figures["scrape"]["on_loop"]:
        complaints.append("a scrape has run on the loop")
    return tuple(complaints)
