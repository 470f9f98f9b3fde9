"""What becomes of copies between plan and completion, on the fake and on the host backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from aiokv import BackendLost, CopyFailed, KVRuntime, LeaseState, Tier
from aiokv.backends.host import HostBackend, HostFaults, Stall
from aiokv.model.ids import Direction
from aiokv.model.plan import Outcome
from aiokv.runtime.transfers import STREAM_DEPTH
from aiokv.testing import evict, make_resident
from tests.runtime.support import (
    BLOCK,
    GROUP,
    HYBRID,
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


def store_one_block(case: Case, *, seed: int) -> None:
    lease = granted(case.kv, prompt(1, seed=seed, extra=0))
    lease.confirm(BLOCK)
    lease.finish()


# In flight.


async def test_there_is_one_copy_per_lease_group_and_direction() -> None:
    async with opened(geometry=HYBRID, gpu_blocks=20) as case:
        make_resident(case.kv, prompt(4), {GROUP: "cccc", "swa": "--cc"})
        lease = granted(case.kv, prompt(4))
        await until(lambda: len(case.backend.pending) == 2)
        assert {(copy.group, len(copy)) for copy in case.backend.pending} == {(GROUP, 4), ("swa", 2)}
        case.backend.complete(1)
        await turns(3)
        assert lease.state is LeaseState.LOADING
        case.backend.complete(1)
        await lease.ready()
        lease.release()
        await finish_copies(case)
        assert_nothing_held(case.kv)


async def test_no_more_is_in_flight_than_a_stream_takes_and_all_of_it_ends() -> None:
    asyncio.get_running_loop().set_debug(False)
    count = STREAM_DEPTH + 88
    async with opened(gpu_blocks=count + 1, cpu_blocks=count) as case:
        for seed in range(count):
            store_one_block(case, seed=seed)
        await until(lambda: case.kv.core.unfinished_transfers == count)
        assert len(case.backend.pending) == STREAM_DEPTH
        case.backend.complete(10)
        await until(lambda: len(case.backend.history) == STREAM_DEPTH + 10)
        assert len(case.backend.pending) == STREAM_DEPTH
        await finish_copies(case)
        assert len(case.backend.history) == count
        await assert_all_given_back(case)


async def test_a_queued_load_that_nobody_waits_for_any_more_is_never_submitted() -> None:
    asyncio.get_running_loop().set_debug(False)
    count = STREAM_DEPTH + 1
    async with opened(gpu_blocks=2 * count + 1, cpu_blocks=count) as case:
        for seed in range(count):
            make_resident(case.kv, prompt(1, seed=seed), {GROUP: "c"})
        leases = [granted(case.kv, prompt(1, seed=seed)) for seed in range(count)]
        await turns(3)
        assert len(case.backend.history) == STREAM_DEPTH
        leases.pop().release()
        await finish_copies(case)
        assert len(case.backend.history) == STREAM_DEPTH
        assert case.kv.core.counters.transferred_blocks[Direction.LOAD, Outcome.DROPPED] == 1
        for lease in leases:
            lease.release()
        await assert_all_given_back(case)


async def test_who_waits_for_a_copy_goes_on_before_others_are_submitted() -> None:
    asyncio.get_running_loop().set_debug(False)
    count = STREAM_DEPTH + 1
    async with opened(gpu_blocks=2 * count + 1, cpu_blocks=count) as case:
        for seed in range(count):
            make_resident(case.kv, prompt(1, seed=seed), {GROUP: "c"})
        first, *others = [granted(case.kv, prompt(1, seed=seed)) for seed in range(count)]

        async def count_submitted() -> int:
            await first.ready()
            return len(case.backend.history)

        waiting = asyncio.create_task(count_submitted())
        await turns(3)
        case.backend.complete()
        assert await waiting == STREAM_DEPTH
        await until(lambda: len(case.backend.history) == count)
        for lease in (first, *others):
            lease.release()
        await finish_copies(case)
        await assert_all_given_back(case)


# Refused, failed, lost.


async def test_a_load_that_the_backend_refuses_is_planned_again() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "gcc"})
        case.backend.fail_next_submit(CopyFailed(0, detail="the test refused it"))
        lease = await case.kv.acquire("request", prompt(3))
        assert (lease.prefix_tokens, lease.delivered.cpu_tokens) == (BLOCK, 0)
        assert case.backend.history == ()
        lease.release()
        await assert_all_given_back(case)


async def test_a_store_that_fails_is_findable_nowhere_and_may_be_tried_again() -> None:
    async with opened() as case:
        store_one_block(case, seed=0)
        await until(lambda: bool(case.backend.pending))
        case.backend.fail()
        await case.kv.drain()
        assert not case.kv.core.find_blocks(case.kv.keys(prompt(1)), group=0, tier=Tier.CPU).present.any()
        granted(case.kv, prompt(1)).finish()
        await finish_copies(case)
        assert len(case.backend.history) == 2
        assert case.kv.core.find_blocks(case.kv.keys(prompt(1)), group=0, tier=Tier.CPU).present.all()
        await assert_all_given_back(case)


async def test_a_backend_that_is_lost_at_submit_costs_the_cpu_tier_and_nothing_else() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "gcc"})
        case.backend.fail_next_submit(BackendLost("fake", detail="the test lost it"))
        lease = await case.kv.acquire("request", prompt(3))
        assert lease.prefix_tokens == BLOCK
        lease.confirm(3 * BLOCK)
        lease.finish()
        await case.kv.drain()
        assert case.backend.history == ()
        again = await case.kv.acquire("request", prompt(3))
        assert again.delivered.gpu_tokens == 3 * BLOCK
        again.release()
        await assert_all_given_back(case)


async def test_copies_in_flight_when_the_backend_is_lost_are_quarantined_and_serving_goes_on() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        waiting = asyncio.create_task(case.kv.acquire("waiting", prompt(3)))
        await until(lambda: bool(case.backend.pending))
        case.backend.lose()
        lease = await asyncio.wait_for(waiting, 10.0)
        assert lease.delivered.compute_tokens == 3 * BLOCK + 1
        snapshot = case.kv.snapshot()
        assert snapshot.cpu is not None
        assert (snapshot.gpu.quarantined, snapshot.cpu.quarantined) == (3, 3)
        lease.confirm(3 * BLOCK)
        lease.finish()
        await case.kv.drain()
        async with case.kv.acquire("gpu hit", prompt(3)) as again:
            assert again.delivered.gpu_tokens == 3 * BLOCK
        assert case.kv.audit().violations == ()


async def test_what_can_never_fit_since_slots_were_lost_is_told_so() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        granted(case.kv, prompt(3)).release()
        case.backend.lose()
        await case.kv.drain()
        with pytest.raises(Exception, match="the pool has 5"):
            await case.kv.acquire("six", prompt(6, seed=1, extra=0))
        (await case.kv.acquire("five", prompt(5, seed=1, extra=0))).release()


async def test_completions_wait_while_the_runtime_is_quiet() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        async with case.kv.quiesce():
            case.backend.complete()
            await turns(5)
            assert lease.state is LeaseState.LOADING
        await asyncio.wait_for(lease.ready(), 10.0)
        lease.release()
        await assert_all_given_back(case)


# The host backend, polled.


@asynccontextmanager
async def on_host(faults: HostFaults | None = None) -> AsyncIterator[tuple[KVRuntime, np.ndarray]]:
    arena = np.zeros((9, 2, 64), np.uint8)
    config = config_of(backend=HostBackend(faults=faults), cpu_blocks=8, watermark=0.0)
    async with KVRuntime(config, arenas={GROUP: [arena]}) as kv:
        yield kv, arena


async def compute(kv: KVRuntime, arena: np.ndarray, *, blocks: int, seed: int) -> None:
    """Write recognisable bytes, confirm and finish."""
    async with kv.acquire(f"compute {seed}", prompt(blocks, seed=seed)) as lease:
        for position, slot in enumerate(lease.block_table(GROUP)[:blocks]):
            arena[slot] = 10 * seed + position + 1
        lease.confirm(blocks * BLOCK)
    await kv.drain()


async def test_blocks_come_back_from_the_cpu_tier_byte_for_byte() -> None:
    async with on_host() as (kv, arena):
        await compute(kv, arena, blocks=3, seed=0)
        evict(kv, prompt(3), {GROUP: range(3)}, tier=Tier.GPU)
        arena[1:] = 0xEE
        async with kv.acquire("again", prompt(3)) as lease:
            assert lease.delivered.cpu_tokens == 3 * BLOCK
            found = [np.unique(arena[slot]).tolist() for slot in lease.block_table(GROUP)[:3]]
        assert found == [[1], [2], [3]]
        assert not arena[0].any(), "the null block stays zero"


async def test_a_request_cancelled_under_a_host_copy_leaves_valid_blocks() -> None:
    """Law 3 on real bytes: the copy that nobody waits for ends, and what it brought is found."""
    stall = Stall()
    async with on_host(HostFaults(stall={1: stall})) as (kv, arena):
        await compute(kv, arena, blocks=3, seed=0)
        evict(kv, prompt(3), {GROUP: range(3)}, tier=Tier.GPU)
        arena[1:] = 0xEE
        task = asyncio.create_task(kv.acquire("cancelled", prompt(3)))
        await until(stall.reached.is_set)
        task.cancel()
        await asyncio.wait([task])
        assert kv.audit().pins, "the copy holds its blocks"
        stall.release.set()
        await kv.drain()
        async with kv.acquire("again", prompt(3)) as lease:
            assert lease.delivered.gpu_tokens == 3 * BLOCK
            assert [arena[slot, 0, 0] for slot in lease.block_table(GROUP)[:3]] == [1, 2, 3]


async def test_a_copy_thread_that_dies_costs_the_cpu_tier_and_nothing_else() -> None:
    async with on_host(HostFaults(kill=frozenset({1}))) as (kv, arena):
        await compute(kv, arena, blocks=3, seed=0)
        evict(kv, prompt(3), {GROUP: (1, 2)}, tier=Tier.GPU)
        lease = await asyncio.wait_for(kv.acquire("request", prompt(3)), 10.0)
        assert lease.delivered.gpu_tokens == BLOCK
        lease.confirm(3 * BLOCK)
        lease.finish()
        await kv.drain()
        assert kv.audit().violations == ()
        assert kv.snapshot().gpu.quarantined == 2


async def test_eight_conversations_over_a_pool_for_two_read_what_they_wrote() -> None:
    """Every block's bytes name its content; a wrong slot, an early reuse or a torn copy would show."""

    def content(seed: int, position: int) -> int:
        return 1 + (seed * 31 + position) % 250

    async def talk(seed: int) -> None:
        for turn in range(1, 4):
            async with kv.acquire(f"talk {seed}", prompt(turn, seed=seed)) as lease:
                table = lease.block_table(GROUP)
                ready = lease.prefix_tokens // BLOCK
                assert [int(arena[slot].min()) for slot in table[:ready]] == [content(seed, p) for p in range(ready)]
                assert [int(arena[slot].max()) for slot in table[:ready]] == [content(seed, p) for p in range(ready)]
                for position in range(ready, turn):
                    arena[table[position]] = content(seed, position)
                await turns(3)
                lease.confirm(turn * BLOCK)

    async with on_host() as (kv, arena):
        await asyncio.gather(*(talk(seed) for seed in range(8)))
        await kv.drain()
        assert_nothing_held(kv)
