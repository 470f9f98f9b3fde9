"""A scrape of the metrics while the runtime is busy: in a thread of its own, as `start_http_server` does it."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest

from aiokv.cli.bench.events.world import World

__all__ = ["Scrape", "scrape_while_busy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """One scrape, and the round of requests that went on meanwhile."""

    thread_s: float
    """CPU time of the thread that scraped."""
    loop_s: float
    """CPU time of the loop's thread, round included."""
    num_bytes: int
    """Of the page."""
    is_off_loop: bool
    """Whether another thread than the loop's made the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    thread_s: float
    num_bytes: int
    thread_id: int


async def scrape_while_busy(world: World) -> Scrape:
    """Scrape in another thread while this one serves a round."""
    registry = CollectorRegistry()
    registry.register(world.kv.collector)
    scraping = asyncio.create_task(asyncio.to_thread(_scrape, registry))
    loop_s = await world.run_round()
    page = await scraping
    return Scrape(
        thread_s=page.thread_s,
        loop_s=loop_s,
        num_bytes=page.num_bytes,
        is_off_loop=page.thread_id != threading.get_ident(),
    )


def _scrape(registry: CollectorRegistry) -> _Page:
    began = time.thread_time()
    text = generate_latest(registry)
    return _Page(thread_s=time.thread_time() - began, num_bytes=len(text), thread_id=threading.get_ident())
