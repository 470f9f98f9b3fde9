"""Preempted and resumed: blocks go back, tokens stay, nothing is held in between."""

from __future__ import annotations

import asyncio
import gc

import pytest

from aiokv import (
    AcquireTimeout,
    CapacityError,
    DeferReason,
    Deferred,
    Hit,
    InvalidTransition,
    Lease,
    LeaseReleased,
    LeaseState,
    Preempted,
    Tier,
    UsageError,
)
from aiokv.core.counters import Phase, Source
from aiokv.testing import evict, make_resident
from tests.observe.support import Scrape
from tests.runtime.support import (
    BLOCK,
    GROUP,
    Case,
    assert_all_given_back,
    assert_nothing_held,
    finish_copies,
    granted,
    opened,
    prompt,
    state_of,
    turns,
    until,
)


def generating(case: Case, *, blocks: int = 2) -> Lease:
    """A lease that has computed its prompt and a block of tokens of its own."""
    lease = granted(case.kv, prompt(blocks), reserve_tokens=BLOCK)
    lease.append(list(range(BLOCK)))
    lease.confirm(lease.num_tokens)
    return lease


async def test_a_resumed_request_hits_what_it_had_generated() -> None:
    async with opened() as case:
        lease = generating(case)
        preempted = lease.preempt()
        assert (preempted.request_id, preempted.num_tokens) == ("request", 3 * BLOCK + 1)
        async with preempted.resume() as resumed:
            assert resumed is not lease
            assert resumed.hit == Hit(prompt_tokens=49, gpu_tokens=48, cpu_tokens=0, compute_tokens=1)
            assert resumed.keys.tokens(33, 49).tolist() == list(range(BLOCK))
            assert resumed.capacity_tokens == 4 * BLOCK + 1, "the same options: room for one more block"
        await assert_all_given_back(case)


async def test_its_blocks_are_stored_and_come_back_from_the_cpu_tier() -> None:
    """The backlog is flushed, as `finish` does: preempting is what the CPU tier is for."""
    async with opened() as case:
        lease = generating(case)
        keys = lease.keys.copy()
        preempted = lease.preempt()
        await finish_copies(case)
        assert_nothing_held(case.kv)
        evict(case.kv, keys, {GROUP: (0, 1, 2)}, tier=Tier.GPU)
        resumed = preempted.try_resume()
        assert isinstance(resumed, Lease)
        assert resumed.state is LeaseState.LOADING
        assert resumed.hit.cpu_tokens == 3 * BLOCK
        case.backend.complete_all()
        await resumed.ready()
        resumed.release()
        await assert_all_given_back(case)


async def test_the_old_lease_is_poisoned_and_who_waits_for_it_is_told() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        lease = granted(case.kv, prompt(2))
        waiting = asyncio.create_task(lease.ready())
        await turns(2)
        preempted = lease.preempt()
        assert lease.state is LeaseState.RELEASED
        with pytest.raises(LeaseReleased):
            await waiting
        for use in (lease.preempt, lambda: lease.block_table(GROUP), lambda: lease.append([1])):
            with pytest.raises(LeaseReleased):
                use()
        lease.release()
        lease.finish()
        assert preempted.num_tokens == 2 * BLOCK + 1
        await assert_all_given_back(case)


async def test_tokens_are_counted_as_resumed() -> None:
    """Law 7: the headline counts first admissions only."""
    async with opened() as case:
        preempted = generating(case).preempt()
        resumed = preempted.try_resume()
        assert isinstance(resumed, Lease)
        resumed.release()
        counted = case.kv.core.counters.prompt_tokens
        assert [counted[source, Phase.FIRST] for source in Source] == [0, 0, 33]
        assert [counted[source, Phase.RESUMED] for source in Source] == [48, 0, 1]
        scrape = Scrape(case.kv.collector)
        assert scrape.by("how", "aiokv_leases_closed_total") == {"preempted": 1, "released": 1}


async def test_a_full_pool_defers_and_the_handle_stays() -> None:
    async with opened() as case:
        preempted = generating(case).preempt()
        await finish_copies(case)
        other = granted(case.kv, prompt(8, seed=5, extra=0), name="other")
        before = state_of(case.kv)
        assert preempted.try_resume() == Deferred(DeferReason.CAPACITY)
        assert state_of(case.kv) == before
        waiting = asyncio.create_task(resume_and_release(preempted))
        await turns(3)
        assert not waiting.done()
        assert case.kv.try_acquire("behind", prompt(1)) == Deferred(DeferReason.QUEUED), "nobody overtakes"
        other.release()
        await until(lambda: bool(case.backend.pending) or waiting.done())
        case.backend.complete_all()
        await waiting
        await assert_all_given_back(case)


async def resume_and_release(preempted: Preempted) -> None:
    lease = await preempted.resume()
    lease.release()


async def test_a_resumption_that_times_out_may_be_repeated() -> None:
    async with opened() as case:
        lease = generating(case)
        keys = lease.keys.copy()
        preempted = lease.preempt()
        await finish_copies(case)
        evict(case.kv, keys, {GROUP: (0, 1, 2)}, tier=Tier.GPU)
        with pytest.raises(AcquireTimeout):
            await preempted.resume(timeout=0.0)
        case.backend.complete_all()
        resumed = await preempted.resume(timeout=30.0)
        assert resumed.num_tokens == 3 * BLOCK + 1
        resumed.release()
        await assert_all_given_back(case)


async def test_a_request_is_resumed_once() -> None:
    async with opened() as case:
        preempted = generating(case).preempt()
        await finish_copies(case)
        other = granted(case.kv, prompt(8, seed=5, extra=0), name="other")
        first = asyncio.create_task(resume_and_release(preempted))
        await turns(2)
        for use in (preempted.try_resume, preempted.close):
            with pytest.raises(InvalidTransition, match="while it is being resumed"):
                use()
        with pytest.raises(InvalidTransition, match="cannot be resumed while it is being resumed"):
            await preempted.resume()
        other.release()
        await until(lambda: bool(case.backend.pending))
        case.backend.complete_all()
        await first
        with pytest.raises(InvalidTransition, match="cannot be resumed while it is resumed"):
            preempted.try_resume()
        preempted.close()
        assert repr(preempted) == "<Preempted 'request' resumed>"
        await assert_all_given_back(case)


async def test_who_polls_resumes_a_request_once_too() -> None:
    async with opened() as case:
        preempted = generating(case).preempt()
        await finish_copies(case)
        resumed = preempted.try_resume()
        assert isinstance(resumed, Lease)
        for again in (preempted.try_resume, preempted.resume().__await__().__next__):
            with pytest.raises(InvalidTransition, match="while it is resumed"):
                again()
        resumed.release()
        await assert_all_given_back(case)


async def test_a_closed_or_dropped_handle_leaves_nothing() -> None:
    async with opened() as case:
        preempted = generating(case).preempt()
        preempted.close()
        preempted.close()
        with pytest.raises(InvalidTransition, match="while it is closed"):
            preempted.try_resume()
        dropped = generating(case).preempt()
        call = dropped.resume()
        call.close()
        del dropped, preempted, call
        gc.collect()
        await assert_all_given_back(case)


async def test_what_a_resumed_lease_appends_is_its_own() -> None:
    async with opened() as case:
        preempted = generating(case).preempt()
        first = preempted.try_resume()
        assert isinstance(first, Lease)
        first.append([1, 2, 3])
        again = first.preempt()
        assert (preempted.num_tokens, again.num_tokens) == (49, 52)
        second = await again.resume()
        assert second.keys.tokens(49, 52).tolist() == [1, 2, 3]
        second.release()
        await assert_all_given_back(case)


async def test_what_does_not_fit_any_more_is_said_at_once() -> None:
    async with opened(gpu_blocks=6) as case:
        lease = granted(case.kv, prompt(4, extra=0), reserve_tokens=BLOCK)
        lease.append(list(range(BLOCK)))
        preempted = lease.preempt()
        for _ in range(2):
            with pytest.raises(CapacityError):
                preempted.try_resume()
            with pytest.raises(CapacityError):
                await preempted.resume()
        await assert_all_given_back(case)


async def test_a_reset_in_between_is_survived() -> None:
    async with opened() as case:
        preempted = generating(case).preempt()
        await finish_copies(case)
        await case.kv.reset()
        async with preempted.resume() as resumed:
            assert resumed.hit.compute_tokens == 3 * BLOCK + 1
            resumed.confirm(resumed.num_tokens)
        await assert_all_given_back(case)


async def test_after_closing_nobody_resumes() -> None:
    async with opened() as case:
        preempted = generating(case).preempt()
    with pytest.raises(UsageError, match="closed or closing"):
        preempted.try_resume()
    with pytest.raises(UsageError, match="closed or closing"):
        await preempted.resume()
