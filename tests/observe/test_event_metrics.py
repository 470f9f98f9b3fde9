"""Cache events as the metrics count them: by type, what slow readers miss, what no event can be made of."""

from __future__ import annotations

import gc

from aiokv import EventsDropped, RuntimeConfig, StorePolicy, Tier
from aiokv.runtime.runtime import KVRuntime
from aiokv.testing import FakeBackend, evict
from tests.observe.support import Scrape, opened
from tests.runtime.support import GEOMETRY, GROUP, Case, finish_copies, prompt, turns

PUBLISHED = "aiokv_kv_events_published_total"
DROPPED = "aiokv_kv_events_dropped_total"
REJECTED = "aiokv_kv_events_rejected_total"
QUEUE = "aiokv_kv_event_queue_batches"


async def serve(case: Case, *, seed: int = 0, blocks: int = 3) -> None:
    async with case.kv.acquire(f"request {seed}", prompt(blocks, seed=seed)) as lease:
        lease.confirm(lease.num_tokens)
    await finish_copies(case)


async def test_events_are_counted_by_type_while_somebody_listens() -> None:
    async with opened() as case:
        await serve(case, seed=1)
        assert Scrape(case.kv.collector).sum(PUBLISHED) == 0
        async with case.kv.events() as stream:
            await serve(case)
            evict(case.kv, prompt(3), {GROUP: (2,)}, tier=Tier.GPU)
            await case.kv.reset(Tier.CPU)
            scrape = Scrape(case.kv.collector)
            assert scrape.by("type", PUBLISHED) == {"stored": 2, "removed": 1, "cleared": 1}
            assert scrape(QUEUE) == len(stream.take()) == 4
            assert Scrape(case.kv.collector)(QUEUE) == 0


async def test_the_queue_is_that_of_the_slowest_reader_and_ends_with_it() -> None:
    async with opened() as case:
        async with case.kv.events() as fast, case.kv.events(backlog=1) as slow:
            await serve(case)
            assert len(fast.take()) == 2
            behind = Scrape(case.kv.collector)
            assert behind(QUEUE) == 2, "one event, and the word that one is missing"
            assert behind(DROPPED) == 1
            assert isinstance(slow.take()[-1], EventsDropped)
            await serve(case, seed=1)
            assert Scrape(case.kv.collector)(QUEUE) == 2
        assert Scrape(case.kv.collector)(QUEUE) == 0
        assert not Scrape(case.kv.collector).errors


async def test_a_reader_that_was_dropped_is_not_waited_for() -> None:
    async with opened() as case:
        stream = aiter(case.kv.events())
        await serve(case)
        assert Scrape(case.kv.collector)(QUEUE) == 2
        del stream
        gc.collect()
        assert Scrape(case.kv.collector)(QUEUE) == 0


async def test_blocks_whose_tokens_nobody_knows_are_rejected_events() -> None:
    """Registered before anybody listened, stored by their hashes alone afterwards."""
    backend = FakeBackend(manual=False)
    config = RuntimeConfig(
        geometry=GEOMETRY,
        gpu_blocks=9,
        cpu_blocks=16,
        watermark=0.0,
        backend=backend,
        store_policy=StorePolicy.LAZY,
        lazy_fraction=1.0,
    )
    async with KVRuntime(config) as kv:
        async with kv.acquire("before", prompt(3)) as lease:
            lease.confirm(lease.num_tokens)
            await turns(3)
            async with kv.events() as stream:
                lease.finish()
                await kv.drain()
                scrape = Scrape(kv.collector)
                assert scrape.by("outcome", "aiokv_transfer_blocks_total", direction="store") == {"ok": 3}
                assert scrape.by("reason", REJECTED) == {"unknown_tokens": 3}
                assert stream.take() == []
                assert scrape.sum(PUBLISHED) == 0
