"""Two things in one turn of the loop: whatever their order, nothing is lost and nobody is forgotten."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import anyio
import pytest

from aiokv import AcquireTimeout, BlockKeys, Lease, LeaseReleased, LeaseState
from aiokv.core.counters import Closing, Source
from aiokv.testing import make_resident
from tests.cancellation.scenarios import hold
from tests.runtime.support import (
    BLOCK,
    GROUP,
    Case,
    assert_all_given_back,
    granted,
    opened,
    prompt,
    turns,
    until,
)


def ask(case: Case, name: str, *, blocks: int, seed: int, timeout: float | None = None) -> asyncio.Task[Lease]:
    token_ids = prompt(blocks, seed=seed, extra=0)
    return asyncio.create_task(case.kv.acquire(name, token_ids, timeout=timeout), name=name)


async def ended(task: asyncio.Task[Lease]) -> None:
    await asyncio.wait([task])
    assert task.cancelled()


@pytest.mark.parametrize("turns_before", range(4))
async def test_a_grant_to_one_who_is_cancelled_goes_to_the_next_in_line(turns_before: int) -> None:
    """Law 4: the capacity was handed over, its owner has not run since."""
    async with opened() as case:
        other = hold(case, blocks=8)
        first, second = ask(case, "first", blocks=8, seed=1), ask(case, "second", blocks=8, seed=2)
        await turns(2)
        other.release()
        await turns(turns_before)
        was_served = first.done()
        if was_served:
            first.result().release()
        else:
            first.cancel()
        lease = await asyncio.wait_for(second, 10.0)
        assert lease.request_id == "second"
        lease.release()
        await assert_all_given_back(case)


async def test_a_chain_of_cancelled_grants_reaches_the_last_in_line() -> None:
    async with opened() as case:
        other = hold(case, blocks=8)
        line = [ask(case, f"{n}", blocks=8, seed=n) for n in range(20)]
        last = ask(case, "last", blocks=8, seed=100)
        await turns(2)
        other.release()
        for waiting in line:
            await until(lambda: len(case.kv.audit().leases) == 1)
            waiting.cancel()
            await turns(1)
        lease = await asyncio.wait_for(last, 10.0)
        lease.release()
        assert all(waiting.cancelled() for waiting in line)
        await assert_all_given_back(case)


async def test_a_cancelled_head_of_the_line_lets_the_next_one_in() -> None:
    """The next one fits at once; nothing is freed that would wake it otherwise."""
    async with opened() as case:
        other = hold(case, blocks=4)
        large, small = ask(case, "large", blocks=8, seed=1), ask(case, "small", blocks=4, seed=2)
        await turns(3)
        assert not small.done()
        large.cancel()
        (await asyncio.wait_for(small, 10.0)).release()
        other.release()
        await assert_all_given_back(case)


async def test_a_head_of_the_line_that_times_out_lets_the_next_one_in() -> None:
    async with opened() as case:
        other = hold(case, blocks=4)
        large, small = ask(case, "large", blocks=8, seed=1, timeout=0.0), ask(case, "small", blocks=4, seed=2)
        with pytest.raises(AcquireTimeout):
            await large
        (await asyncio.wait_for(small, 10.0)).release()
        other.release()
        await assert_all_given_back(case)


async def test_a_timeout_in_line_leaves_nothing_behind() -> None:
    async with opened() as case:
        other = hold(case, blocks=8)
        before = case.kv.snapshot()
        with pytest.raises(AcquireTimeout) as caught:
            await case.kv.acquire("late", prompt(1), timeout=0.001)
        assert (caught.value.request_id, caught.value.timeout) == ("late", 0.001)
        assert isinstance(caught.value, TimeoutError)
        assert case.kv.snapshot() == before
        other.release()
        await assert_all_given_back(case)


async def test_a_timeout_while_loading_gives_the_lease_back_and_keeps_what_is_loaded() -> None:
    """Laws 3 and 4: the copy goes on, holds its own pins, and what it brought is valid."""
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        with pytest.raises(AcquireTimeout):
            await case.kv.acquire("late", prompt(3), timeout=0.001)
        audit = case.kv.audit()
        assert audit.leases == ()
        assert {holding.holder.split()[0] for holding in audit.pins} == {"load"}
        case.backend.complete_all()
        await case.kv.drain()
        lease = granted(case.kv, prompt(3))
        assert lease.hit.gpu_tokens == 3 * BLOCK
        lease.release()
        await assert_all_given_back(case)


async def test_one_timeout_covers_the_line_and_the_load() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        other = hold(case, blocks=8)
        waiting = asyncio.create_task(case.kv.acquire("late", prompt(3), timeout=0.05))
        await turns(2)
        other.release()
        await until(lambda: len(case.backend.pending) == 1)
        with pytest.raises(AcquireTimeout):
            await waiting
        await assert_all_given_back(case)


# Loads that several wait for.


def shared_load(case: Case) -> tuple[asyncio.Task[Lease], asyncio.Task[Lease]]:
    make_resident(case.kv, prompt(3), {GROUP: "ccc"})
    return ask_same(case, "owner"), ask_same(case, "joiner")


def ask_same(case: Case, name: str) -> asyncio.Task[Lease]:
    return asyncio.create_task(case.kv.acquire(name, prompt(3)))


async def test_two_who_want_the_same_blocks_share_one_copy() -> None:
    async with opened() as case:
        owner, joiner = shared_load(case)
        await until(lambda: bool(case.backend.pending))
        await turns(3)
        assert len(case.backend.history) == 1
        case.backend.complete()
        leases = [await owner, await joiner]
        assert leases[0].block_table(GROUP)[:3] == leases[1].block_table(GROUP)[:3]
        assert [lease.delivered.cpu_tokens for lease in leases] == [3 * BLOCK] * 2
        for lease in leases:
            lease.release()
        await assert_all_given_back(case)


@pytest.mark.parametrize("leaver", [0, 1], ids=["owner leaves", "joiner leaves"])
async def test_who_stays_gets_the_blocks_of_a_shared_load(leaver: int) -> None:
    async with opened() as case:
        tasks = shared_load(case)
        await until(lambda: bool(case.backend.pending))
        await turns(3)
        tasks[leaver].cancel()
        await ended(tasks[leaver])
        case.backend.complete()
        lease = await asyncio.wait_for(tasks[1 - leaver], 10.0)
        assert lease.prefix_tokens == 3 * BLOCK
        assert len(case.backend.history) == 1
        lease.release()
        await assert_all_given_back(case)


async def test_a_shared_load_that_both_leave_still_becomes_free_cache() -> None:
    async with opened() as case:
        tasks = shared_load(case)
        await until(lambda: bool(case.backend.pending))
        await turns(3)
        for task in tasks:
            task.cancel()
        for task in tasks:
            await ended(task)
        case.backend.complete()
        await case.kv.drain()
        lease = granted(case.kv, prompt(3))
        assert lease.hit.gpu_tokens == 3 * BLOCK
        lease.release()
        await assert_all_given_back(case)


@pytest.mark.parametrize("leaver", [0, 1], ids=["owner leaves", "joiner leaves"])
async def test_who_stays_is_planned_again_when_a_shared_load_fails(leaver: int) -> None:
    async with opened() as case:
        tasks = shared_load(case)
        await until(lambda: bool(case.backend.pending))
        await turns(3)
        tasks[leaver].cancel()
        await ended(tasks[leaver])
        case.backend.fail()
        lease = await asyncio.wait_for(tasks[1 - leaver], 10.0)
        assert (lease.prefix_tokens, lease.delivered.compute_tokens) == (0, 3 * BLOCK + 1)
        lease.release()
        await assert_all_given_back(case)


@pytest.mark.parametrize("turns_before", range(4))
async def test_cancelled_after_its_load_has_failed(turns_before: int) -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        task = ask_same(case, "request")
        await until(lambda: bool(case.backend.pending))
        case.backend.fail()
        await turns(turns_before)
        if not task.done():
            task.cancel()
            await ended(task)
        else:
            task.result().release()
        await assert_all_given_back(case)


# Leases that others look at.


@pytest.mark.parametrize("give_back", [Lease.release, Lease.finish])
async def test_a_lease_given_back_wakes_every_task_that_waits_for_it(give_back: Callable[[Lease], None]) -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        waiting = [asyncio.create_task(lease.ready()) for _ in range(3)]
        await turns(2)
        waiting[0].cancel()
        give_back(lease)
        for task in waiting[1:]:
            with pytest.raises(LeaseReleased):
                await asyncio.wait_for(task, 10.0)
        assert waiting[0].cancelled()
        await assert_all_given_back(case)


async def test_cancelling_one_who_waits_for_ready_leaves_the_others_waiting() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        leaver, stayer = asyncio.create_task(lease.ready()), asyncio.create_task(lease.ready())
        await turns(2)
        leaver.cancel()
        await turns(2)
        assert lease.state is LeaseState.LOADING
        case.backend.complete()
        await asyncio.wait_for(stayer, 10.0)
        lease.release()
        await assert_all_given_back(case)


@pytest.mark.parametrize("turns_before", range(4))
async def test_room_granted_to_one_who_is_cancelled_goes_to_the_next_in_line(turns_before: int) -> None:
    """Law 4 for `extend`: the lease has the room it had, and whoever is next gets the capacity."""
    async with opened() as case:
        other = hold(case, blocks=5)
        mine, yours = hold(case, blocks=2, seed=1), hold(case, blocks=1, seed=2)
        first = asyncio.create_task(mine.extend(5 * BLOCK))
        second = asyncio.create_task(yours.extend(5 * BLOCK))
        await turns(2)
        other.release()
        await turns(turns_before)
        if not first.done():
            first.cancel()
            await asyncio.wait([first])
            assert first.cancelled()
            assert mine.capacity_tokens == 2 * BLOCK
            assert len([slot for slot in mine.block_table(GROUP) if slot]) == 2
        mine.release()
        assert await asyncio.wait_for(second, 10.0) == 6 * BLOCK
        yours.release()
        await assert_all_given_back(case)


async def test_an_extension_of_a_lease_that_is_released_meanwhile_ends() -> None:
    async with opened() as case:
        other, mine, yours = hold(case, blocks=4), hold(case, blocks=2, seed=1), hold(case, blocks=2, seed=2)
        first = asyncio.create_task(mine.extend(4 * BLOCK))
        second = asyncio.create_task(yours.extend(4 * BLOCK))
        await turns(2)
        yours.release()
        with pytest.raises(LeaseReleased):
            await asyncio.wait_for(second, 10.0)
        mine.release()
        with pytest.raises(LeaseReleased):
            await asyncio.wait_for(first, 10.0)
        other.release()
        await assert_all_given_back(case)


# What is counted.


async def test_every_admitted_request_is_attributed_and_closed_once_however_it_ends() -> None:
    """Law 7 and invariant 13."""
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        cancelled = ask_same(case, "cancelled")
        await until(lambda: bool(case.backend.pending))
        cancelled.cancel()
        await ended(cancelled)
        with anyio.CancelScope() as scope:
            async with case.kv.acquire("body", prompt(2, seed=1)):
                scope.cancel()
                await turns(1)
        async with case.kv.acquire("finished", prompt(2, seed=2)):
            pass
        case.backend.complete_all()
        await case.kv.drain()
        counters = case.kv.core.counters
        assert counters.leases_opened == 3
        assert counters.leases_closed[Closing.CANCELLED] == 2
        assert counters.leases_closed[Closing.FINISHED] == 1
        by_source = {source: sum(n for (s, _), n in counters.prompt_tokens.items() if s is source) for source in Source}
        assert by_source == {Source.GPU: 0, Source.CPU: 3 * BLOCK, Source.COMPUTE: 1 + 2 * (2 * BLOCK + 1)}


async def test_who_gave_up_behind_a_blocked_head_is_not_kept() -> None:
    """A service under pressure: thousands time out while one large request waits."""
    asyncio.get_running_loop().set_debug(False)
    async with opened() as case:
        other = hold(case, blocks=4)
        head = ask(case, "head", blocks=8, seed=1)
        await turns(2)
        for round_ in range(10):
            tasks = [ask(case, "behind", blocks=1, seed=2 + n, timeout=0.0 if n % 2 else None) for n in range(50)]
            await turns(3)
            for task in tasks[round_ % 3 :: 3]:
                task.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            del tasks, task
        gc.collect()
        assert sum(type(kept) is BlockKeys for kept in gc.get_objects()) < 100
        other.release()
        (await head).release()
        await assert_all_given_back(case)


async def test_who_gave_up_waiting_for_a_load_is_not_kept() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        for _ in range(500):
            with pytest.raises(AcquireTimeout):
                await lease.ready(timeout=0.0)
        patient = [asyncio.create_task(lease.ready(timeout=3600.0)) for _ in range(500)]
        await turns(2)
        for task in patient:
            task.cancel()
        await asyncio.wait(patient)
        del patient, task
        gc.collect()
        assert sum(issubclass(type(kept), asyncio.Future) and kept.done() for kept in gc.get_objects()) < 100
        lease.release()
        await assert_all_given_back(case)
