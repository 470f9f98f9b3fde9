"""Single flight: a block that is being copied is copied once, whoever wants it; each waits for it by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, final

import pytest

from aiokv import AcquireTimeout, DeclineReason, Lease
from aiokv.testing import evict, make_resident
from tests.cancellation.scenarios import hold
from tests.runtime.support import (
    BLOCK,
    GROUP,
    assert_all_given_back,
    finish_copies,
    granted,
    opened,
    prompt,
    state_of,
    turns,
    until,
)

CLIENTS = 50
LONG = 625
"""Blocks: a prompt of ten thousand tokens."""


@pytest.mark.parametrize("leaver", [0, 1], ids=["who began it", "who joined"])
async def test_each_waits_for_a_shared_load_by_its_own_deadline(leaver: int) -> None:
    """Who gives up changes nothing for the other: the same copy goes on, and no second one is begun (law 4)."""
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        asked = [
            asyncio.create_task(case.kv.acquire(f"{n}", prompt(3), timeout=0.0 if n == leaver else None))
            for n in range(2)
        ]
        with pytest.raises(AcquireTimeout):
            await asked[leaver]
        (transfer,) = state_of(case.kv).transfers
        assert (transfer.blocks, transfer.waiters) == (3, 1)
        case.backend.complete()
        lease = await asyncio.wait_for(asked[1 - leaver], 10.0)
        assert lease.delivered.cpu_tokens == 3 * BLOCK
        assert len(case.backend.history) == 1
        lease.release()
        await assert_all_given_back(case)


async def test_fifty_clients_of_one_long_prefix_cause_one_copy_of_each_block() -> None:
    asyncio.get_running_loop().set_debug(False)
    async with opened(gpu_blocks=LONG + CLIENTS + 1, cpu_blocks=LONG) as case:
        keys = await case.kv.prepare_keys(prompt(LONG))
        make_resident(case.kv, keys, {GROUP: "c" * LONG})
        asked = [asyncio.create_task(case.kv.acquire(f"{n}", keys)) for n in range(CLIENTS)]
        await until(lambda: len(case.kv.audit().leases) == CLIENTS)
        await until(lambda: bool(case.backend.pending))
        case.backend.complete_all()
        leases = await asyncio.wait_for(asyncio.gather(*asked), 10.0)
        assert {lease.delivered.cpu_tokens for lease in leases} == {LONG * BLOCK}
        copied = [block for copy in case.backend.history for block in copy.source_blocks]
        assert len(copied) == len(set(copied)) == LONG
        for lease in leases:
            lease.release()
        await assert_all_given_back(case)


async def test_a_gpu_copy_that_appears_while_the_block_is_loading_is_used() -> None:
    """The newcomer waits for nothing; what the load brings stays private, and is nobody's afterwards."""
    async with opened(gpu_blocks=13) as case:
        computing = granted(case.kv, prompt(3), name="computing")
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        loading = granted(case.kv, prompt(3), name="loading")
        await until(lambda: bool(case.backend.pending))
        computing.confirm(3 * BLOCK)
        newcomer = granted(case.kv, prompt(3), name="newcomer")
        assert newcomer.delivered.gpu_tokens == 3 * BLOCK
        assert newcomer.block_table(GROUP)[:3] == computing.block_table(GROUP)[:3]
        case.backend.complete()
        await asyncio.wait_for(loading.ready(), 10.0)
        assert not set(loading.block_table(GROUP)) & set(computing.block_table(GROUP))
        assert [copy.direction for copy in case.backend.history] == ["load"]
        for lease in (computing, loading, newcomer):
            lease.release()
        await assert_all_given_back(case)


async def test_a_block_that_two_have_computed_is_stored_once() -> None:
    async with opened() as case:
        leases = [granted(case.kv, prompt(3), name=f"{n}") for n in range(2)]
        for lease in leases:
            lease.confirm(3 * BLOCK)
            await turns(2)
        for lease in leases:
            lease.finish()
        await finish_copies(case)
        stored = [block for copy in case.backend.history for block in copy.source_blocks]
        assert len(stored) == len(set(stored)) == 3
        skipped = case.kv.core.counters.store_skipped_blocks
        assert not skipped[DeclineReason.REQUEST_GONE], "the duplicate was never offered"
        await assert_all_given_back(case)


async def test_a_store_that_another_joined_goes_on_when_the_first_gives_up() -> None:
    """The stream is full, so the store waits; who began it is cancelled, who came later still wants the copy."""
    asyncio.get_running_loop().set_debug(False)
    async with opened(gpu_blocks=1300, cpu_blocks=1300) as case:
        crowd = [granted(case.kv, prompt(1, seed=seed), name="crowd") for seed in range(1, 513)]
        for lease in crowd:
            lease.confirm(BLOCK)
        await until(lambda: len(case.backend.pending) == len(crowd))
        first = granted(case.kv, prompt(3), name="first")
        first.confirm(3 * BLOCK)
        await until(lambda: case.kv.core.unfinished_transfers == len(crowd) + 1)
        second = granted(case.kv, prompt(3), name="second")
        await turns(3)
        first.release()
        second.finish()
        for lease in crowd:
            lease.finish()
        await finish_copies(case)
        evict(case.kv, prompt(3), {GROUP: range(3)})
        again = granted(case.kv, prompt(3), name="again")
        assert again.hit.cpu_tokens == 3 * BLOCK
        again.release()
        await assert_all_given_back(case)


# Who is woken.


@final
class Counted:
    """Awaits something and counts how often it was resumed."""

    def __init__(self, awaited: Coroutine[Any, Any, Lease]) -> None:
        self._awaited = awaited
        self.resumed = -1
        """Not counting the first step."""

    def __await__(self) -> Generator[Any, None, Lease]:
        inner = self._awaited.__await__()
        while True:
            self.resumed += 1
            try:
                yield inner.send(None)
            except StopIteration as end:
                lease: Lease = end.value
                return lease


async def awaited(counted: Counted) -> Lease:
    return await counted


async def test_freed_capacity_wakes_exactly_who_can_use_it() -> None:
    async with opened() as case:
        holders = [hold(case, blocks=2, seed=900 + n) for n in range(4)]
        line = {
            blocks: Counted(case.kv.acquire(f"{blocks}", prompt(blocks, seed=blocks, extra=0))) for blocks in (5, 1, 2)
        }
        tasks = [asyncio.create_task(awaited(waiting)) for waiting in line.values()]
        seen = []
        for holder in holders:
            holder.release()
            await turns(8)
            seen.append([waiting.resumed for waiting in line.values()])
        assert seen == [[0, 0, 0], [0, 0, 0], [1, 1, 0], [1, 1, 1]], "5 of 8 slots, then 1, then 2"
        for task in tasks:
            (await task).release()
        await assert_all_given_back(case)
