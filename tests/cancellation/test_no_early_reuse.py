"""Law 4: while a copy may still run, its source and its target are handed to nobody, whatever became of the request.

The fake backend refuses a copy that touches a slot in use; what compute would write is judged by the block tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from aiokv import Deferred, Lease, Tier, UsageError
from aiokv.testing import evict, make_resident
from tests.runtime.support import (
    BLOCK,
    GROUP,
    Case,
    assert_all_given_back,
    finish_copies,
    granted,
    opened,
    prompt,
    turns,
    until,
)

Leave = Callable[[Case, "asyncio.Task[Lease]"], Awaitable[None]]


async def cancel(case: Case, task: asyncio.Task[Lease]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def cancel_twice(case: Case, task: asyncio.Task[Lease]) -> None:
    task.cancel()
    await turns(1)
    task.cancel()
    await asyncio.wait([task])


async def reset_then_cancel(case: Case, task: asyncio.Task[Lease]) -> None:
    await case.kv.reset()
    await cancel(case, task)


def take_all_there_is(case: Case, *, first_seed: int) -> list[Lease]:
    """One block each, until nothing is left."""
    leases: list[Lease] = []
    for seed in range(first_seed, first_seed + 1000):
        lease = case.kv.try_acquire(f"taker {seed}", prompt(1, seed=seed, extra=0))
        if isinstance(lease, Deferred):
            return leases
        leases.append(lease)
    raise AssertionError("the pool has no end")


def slots_of(leases: list[Lease]) -> set[int]:
    slots = [slot for lease in leases for slot in lease.block_table(GROUP)]
    assert len(slots) == len(set(slots)), "one slot for two"
    return set(slots)


@pytest.mark.parametrize("leave", [cancel, cancel_twice, reset_then_cancel])
async def test_targets_of_a_load_are_not_handed_out_before_it_ends(leave: Leave) -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        task = asyncio.create_task(case.kv.acquire("request", prompt(3)))
        await until(lambda: bool(case.backend.pending))
        await leave(case, task)
        targets = set(case.backend.pending[0].target_blocks)
        takers = take_all_there_is(case, first_seed=1)
        assert len(takers) == 8 - 3
        assert not slots_of(takers) & targets
        case.backend.complete()
        await turns(3)
        takers += take_all_there_is(case, first_seed=100)
        assert targets < slots_of(takers)
        for lease in takers:
            lease.release()
        await assert_all_given_back(case)


@pytest.mark.parametrize("leave", [cancel, cancel_twice, reset_then_cancel])
async def test_sources_of_a_load_are_not_overwritten_before_it_ends(leave: Leave) -> None:
    async with opened(gpu_blocks=33, cpu_blocks=4) as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        task = asyncio.create_task(case.kv.acquire("request", prompt(3)))
        await until(lambda: bool(case.backend.pending))
        await leave(case, task)
        sources = set(case.backend.pending[0].source_blocks)
        for seed in range(1, 6):
            lease = granted(case.kv, prompt(1, seed=seed, extra=0))
            lease.confirm(BLOCK)
            lease.finish()
        await turns(5)
        stores = [copy for copy in case.backend.history if copy.direction == "store"]
        assert stores, "the one CPU slot that is left takes a store"
        assert not {slot for copy in stores for slot in copy.target_blocks} & sources
        await assert_all_given_back(case)


@pytest.mark.parametrize("how", [Lease.release, Lease.finish])
async def test_sources_of_a_store_are_not_handed_out_before_it_ends(how: Callable[[Lease], None]) -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(3, extra=0))
        lease.confirm(3 * BLOCK)
        await until(lambda: bool(case.backend.pending))
        sources = set(case.backend.pending[0].source_blocks)
        how(lease)
        await turns(3)
        takers = take_all_there_is(case, first_seed=1)
        assert len(takers) == 8 - 3
        assert not slots_of(takers) & sources
        case.backend.complete()
        await turns(3)
        takers += take_all_there_is(case, first_seed=100)
        assert sources < slots_of(takers)
        for taker in takers:
            taker.release()
        await assert_all_given_back(case)


async def test_a_block_that_is_being_stored_cannot_be_evicted_by_name_either() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(2, extra=0))
        lease.confirm(2 * BLOCK)
        await until(lambda: bool(case.backend.pending))
        lease.release()
        with pytest.raises(UsageError, match="pinned"):
            evict(case.kv, prompt(2), {GROUP: (0,)}, tier=Tier.GPU)
        await finish_copies(case)
        evict(case.kv, prompt(2), {GROUP: (0,)}, tier=Tier.GPU)
        await assert_all_given_back(case)


async def test_slots_of_a_lost_copy_are_never_handed_out_again() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        task = asyncio.create_task(case.kv.acquire("request", prompt(3)))
        await until(lambda: bool(case.backend.pending))
        targets = set(case.backend.pending[0].target_blocks)
        case.backend.lose()
        lease = await task
        assert lease.prefix_tokens == 0, "whatever the copy did, it counts as not loaded"
        takers = [lease, *take_all_there_is(case, first_seed=1)]
        assert not slots_of(takers) & targets
        assert len(slots_of(takers)) == 8 - 3
        for taker in takers:
            taker.release()
        await case.kv.drain()
        assert case.kv.audit().violations == ()
