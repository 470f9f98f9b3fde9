"""Both sides in turns, a slice of the trace each, on one core; what is left of a slice is done before the other's turn.

Timed is what a side does for a slice, hashing included; making the tokens is not, nor what the fake backend checks of
each copy. On neither side what existed when the trace began is looked at by the garbage collector. How long the loop is
held is measured in a second run, without the peer: reading the clock at each step takes as long as many of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any, Final

from aiokv import KVRuntime, RuntimeConfig, run
from aiokv.backends.fake import FakeBackend
from aiokv.cli.bench.garbage import frozen, frozen_garbage
from aiokv.cli.bench.hold import HoldMeter, run_metered
from aiokv.cli.bench.replay.clock import SideClock, UntimedBackend
from aiokv.cli.bench.replay.figures import beside, complaints_about, hold_figures, side_figures
from aiokv.cli.bench.replay.peer import Peer, Served
from aiokv.cli.bench.replay.player import MeteredCalls, PlainCalls, Player
from aiokv.cli.bench.replay.prompts import make_prompt
from aiokv.cli.bench.replay.schedule import Arrival, plan_arrivals
from aiokv.cli.bench.replay.scrapes import Scraper
from aiokv.cli.bench.replay.settings import WATERMARK, ReplaySettings, TokenForm
from aiokv.cli.bench.replay.trace import read_trace
from aiokv.cli.bench.report import BenchReport
from aiokv.cli.output import new_progress

__all__ = ["SCHEMA_VERSION", "replay"]

SCHEMA_VERSION: Final = 1
_SCRAPE_EVERY_S: Final = 1.0


def replay(settings: ReplaySettings) -> BenchReport:
    """Run it, in loops of its own, with a progress bar on stderr."""
    arrivals = plan_arrivals(read_trace(settings.trace, limit=settings.requests), settings=settings)
    meter = HoldMeter()
    with new_progress() as progress, _one_core(shared=settings.peer_python is not None):
        advance = partial(progress.advance, progress.add_task("replay", total=2 * len(arrivals)))
        figures = run(partial(_rates, arrivals, settings=settings, advance=advance))
        run_metered(partial(_holds, arrivals, settings=settings, meter=meter, advance=advance), meter=meter)
    figures["hold"] = hold_figures(meter)
    return BenchReport(
        benchmark="replay", schema_version=SCHEMA_VERSION, figures=figures, complaints=complaints_about(figures)
    )


async def _rates(
    arrivals: list[Arrival], *, settings: ReplaySettings, advance: Callable[[float], None]
) -> dict[str, Any]:
    """Both sides in turns, and what each had to do."""
    clock = SideClock()
    async with AsyncExitStack() as stack:
        kv = await stack.enter_async_context(KVRuntime(_config(settings, clock=clock)))
        peer = None
        if settings.peer_python is not None:
            peer = await Peer.start(settings.peer_python, settings=settings)
            stack.push_async_callback(peer.close)
        scraper = stack.enter_context(Scraper(kv.collector, every_s=_SCRAPE_EVERY_S))
        player = await stack.enter_async_context(Player(kv, calls=PlainCalls()))
        stack.enter_context(frozen())
        ours: list[Served] = []
        theirs: list[Served] = []
        for part in _slices(arrivals, size=settings.slice_requests):
            last = part[-1] is arrivals[-1]
            ours.append(await _play(player, part, clock=clock, form=settings.tokens, last=last))
            if peer is not None:
                theirs.append(await peer.play(part, last=last))
            advance(len(part))
        figures = {
            **_of_settings(settings),
            "aiokv": side_figures(ours, arrivals=arrivals),
            "attributed": player.tokens_by_source(),
            "metrics": await asyncio.to_thread(scraper.tokens_by_source),
            "scrapes": {"read": scraper.count, "failed": scraper.failed},
        }
        return figures if peer is None else figures | beside(peer.name, ours, theirs=theirs, arrivals=arrivals)


async def _holds(
    arrivals: list[Arrival], *, settings: ReplaySettings, meter: HoldMeter, advance: Callable[[float], None]
) -> None:
    """The same once more without the peer, each step timed: that takes too long to be part of a rate."""
    clock = SideClock()
    async with AsyncExitStack() as stack:
        kv = await stack.enter_async_context(KVRuntime(_config(settings, clock=clock)))
        stack.enter_context(Scraper(kv.collector, every_s=_SCRAPE_EVERY_S))
        player = await stack.enter_async_context(Player(kv, calls=MeteredCalls(meter)))
        stack.enter_context(frozen_garbage(meter))
        for part in _slices(arrivals, size=settings.slice_requests):
            await _play(player, part, clock=clock, form=settings.tokens, last=part[-1] is arrivals[-1])
            advance(len(part))


def _config(settings: ReplaySettings, *, clock: SideClock) -> RuntimeConfig:
    return RuntimeConfig(
        geometry=settings.geometry,
        gpu_blocks=settings.gpu_blocks,
        cpu_blocks=settings.cpu_blocks,
        watermark=WATERMARK,
        backend=UntimedBackend(FakeBackend(manual=False), clock=clock),
    )


def _slices(arrivals: list[Arrival], *, size: int) -> Iterator[list[Arrival]]:
    for start in range(0, len(arrivals), size):
        yield arrivals[start : start + size]


def _of_settings(settings: ReplaySettings) -> dict[str, Any]:
    return {
        "trace": settings.trace.name,
        "block_size": settings.block_size,
        "gpu_blocks": settings.gpu_blocks,
        "cpu_blocks": settings.cpu_blocks,
        "in_flight": settings.in_flight,
        "tokens": settings.tokens.value,
    }


async def _play(player: Player, arrivals: list[Arrival], *, clock: SideClock, form: TokenForm, last: bool) -> Served:
    """One slice on the runtime."""
    begun, (wall, cpu) = len(player.hits), clock.read()
    await player.play(map(clock.excluded(partial(make_prompt, form=form)), arrivals))
    if last:
        await player.end_all()
    now_wall, now_cpu = clock.read()
    hits = [(hit.gpu_tokens, hit.cpu_tokens) for hit in player.hits[begun:]]
    return Served(seconds=now_wall - wall, cpu_seconds=now_cpu - cpu, hits=hits)


@contextmanager
def _one_core(*, shared: bool) -> Iterator[None]:
    """Keep this thread, and what it starts, on one core, if two sides are to be compared there."""
    if not shared or not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
