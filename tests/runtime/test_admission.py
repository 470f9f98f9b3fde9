"""Who is let in, when, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from aiokv import AcquireTimeout, CapacityError, DeferReason, Deferred, Lease, Tier
from aiokv.testing import make_resident
from tests.runtime.support import (
    BLOCK,
    GROUP,
    HYBRID,
    Case,
    assert_all_given_back,
    granted,
    opened,
    prompt,
    state_of,
    turns,
    until,
)


class Line:
    """Requests in the order in which they were let in; each holds its lease until it is told to leave."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.served: list[str] = []
        self._leases: dict[str, Lease] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self, name: str, *, blocks: int, priority: int = 0) -> None:
        token_ids = prompt(blocks, seed=len(self._tasks) + 1, extra=0)
        self._tasks.append(asyncio.create_task(self._ask(name, token_ids, priority)))
        await turns(2)

    async def _ask(self, name: str, token_ids: list[int], priority: int) -> None:  # of a test
        self._leases[name] = await self._case.kv.acquire(name, token_ids, priority=priority)
        self.served.append(name)

    async def leave(self, name: str) -> None:
        self._leases.pop(name).release()
        await turns(6)

    async def leave_all(self) -> None:
        while self._leases:
            await self.leave(next(iter(self._leases)))
        await asyncio.gather(*self._tasks)


# Order.


async def test_first_come_first_served_within_a_priority() -> None:
    async with opened() as case:
        line = Line(case)
        for name in "abcde":
            await line.join(name, blocks=8)
        await line.leave_all()
        assert line.served == list("abcde")
        await assert_all_given_back(case)


async def test_a_small_request_does_not_overtake_a_large_one() -> None:
    async with opened() as case:
        line = Line(case)
        await line.join("holds half", blocks=4)
        await line.join("needs all", blocks=8)
        await line.join("would fit", blocks=1)
        assert line.served == ["holds half"]
        await line.leave_all()
        assert line.served == ["holds half", "needs all", "would fit"]


async def test_a_poller_does_not_overtake_either_and_its_answer_changes_nothing() -> None:
    """Invariant 5."""
    async with opened() as case:
        line = Line(case)
        await line.join("holds half", blocks=4)
        await line.join("needs all", blocks=8)
        before = state_of(case.kv)
        assert case.kv.try_acquire("poller", prompt(1, seed=50)) == Deferred(DeferReason.QUEUED)
        assert state_of(case.kv) == before
        await line.leave_all()
        granted(case.kv, prompt(1, seed=50)).release()


async def test_lower_priority_numbers_go_first_even_if_they_come_later() -> None:
    async with opened() as case:
        line = Line(case)
        await line.join("holder", blocks=8)
        for name, priority in (("normal", 0), ("background", 5), ("urgent", -1), ("normal too", 0), ("urgent too", -1)):
            await line.join(name, blocks=8, priority=priority)
        await line.leave_all()
        assert line.served == ["holder", "urgent", "urgent too", "normal", "normal too", "background"]


async def test_an_urgent_request_that_fits_is_let_in_before_a_waiting_one() -> None:
    async with opened() as case:
        line = Line(case)
        await line.join("holder", blocks=4)
        await line.join("large", blocks=8)
        await line.join("urgent", blocks=2, priority=-1)
        await line.join("equal", blocks=1, priority=0)
        assert line.served == ["holder", "urgent"]
        await line.leave_all()


async def test_a_large_request_is_not_starved_by_a_stream_of_small_ones() -> None:
    async with opened() as case:
        line = Line(case)
        for n in range(4):
            await line.join(f"small {n}", blocks=2)
        await line.join("large", blocks=8)
        for n in range(4, 12):
            await line.join(f"small {n}", blocks=2)
        for n in range(4):
            assert "large" not in line.served
            await line.leave(f"small {n}")
        assert line.served[4] == "large"
        await line.leave_all()


async def test_a_running_request_gets_more_room_before_anybody_is_let_in() -> None:
    async with opened() as case:
        runs, other = granted(case.kv, prompt(4, extra=0)), granted(case.kv, prompt(4, seed=1, extra=0))
        order: list[str] = []

        async def note(name: str, awaited: Coroutine[object, object, Lease | int]) -> None:
            result = await awaited
            order.append(name)
            if isinstance(result, Lease):
                result.release()

        admission = asyncio.create_task(note("admission", case.kv.acquire("new", prompt(2, seed=2), priority=-9)))
        await turns(2)
        extension = asyncio.create_task(note("extension", runs.extend(4 * BLOCK)))
        await turns(2)
        other.release()
        await extension
        assert order == ["extension"]
        assert runs.capacity_tokens == 8 * BLOCK
        runs.release()
        await admission
        await assert_all_given_back(case)


async def test_an_extension_that_would_fit_does_not_overtake_one_that_waits() -> None:
    """Invariant 5: neither by `try_extend`, which changes nothing, nor by `extend`."""
    async with opened() as case:
        large, small, other = (granted(case.kv, prompt(2, seed=seed, extra=0)) for seed in range(3))
        order: list[str] = []

        async def note(name: str, lease: Lease, *, blocks: int) -> None:
            await lease.extend(blocks * BLOCK)
            order.append(name)

        waiting = [asyncio.create_task(note("large", large, blocks=4))]
        await turns(2)
        before = state_of(case.kv)
        assert small.try_extend(BLOCK) == Deferred(DeferReason.QUEUED)
        assert state_of(case.kv) == before
        waiting.append(asyncio.create_task(note("small", small, blocks=1)))
        await turns(3)
        assert order == []
        other.release()
        await turns(6)
        assert order == ["large"]
        large.release()
        await asyncio.wait_for(asyncio.gather(*waiting), 10.0)
        small.release()
        await assert_all_given_back(case)


async def test_nobody_is_let_in_before_a_lease_that_waits_after_a_failed_load() -> None:
    async with opened() as case:
        token_ids = prompt(3, extra=0)
        make_resident(case.kv, token_ids, {GROUP: "cc-"})
        filler = granted(case.kv, prompt(4, seed=1, extra=0))
        first, joined = granted(case.kv, token_ids), granted(case.kv, token_ids)
        case.backend.fail()
        await turns(3)
        waits = [lease for lease in (first, joined) if lease.state.value != "ready"]
        assert len(waits) == 1
        newcomer = asyncio.create_task(case.kv.acquire("new", prompt(1, seed=2, extra=0)))
        await turns(3)
        assert not newcomer.done()
        filler.release()
        await asyncio.wait_for(waits[0].ready(), 10.0)
        first.release()
        joined.release()
        (await newcomer).release()
        await assert_all_given_back(case)


# When.


async def test_freed_capacity_wakes_the_next_in_line_one_turn_later() -> None:
    """The grant is made in the turn after the release; its owner runs in the one after that."""
    async with opened() as case:
        holder = granted(case.kv, prompt(8, extra=0))
        waiting = asyncio.create_task(case.kv.acquire("waiting", prompt(8, seed=1, extra=0)))
        await turns(2)
        holder.release()
        assert case.kv.audit().leases == (), "nothing is granted inside somebody else's call"
        await turns(1)
        assert [lease.request_id for lease in case.kv.audit().leases] == ["waiting"]
        await turns(1)
        assert waiting.done()
        (await waiting).release()


async def test_all_who_fit_are_let_in_after_one_release() -> None:
    async with opened() as case:
        line = Line(case)
        await line.join("holder", blocks=8)
        for n in range(8):
            await line.join(f"{n}", blocks=1)
        await line.leave("holder")
        await until(lambda: len(line.served) == 9)
        await line.leave_all()


@pytest.mark.parametrize("give_back", [Lease.release, Lease.finish])
async def test_capacity_generation_changes_when_capacity_was_given_back(give_back: Callable[[Lease], None]) -> None:
    async with opened() as case:
        holder = granted(case.kv, prompt(8, extra=0))
        seen = case.kv.capacity_generation
        assert case.kv.try_acquire("poller", prompt(1, seed=1)) == Deferred(DeferReason.CAPACITY)
        assert case.kv.capacity_generation == seen
        give_back(holder)
        await turns(2)
        assert case.kv.capacity_generation != seen
        granted(case.kv, prompt(1, seed=1)).release()


async def test_a_prompt_that_another_one_has_computed_meanwhile_is_let_in_at_once() -> None:
    """It shares those blocks. Otherwise it waits for the end of whoever computed them, who may wait for it."""
    async with opened() as case:
        computing = granted(case.kv, prompt(6, extra=0))
        waiting = asyncio.create_task(case.kv.acquire("waiting", prompt(6)))
        await turns(4)
        assert not waiting.done()
        seen = case.kv.capacity_generation
        computing.confirm(6 * BLOCK)
        assert case.kv.capacity_generation != seen
        await until(waiting.done)
        sharing = await waiting
        assert (sharing.hit.gpu_tokens, sharing.block_table(GROUP)[:6]) == (6 * BLOCK, computing.block_table(GROUP))
        sharing.release()
        computing.release()
        await assert_all_given_back(case)


async def test_tokens_that_are_confirmed_without_a_block_of_their_own_wake_nobody() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(2, extra=0))
        twin = granted(case.kv, prompt(2, extra=0))
        lease.confirm(BLOCK)
        seen = case.kv.capacity_generation
        lease.confirm(BLOCK + 1)
        twin.confirm(BLOCK)
        assert case.kv.capacity_generation == seen, "half a block, and one that was there already"
        lease.release()
        twin.release()


async def test_capacity_that_comes_back_with_a_copy_lets_the_next_one_in() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(4), {GROUP: "cccc"})
        granted(case.kv, prompt(4)).release()
        await until(lambda: bool(case.backend.pending))
        waiting = asyncio.create_task(case.kv.acquire("waiting", prompt(8, seed=1, extra=0)))
        await turns(4)
        assert not waiting.done()
        case.backend.complete()
        (await asyncio.wait_for(waiting, 10.0)).release()
        await assert_all_given_back(case)


# Not now.


async def test_deferred_for_capacity_changes_nothing() -> None:
    """Law 2 and invariant 5, for a request that would hit, load and compute."""
    async with opened() as case:
        make_resident(case.kv, prompt(4), {GROUP: "gcgc"})
        holder = granted(case.kv, prompt(4, seed=1, extra=0))
        before = state_of(case.kv)
        assert case.kv.try_acquire("poller", prompt(4), reserve_tokens=BLOCK) == Deferred(DeferReason.CAPACITY)
        assert state_of(case.kv) == before
        holder.release()


async def test_a_deferred_extension_changes_nothing() -> None:
    async with opened() as case:
        mine, other = granted(case.kv, prompt(4, extra=0)), granted(case.kv, prompt(4, seed=1, extra=0))
        before = state_of(case.kv)
        assert mine.try_extend(1) == Deferred(DeferReason.CAPACITY)
        assert state_of(case.kv) == before
        assert mine.capacity_tokens == 4 * BLOCK
        other.release()
        assert mine.try_extend(1) == 4 * BLOCK + 1
        mine.release()


async def test_the_watermark_binds_while_another_lease_is_held() -> None:
    async with opened(gpu_blocks=11, watermark=0.2) as case:
        holder = granted(case.kv, prompt(2, extra=0))
        before = state_of(case.kv)
        assert case.kv.try_acquire("poller", prompt(7, seed=1, extra=0)) == Deferred(DeferReason.WATERMARK)
        assert state_of(case.kv) == before
        inside = granted(case.kv, prompt(6, seed=1, extra=0))
        inside.release()
        holder.release()
        granted(case.kv, prompt(10, seed=2, extra=0)).release()


async def test_the_watermark_does_not_bind_extensions() -> None:
    async with opened(gpu_blocks=11, watermark=0.2) as case:
        mine, other = granted(case.kv, prompt(4, extra=0)), granted(case.kv, prompt(4, seed=1, extra=0))
        assert mine.try_extend(2 * BLOCK) == 6 * BLOCK
        mine.release()
        other.release()


# Never.


async def test_what_can_never_fit_is_refused_at_once_and_changes_nothing() -> None:
    async with opened() as case:
        before = state_of(case.kv)
        with pytest.raises(CapacityError) as caught:
            await case.kv.acquire("giant", prompt(8, extra=1))
        assert (caught.value.request_id, caught.value.needed, caught.value.capacity) == ("giant", 9, 8)
        with pytest.raises(CapacityError):
            case.kv.try_acquire("giant", prompt(8, extra=0), reserve_tokens=1)
        assert state_of(case.kv) == before


async def test_what_can_never_fit_does_not_wait_in_line_to_hear_it() -> None:
    async with opened() as case:
        line = Line(case)
        await line.join("holder", blocks=8)
        await line.join("waiting", blocks=8)
        with pytest.raises(CapacityError):
            case.kv.try_acquire("giant", prompt(9, seed=50))
        with pytest.raises(CapacityError):
            await asyncio.wait_for(case.kv.acquire("giant", prompt(9, seed=50)), 10.0)
        await line.leave_all()


async def test_every_group_counts_for_what_can_never_fit() -> None:
    async with opened(geometry=HYBRID) as case:
        granted(case.kv, prompt(4, extra=0)).release()
        with pytest.raises(CapacityError):
            case.kv.try_acquire("both groups", prompt(5, extra=0))


async def test_an_extension_that_can_never_fit_is_refused_at_once_even_in_line() -> None:
    async with opened() as case:
        mine, other = granted(case.kv, prompt(4, extra=0)), granted(case.kv, prompt(4, seed=1, extra=0))
        waits = asyncio.create_task(other.extend(BLOCK))
        await turns(2)
        before = state_of(case.kv)
        with pytest.raises(CapacityError):
            mine.try_extend(4 * BLOCK + 1)
        with pytest.raises(CapacityError):
            await asyncio.wait_for(mine.extend(4 * BLOCK + 1), 10.0)
        assert state_of(case.kv) == before
        mine.release()
        await waits
        other.release()


# Leaving the line.


async def test_a_request_in_the_middle_of_the_line_may_leave() -> None:
    async with opened() as case:
        holder = granted(case.kv, prompt(8, extra=0))
        first, middle, last = (
            asyncio.create_task(case.kv.acquire(f"{n}", prompt(8, seed=n, extra=0))) for n in (1, 2, 3)
        )
        await turns(3)
        middle.cancel()
        holder.release()
        (await first).release()
        (await last).release()
        assert middle.cancelled()
        await assert_all_given_back(case)


async def test_one_behind_the_head_times_out_by_its_own_deadline() -> None:
    async with opened() as case:
        holder = granted(case.kv, prompt(8, extra=0))
        head = asyncio.create_task(case.kv.acquire("head", prompt(8, seed=1, extra=0)))
        await turns(2)
        with pytest.raises(AcquireTimeout):
            await case.kv.acquire("behind", prompt(1, seed=2), timeout=0.001)
        assert not head.done()
        holder.release()
        (await head).release()


async def test_a_timeout_beyond_all_clocks_is_none() -> None:
    async with opened() as case:
        holder = await case.kv.acquire("there", prompt(8, extra=0), timeout=10**400)
        waiting = asyncio.create_task(case.kv.admit("waits", prompt(1, seed=1), timeout=10**400))
        await turns(3)
        assert not waiting.done()
        holder.release()
        (await waiting).release()
        await assert_all_given_back(case)


async def test_a_timeout_of_zero_takes_what_is_there_and_waits_for_nothing() -> None:
    async with opened() as case:
        holder = await case.kv.acquire("there", prompt(8, extra=0), timeout=0)
        with pytest.raises(AcquireTimeout):
            await case.kv.acquire("not there", prompt(1, seed=1), timeout=0)
        holder.release()


async def test_a_reset_while_the_runtime_is_quiet_answers_nothing_at_once_and_sweeps_afterwards() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(6), {GROUP: "gggggg"})
        async with case.kv.quiesce():
            await asyncio.wait_for(case.kv.reset(), 10.0)
            assert not case.kv.core.find_blocks(case.kv.keys(prompt(6)), group=0, tier=Tier.GPU).present.any()
        await case.kv.drain()
        assert case.kv.snapshot().gpu.free == 8
        await assert_all_given_back(case)


async def test_nobody_is_let_in_while_the_runtime_is_quiet() -> None:
    """`quiesce`: no polling and no pinning; nested captures end with the outer one."""
    async with opened() as case:
        lease = granted(case.kv, prompt(1))
        async with case.kv.quiesce():
            async with case.kv.quiesce():
                waiting = asyncio.create_task(case.kv.acquire("waiting", prompt(1, seed=1)))
                await turns(2)
            before = state_of(case.kv)
            assert case.kv.try_acquire("poller", prompt(1, seed=2)) == Deferred(DeferReason.QUEUED)
            assert lease.try_extend(BLOCK) == Deferred(DeferReason.QUEUED)
            await turns(5)
            assert not waiting.done()
            assert state_of(case.kv) == before
        (await asyncio.wait_for(waiting, 10.0)).release()
        lease.release()
