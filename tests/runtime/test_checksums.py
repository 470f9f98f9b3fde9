"""Checksums over a whole runtime: a flipped byte is a miss, counted, never served; ranks and fakes say so too."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, final

import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv import (
    BlockRemoved,
    Checksum,
    ConfigError,
    CopyBatch,
    Direction,
    Hit,
    KVRuntime,
    LeaseState,
    Outcome,
    Tier,
    UsageError,
)
from aiokv.backends.base import EventStatus
from aiokv.backends.host import HostBackend
from aiokv.testing import FakeBackend, evict, make_resident
from tests.observe.support import Scrape
from tests.runtime.support import (
    BLOCK,
    GROUP,
    Case,
    assert_all_given_back,
    assert_nothing_held,
    config_of,
    finish_copies,
    granted,
    opened,
    prompt,
    turns,
    until,
)

FULL, SAMPLED, OFF = Checksum.FULL, Checksum.SAMPLED, Checksum.OFF
WIDTH = 4096


# Real bytes.


@final
class Memory:
    """A runtime over real bytes, every block of which names its content; its CPU slots can be written by hand."""

    def __init__(self, kv: KVRuntime, *, arena: NDArray[np.uint8], backend: HostBackend) -> None:
        self.kv = kv
        self.arena = arena
        self.backend = backend

    def content(self, seed: int, position: int) -> int:
        return 1 + (31 * seed + position) % 250

    async def serve(self, seed: int, blocks: int) -> Hit:
        """One request: what it hits must be what was computed for these tokens, the rest it computes."""
        async with self.kv.acquire(f"request {seed}", prompt(blocks, seed=seed)) as lease:
            table, ready = lease.block_table(GROUP)[:blocks], lease.prefix_tokens // BLOCK
            for position, slot in enumerate(table[:ready]):
                assert np.unique(self.arena[slot]).tolist() == [self.content(seed, position)], "served wrong bytes"
            for position in range(ready, blocks):
                self.arena[table[position]] = self.content(seed, position)
                await turns()
            lease.confirm(blocks * BLOCK)
            return lease.delivered

    async def served(self, seed: int, blocks: int) -> Hit:
        delivered = await self.serve(seed, blocks)
        await self.kv.drain()
        return delivered

    def forget_gpu(self, seed: int, positions: Sequence[int]) -> None:
        evict(self.kv, prompt(max(positions) + 1, seed=seed), {GROUP: tuple(positions)}, tier=Tier.GPU)
        self.arena[1:] = 0xEE

    def cpu_slot_of(self, seed: int, position: int) -> NDArray[np.uint8]:
        """The bytes of the CPU slot that holds this block."""
        keys = self.kv.keys(prompt(position + 1, seed=seed))
        found = self.kv.core.find_blocks(keys, group=0, tier=Tier.CPU)
        assert found.present[position]
        return self.backend.cpu_slot(int(found.slots[position]))


@asynccontextmanager
async def on_host(checksum: Checksum, **settings: Any) -> AsyncIterator[Memory]:  # noqa: ANN401  # any setting
    backend = HostBackend()
    config = config_of(backend=backend, checksum=checksum, **{"cpu_blocks": 16, "watermark": 0.0} | settings)
    arena = np.zeros((config.gpu_blocks, 2, WIDTH), np.uint8)
    async with KVRuntime(config, arenas={GROUP: [arena]}) as kv:
        yield Memory(kv, arena=arena, backend=backend)


@pytest.mark.parametrize(
    ("checksum", "wrong"), [(FULL, [0]), (FULL, [1234]), (FULL, [2 * WIDTH - 1]), (SAMPLED, range(WIDTH, 2 * WIDTH))]
)
@pytest.mark.parametrize("position", [0, 1, 3])
async def test_wrong_bytes_are_computed_again_and_never_served(
    checksum: Checksum, wrong: Sequence[int], position: int
) -> None:
    async with on_host(checksum) as memory:
        await memory.served(0, 4)
        memory.forget_gpu(0, range(4))
        memory.cpu_slot_of(0, position)[wrong] ^= 0x10
        delivered = await memory.served(0, 4)
        assert (delivered.gpu_tokens, delivered.cpu_tokens) == (0, position * BLOCK)
        scrape = Scrape(memory.kv.collector)
        assert scrape("aiokv_corrupt_blocks_total") == 1
        assert scrape("aiokv_evictions_total", tier="cpu", reason="corrupt") == 1
        assert scrape("aiokv_load_failed_tokens_total", source="cpu", reason="corrupt") == (4 - position) * BLOCK
        assert scrape.by("outcome", "aiokv_transfer_blocks_total", direction="load") == (
            {"corrupt": 4} | ({"ok": position} if position else {})
        )
        assert scrape.errors == {}
        memory.forget_gpu(0, range(4))
        again = await memory.served(0, 4)
        assert again.cpu_tokens == 4 * BLOCK, "it was stored again, with a checksum of its own"
        assert_nothing_held(memory.kv)


async def test_without_checksums_wrong_bytes_are_served() -> None:
    """Why one may want them: the default is what costs nothing."""
    async with on_host(OFF) as memory:
        await memory.served(0, 2)
        memory.forget_gpu(0, range(2))
        memory.cpu_slot_of(0, 1)[0] ^= 0x10
        with pytest.raises(AssertionError, match="served wrong bytes"):
            await memory.served(0, 2)


async def test_everybody_who_waits_for_the_corrupt_copy_gets_the_right_bytes() -> None:
    async with on_host(FULL, gpu_blocks=33) as memory:
        await memory.served(0, 4)
        memory.forget_gpu(0, range(4))
        memory.cpu_slot_of(0, 2)[0] ^= 1
        hits = await asyncio.gather(*(memory.serve(0, blocks) for blocks in (4, 3, 4, 2)))
        await memory.kv.drain()
        assert all(hit.gpu_tokens + hit.cpu_tokens >= 2 * BLOCK for hit in hits), hits
        assert memory.kv.core.counters.corrupt_blocks == 1
        assert_nothing_held(memory.kv)


async def test_a_block_that_was_only_placed_is_not_checked() -> None:
    async with on_host(FULL) as memory:
        make_resident(memory.kv, prompt(2), {GROUP: "cc"})
        memory.cpu_slot_of(0, 0)[:] = memory.content(0, 0)
        memory.cpu_slot_of(0, 1)[:] = memory.content(0, 1)
        delivered = await memory.served(0, 2)
        assert delivered.cpu_tokens == 2 * BLOCK


async def test_a_slot_that_got_another_block_after_a_reset_is_checked_as_that_block() -> None:
    async with on_host(FULL, cpu_blocks=4) as memory:
        await memory.served(0, 4)
        await memory.kv.reset()
        await memory.served(1, 4)
        memory.forget_gpu(1, range(4))
        delivered = await memory.served(1, 4)
        assert delivered.cpu_tokens == 4 * BLOCK
        assert memory.kv.core.counters.corrupt_blocks == 0


async def test_a_storm_over_memory_that_rots_serves_only_what_was_computed() -> None:
    asyncio.get_running_loop().set_debug(False)
    dice = random.Random(5)
    async with on_host(FULL, gpu_blocks=21, cpu_blocks=40) as memory:
        for _ in range(12):
            calls = [memory.serve(dice.randrange(6), dice.randrange(1, 7)) for _ in range(16)]
            tasks = [asyncio.ensure_future(call) for call in calls]
            await turns(dice.randrange(40))
            for task in tasks[::5]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, Hit | asyncio.CancelledError) for result in results), results
            await memory.kv.drain()
            for slot in dice.sample(range(40), 8):
                memory.backend.cpu_slot(slot)[dice.randrange(2 * WIDTH)] ^= 1 << dice.randrange(8)
        counters = memory.kv.core.counters
        assert counters.corrupt_blocks > 5
        assert counters.transferred_blocks[Direction.LOAD, Outcome.OK] > 5
        assert memory.kv.audit().violations == ()
        assert_nothing_held(memory.kv)


# A fake backend says so.


async def test_a_fake_finds_blocks_corrupt_and_the_lease_says_what_it_got() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(4), {GROUP: "cccc"})
        async with case.kv.events() as events:
            lease = granted(case.kv, prompt(4))
            await until(lambda: bool(case.backend.pending))
            case.backend.corrupt(copies=(2,))
            await until(lambda: bool(case.backend.pending))
            event = await anext(events)
            assert isinstance(event, BlockRemoved)
            assert (event.tier, len(event.block_hashes)) == (Tier.CPU, 1)
        assert lease.state is LeaseState.LOADING
        (again,) = case.backend.pending
        assert len(again) == 2
        case.backend.complete()
        await lease.ready()
        assert (lease.prefix_tokens, lease.delivered.compute_tokens) == (2 * BLOCK, 2 * BLOCK + 1)
        lease.release()
        await assert_all_given_back(case)


async def test_a_holder_that_was_cancelled_leaves_the_corrupt_block_unfindable() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        task = asyncio.create_task(case.kv.acquire("cancelled", prompt(3)))
        await until(lambda: bool(case.backend.pending))
        task.cancel()
        await asyncio.wait([task])
        case.backend.corrupt(copies=(1,))
        await turns(3)
        lease = granted(case.kv, prompt(3))
        assert lease.hit.cpu_tokens == BLOCK
        lease.release()
        await assert_all_given_back(case)


async def test_every_load_may_turn_out_corrupt_and_the_request_goes_on() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(4), {GROUP: "cccc"})
        task = asyncio.create_task(case.kv.acquire("request", prompt(4)))
        while not task.done():
            case.backend.corrupt(10, copies=(0,))
            await asyncio.sleep(0)
        lease = await task
        assert (lease.prefix_tokens, lease.state) == (0, LeaseState.READY)
        lease.release()
        await assert_all_given_back(case)


async def test_what_a_fake_cannot_find_corrupt_is_refused_and_nothing_ends() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        lease = granted(case.kv, prompt(2))
        await until(lambda: bool(case.backend.pending))
        for n, copies in ((1, (2,)), (1, (-1,)), (1, ()), (-1, (0,))):
            with pytest.raises(UsageError):
                case.backend.corrupt(n, copies=copies)
        assert len(case.backend.pending) == 1
        case.backend.corrupt(0)
        assert len(case.backend.pending) == 1
        await finish_copies(case)
        lease.release()
        case.backend.corrupt()
        await assert_all_given_back(case)


async def test_corrupt_passes_over_stores() -> None:
    async with opened() as case:
        async with case.kv.acquire("stored", prompt(2, seed=1)) as first:
            first.confirm(2 * BLOCK)
        await until(lambda: bool(case.backend.pending))
        make_resident(case.kv, prompt(1), {GROUP: "c"})
        lease = granted(case.kv, prompt(1))
        await until(lambda: len(case.backend.pending) == 2)
        case.backend.corrupt(5)
        assert [copy.direction for copy in case.backend.pending] == ["store"]
        await finish_copies(case)
        lease.release()
        await assert_all_given_back(case)


async def test_a_corrupt_load_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        lease = granted(case.kv, prompt(2))
        await until(lambda: bool(case.backend.pending))
        with caplog.at_level(logging.WARNING, logger="aiokv"):
            case.backend.corrupt()
            await turns(3)
        assert "the test found blocks changed" in caplog.text
        lease.release()
        await assert_all_given_back(case)


class Liar:
    """Says of a copy what its backend should not."""

    def __init__(self, copies: Sequence[int]) -> None:
        self._copies = copies

    def query(self) -> EventStatus:
        return EventStatus.CORRUPT

    def detail(self) -> str:
        return "it says so"

    def corrupt_copies(self) -> Sequence[int]:
        return self._copies


@pytest.mark.parametrize(("copies", "left"), [((), "cc"), ((7, -1), "cc"), ((7, 0), "-c")], ids=str)
async def test_a_backend_that_names_no_copy_of_the_batch_still_ends_it(
    copies: Sequence[int], left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores, too: a transfer that never ends would keep its slots for ever."""
    async with opened(manual=False, close_grace_s=1.0) as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        real = case.backend.submit

        def submit(self: FakeBackend, batch: CopyBatch) -> Liar:
            real(batch)
            return Liar(copies)

        with monkeypatch.context() as patch:
            patch.setattr(FakeBackend, "submit", submit)
            lease = await asyncio.wait_for(case.kv.acquire("request", prompt(2)), 10.0)
            assert lease.prefix_tokens == 0
            lease.confirm(2 * BLOCK)
            await asyncio.wait_for(case.kv.drain(), 10.0)
            present = case.kv.core.find_blocks(case.kv.keys(prompt(2)), group=0, tier=Tier.CPU).present
        assert "".join("-c"[is_there] for is_there in present.tolist()) == left
        lease.release()
        await assert_all_given_back(case)


# Ranks.


@asynccontextmanager
async def two_ranks() -> AsyncIterator[Case]:
    """Rank 0 is local, rank 1 remote."""
    backend = FakeBackend()
    config = config_of(
        backend=backend, cpu_blocks=16, watermark=0.0, world_size=2, remote_ranks=(1,), close_grace_s=5.0
    )
    async with KVRuntime(config) as kv:
        try:
            yield Case(kv=kv, backend=backend)
        finally:
            backend.complete_all()


async def answer(kv: KVRuntime) -> None:
    async for transfer in kv.transfers():
        kv.report(transfer.transfer_id, 1, Outcome.OK)


@pytest.mark.parametrize("is_remote_first", [True, False])
async def test_a_remote_rank_and_the_backend_find_different_blocks_corrupt(is_remote_first: bool) -> None:  # noqa: FBT001
    async with two_ranks() as case:
        make_resident(case.kv, prompt(4), {GROUP: "cccc"})
        lease = granted(case.kv, prompt(4))
        await until(lambda: bool(case.backend.pending))
        (transfer,) = case.kv.transfers().take()

        def report() -> None:
            case.kv.report(transfer.transfer_id, 1, Outcome.CORRUPT, corrupt=(3,))

        if is_remote_first:
            report()
            report()
        case.backend.corrupt(copies=(1, 3))
        await turns(3)
        if not is_remote_first:
            report()
        answering = asyncio.create_task(answer(case.kv))
        await until(lambda: bool(case.backend.pending))
        case.backend.complete_all()
        await asyncio.wait_for(lease.ready(), 10.0)
        assert lease.prefix_tokens == BLOCK
        assert case.kv.core.counters.corrupt_blocks == 2
        scrape = Scrape(case.kv.collector)
        assert scrape("aiokv_rank_reports_total", outcome="corrupt") == 2
        with pytest.raises(UsageError):
            report()
        lease.release()
        await assert_all_given_back(case)
        answering.cancel()
        await asyncio.wait([answering])


async def test_a_runtime_without_local_ranks_hears_of_corruption_from_its_ranks() -> None:
    config = config_of(backend="auto", cpu_blocks=16, watermark=0.0, world_size=2, remote_ranks=(0, 1))
    async with KVRuntime(config) as kv:
        make_resident(kv, prompt(3), {GROUP: "ccc"})
        lease = granted(kv, prompt(3))
        (transfer,) = kv.transfers().take()
        kv.report(transfer.transfer_id, 1, Outcome.CORRUPT, corrupt=[1])
        assert kv.core.counters.corrupt_blocks == 1
        await turns(3)
        assert lease.state is LeaseState.LOADING, "rank 0 is late"
        kv.report(transfer.transfer_id, 0, Outcome.OK)
        await turns(3)
        (again,) = kv.transfers().take()
        for rank in (0, 1):
            kv.report(again.transfer_id, rank, Outcome.OK)
        await asyncio.wait_for(lease.ready(), 10.0)
        assert lease.delivered.cpu_tokens == BLOCK
        lease.release()


# Configuration.


@pytest.mark.parametrize("checksum", ["full", True, None, 1])
def test_a_checksum_that_is_none_is_refused(checksum: Any) -> None:  # noqa: ANN401  # anything
    with pytest.raises(ConfigError, match="checksum"):
        config_of(checksum=checksum)


def test_a_runtime_that_owns_no_memory_cannot_check_it() -> None:
    with pytest.raises(ConfigError, match="every rank is remote"):
        config_of(backend="auto", world_size=2, remote_ranks=(0, 1), checksum=FULL)
