"""Cache events as a subscriber sees them: dense runs in the order of the changes, bounded, never slowing the cache."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from aiokv import CacheGeometry, FullAttention, KVRuntime, RuntimeConfig, SlidingWindow, Tier, UsageError
from aiokv.model.events import BlockRemoved, BlockStored, CacheEvent, EventsDropped, TierCleared
from aiokv.runtime.event_stream import EventStream
from aiokv.testing import FakeBackend, evict, make_resident

_BLOCK = 16
_GEOMETRY = CacheGeometry(
    groups=(FullAttention("full", block_size=_BLOCK), SlidingWindow("swa", block_size=2 * _BLOCK, window=40)),
    hash_block_size=_BLOCK,
)


def _config() -> RuntimeConfig:
    return RuntimeConfig(geometry=_GEOMETRY, backend=FakeBackend(manual=False), gpu_blocks=40, cpu_blocks=64)


class _Replica:
    """What a consumer that started from empty believes is findable; it checks every event on the way."""

    def __init__(self) -> None:
        self.findable: dict[tuple[Tier, str], set[bytes]] = {}
        self._known: dict[str, set[bytes]] = {}

    def apply(self, event: CacheEvent) -> None:
        match event:
            case BlockStored():
                known = self._known.setdefault(event.group, set())
                assert event.parent_hash is None or event.parent_hash in known
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                known.update(event.block_hashes)
                self.findable.setdefault((event.tier, event.group), set()).update(event.block_hashes)
            case BlockRemoved():
                self.findable[event.tier, event.group] -= set(event.block_hashes)
            case TierCleared():
                for tier, group in self.findable:
                    if tier is event.tier:
                        self.findable[tier, group] = set()
            case EventsDropped():
                pytest.fail("nothing should be dropped")

    def count(self, tier: Tier) -> int:
        return sum(len(hashes) for (where, _), hashes in self.findable.items() if where is tier)


async def _collect(stream: EventStream, into: list[CacheEvent]) -> None:
    async for event in stream:
        into.append(event)  # noqa: PERF401  # the list is watched while it grows


async def test_replaying_the_events_from_empty_gives_what_the_pools_hold() -> None:
    """Invariant 11: pressure, stores, loads, evictions and a reset, replayed by a consumer."""
    replica = _Replica()
    events: list[CacheEvent] = []
    async with KVRuntime(_config()) as kv, kv.events() as stream:
        reader = asyncio.create_task(_collect(stream, events))
        for turn in range(12):
            prompt = list(range(100 * (turn % 5), 100 * (turn % 5) + 150 + turn))
            async with kv.acquire(f"r{turn}", prompt) as lease:
                lease.confirm(len(prompt))
            await kv.drain()
        await kv.reset(Tier.CPU)
        pools = kv.core.pools()
        await asyncio.sleep(0)
        assert any(isinstance(event, BlockRemoved) for event in events)
        for event in events:
            replica.apply(event)
        assert replica.count(Tier.GPU) == pools[Tier.GPU].resident
        assert replica.count(Tier.CPU) == pools[Tier.CPU].resident == 0
    await reader


async def test_a_hole_splits_a_registration_into_dense_runs_with_true_parents() -> None:
    """Law 9: one event per run of adjacent blocks, the parent is the hash before it."""
    prompt = list(range(6 * _BLOCK))
    async with KVRuntime(_config()) as kv, kv.events() as stream:
        make_resident(kv, prompt, {"full": "gg-gg-"})
        async with kv.acquire("r", prompt[:17]):
            first, second = await anext(stream), await anext(stream)
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (len(first.block_hashes), len(second.block_hashes)) == (2, 2)
    assert first.parent_hash is None
    assert second.parent_hash not in (None, *first.block_hashes, *second.block_hashes)
    assert second.token_ids == tuple(prompt[3 * _BLOCK : 5 * _BLOCK])


async def test_evictions_and_clearings_name_their_tier_and_group() -> None:
    prompt = list(range(4 * _BLOCK))
    async with KVRuntime(_config()) as kv:
        make_resident(kv, prompt, {"full": "bb", "swa": "g"})
        async with kv.events() as stream:
            evict(kv, prompt, {"full": (1,)}, tier=Tier.CPU)
            await kv.reset(Tier.GPU)
            removed, cleared = await anext(stream), await anext(stream)
    assert isinstance(removed, BlockRemoved)
    assert (removed.tier, removed.group, len(removed.block_hashes)) == (Tier.CPU, "full", 1)
    assert cleared == TierCleared(tier=Tier.GPU)


async def test_a_slow_reader_finds_a_gap_marker_where_events_are_missing() -> None:
    async with KVRuntime(_config()) as kv, kv.events(backlog=2) as stream:
        for start in range(5):
            make_resident(kv, range(1000 * start, 1000 * start + _BLOCK), {"full": "g"})
            await kv.drain()
        kinds = [type(await anext(stream)) for _ in range(3)]
        make_resident(kv, range(_BLOCK), {"swa": ""})
    assert kinds == [BlockStored, BlockStored, EventsDropped]


async def test_nothing_is_recorded_without_a_subscriber_and_a_stream_ends_with_its_runtime() -> None:
    async with KVRuntime(_config()) as kv:
        make_resident(kv, range(_BLOCK), {"full": "g"})
        assert kv.core.events.take() == []
        stream = kv.events()
        seen: list[CacheEvent] = []
        reader = asyncio.create_task(_collect(stream, seen))
        await asyncio.sleep(0)
        make_resident(kv, range(500, 500 + _BLOCK), {"full": "g"})
        await kv.drain()
    await reader
    assert [type(event) for event in seen] == [BlockStored]


async def test_a_cancelled_reader_changes_nothing() -> None:
    async with KVRuntime(_config()) as kv, kv.events() as stream:
        reader = asyncio.create_task(_collect(stream, []))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        make_resident(kv, range(_BLOCK), {"full": "g"})
        await kv.drain()
        assert isinstance(await anext(stream), BlockStored)


@pytest.mark.parametrize("made", ["before", "after"])
async def test_a_stream_of_a_closed_runtime_ends_at_once(made: str) -> None:
    """Nobody waits for events that cannot come."""
    kv = KVRuntime(_config())
    await kv.open()
    stream = kv.events()
    await kv.aclose()
    if made == "after":
        stream = kv.events()
    seen: list[CacheEvent] = []
    await asyncio.wait_for(_collect(stream, seen), 10.0)
    async with stream as entered:
        assert entered.take() == seen == []


async def test_a_second_reader_of_one_stream_is_told_that_there_is_one() -> None:
    """Only one of them could be woken: the other one would wait for ever."""
    async with KVRuntime(_config()) as kv, kv.events() as stream:
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="another task"):
            await anext(stream)
        make_resident(kv, range(_BLOCK), {"full": "g"})
        assert isinstance(await asyncio.wait_for(first, 10.0), BlockStored)


async def test_who_reads_on_in_the_turn_in_which_a_reader_is_cancelled_is_woken() -> None:
    """The one that leaves takes no wake-up from the one that has come in its place."""
    async with KVRuntime(_config()) as kv, kv.events() as stream:
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        first.cancel()
        asyncio.get_running_loop().call_soon(partial(make_resident, kv, range(_BLOCK), {"full": "g"}))
        async with asyncio.timeout(10.0):
            assert isinstance(await anext(stream), BlockStored)
        assert first.cancelled()


async def test_a_reader_that_has_left_gets_nothing_of_what_comes_later() -> None:
    """What it had not read yet it may still read; then it is told of the end."""
    async with KVRuntime(_config()) as kv:
        async with kv.events() as stream:
            make_resident(kv, range(_BLOCK), {"full": "g"})
        make_resident(kv, range(500, 500 + _BLOCK), {"full": "g"})
        assert [type(event) async for event in stream] == [BlockStored]
