"""`lease.try_fork`: several continuations of one prompt."""

from __future__ import annotations

import asyncio
import gc

import pytest

from aiokv import DeferReason, Deferred, Hit, InvalidTransition, Lease, LeaseReleased, UsageError
from aiokv.testing import make_resident
from tests.observe.support import Scrape
from tests.runtime.support import (
    BLOCK,
    GROUP,
    assert_all_given_back,
    granted,
    opened,
    prompt,
    state_of,
    turns,
    until,
)


def forked(lease: Lease, request_id: str = "fork", *, at: int | None = None) -> Lease:
    fork = lease.try_fork(request_id, at=at)
    assert isinstance(fork, Lease)
    return fork


async def test_four_samples_of_one_prompt_hold_it_once() -> None:
    async with opened(gpu_blocks=8) as case:
        lease = granted(case.kv, prompt(3, extra=0))
        lease.confirm(3 * BLOCK)
        samples = [forked(lease, f"sample {number}") for number in range(4)]
        lease.release()
        for number, sample in enumerate(samples):
            assert sample.hit == Hit(prompt_tokens=48, gpu_tokens=48, cpu_tokens=0, compute_tokens=0)
            assert (sample.request_id, sample.prefix_tokens) == (f"sample {number}", 48)
            sample.append([number] * BLOCK)
            assert sample.try_extend(BLOCK) == 4 * BLOCK
            sample.confirm(4 * BLOCK)
        tables = [sample.block_table(GROUP) for sample in samples]
        assert len({table[:3] for table in tables}) == 1
        assert len({table[3] for table in tables}) == 4
        for sample in samples:
            sample.finish()
        await assert_all_given_back(case)


async def test_a_fork_from_the_middle_has_its_own_tokens_from_there() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(3), reserve_tokens=3)
        lease.confirm(3 * BLOCK + 1)
        fork = forked(lease, at=BLOCK + 5)
        assert (fork.prefix_tokens, fork.num_tokens, fork.confirmed_tokens) == (BLOCK, BLOCK + 5, BLOCK)
        assert fork.capacity_tokens == BLOCK + 8, "the same options"
        fork.append([1, 2, 3])
        assert lease.num_tokens == 3 * BLOCK + 1
        assert lease.keys.tokens(BLOCK + 5, BLOCK + 8).tolist() == prompt(3)[BLOCK + 5 : BLOCK + 8]
        fork.confirm(BLOCK + 8)
        lease.release()
        fork.release()
        await assert_all_given_back(case)


async def test_refused_forks_change_nothing() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        lease = granted(case.kv, prompt(3))
        with pytest.raises(InvalidTransition):
            lease.try_fork("fork")
        case.backend.complete_all()
        await lease.ready()
        before = state_of(case.kv)
        for bad in (0, -1, 50, True, "4"):
            with pytest.raises(UsageError):
                lease.try_fork("fork", at=bad)  # type: ignore[arg-type]  # on purpose
        for name in ("", None, 7):
            with pytest.raises(UsageError):
                lease.try_fork(name)  # type: ignore[arg-type]  # on purpose
        assert state_of(case.kv) == before
        lease.release()
        with pytest.raises(LeaseReleased):
            lease.try_fork("fork")
        await assert_all_given_back(case)


async def test_a_lease_that_has_computed_nothing_needs_to_be_told_where() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(2))
        with pytest.raises(UsageError, match="cannot fork 0 tokens"):
            lease.try_fork("fork")
        fork = forked(lease, at=33)
        assert fork.hit.compute_tokens == 33
        fork.release()
        lease.release()
        await assert_all_given_back(case)


async def test_forks_wait_their_turn_and_for_quiet_times() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(4))
        task = asyncio.create_task(case.kv.acquire("first in line", prompt(5, seed=7)))
        await turns(2)
        assert lease.try_fork("fork", at=1) == Deferred(DeferReason.QUEUED)
        lease.release()
        await until(task.done)
        task.result().release()
    async with opened() as case:
        lease = granted(case.kv, prompt(4))
        lease.confirm(4 * BLOCK)
        async with case.kv.quiesce():
            assert lease.try_fork("fork") == Deferred(DeferReason.QUEUED)
        lease.release()


async def test_a_dropped_fork_is_noticed() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(2))
        lease.confirm(2 * BLOCK)
        with pytest.warns(ResourceWarning, match="'fork' was garbage collected"):
            forked(lease)
            gc.collect()
            await turns(3)
        lease.release()
        await assert_all_given_back(case)


async def test_forks_are_counted() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(2))
        lease.confirm(2 * BLOCK)
        forked(lease).release()
        scrape = Scrape(case.kv.collector)
        assert (scrape("aiokv_forks_total"), scrape("aiokv_leases_opened_total")) == (1, 2)
        lease.release()


async def test_after_closing_nobody_forks() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(2))
        lease.confirm(2 * BLOCK)
    with pytest.raises(UsageError):
        lease.try_fork("fork")
