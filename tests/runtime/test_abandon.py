"""A lease may be left in every state, in every way; what it held comes back at once or with its copies."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from aiokv import Lease, LeaseState, Preempted
from aiokv.testing import make_resident
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

LONG = 2100
"""Blocks: named in three slices."""

Held = list[Lease]
"""The only reference to the lease that is left, so that it can be dropped too."""
Stage = Callable[[], AbstractAsyncContextManager[tuple[Case, Held]]]


@pytest.fixture(autouse=True)
def _collect_by_hand() -> Iterator[None]:
    """So that a lease dies when the test says so."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# States.


@asynccontextmanager
async def claims_without_names() -> AsyncIterator[tuple[Case, Held]]:
    async with opened(gpu_blocks=LONG + 10) as case:
        held = [granted(case.kv, prompt(LONG))]
        assert case.kv.audit().leases[0].unnamed_claims
        yield case, held
        await assert_all_given_back(case)


@asynccontextmanager
async def a_load_without_names() -> AsyncIterator[tuple[Case, Held]]:
    """Its targets are being named, so it is not submitted yet."""
    async with opened(gpu_blocks=LONG + 10, cpu_blocks=LONG) as case:
        keys = case.kv.keys(prompt(LONG))
        make_resident(case.kv, keys, {GROUP: "c" * LONG})
        held = [granted(case.kv, keys)]
        assert not case.backend.history
        yield case, held
        assert not case.backend.history, "nobody waited for it any more"
        await assert_all_given_back(case)


@asynccontextmanager
async def a_load_that_runs() -> AsyncIterator[tuple[Case, Held]]:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        held = [granted(case.kv, prompt(3))]
        assert held[0].state is LeaseState.LOADING
        yield case, held
        await assert_all_given_back(case)


@asynccontextmanager
async def a_load_that_has_ended_unseen() -> AsyncIterator[tuple[Case, Held]]:
    async with a_load_that_runs() as (case, held):
        case.backend.complete()
        yield case, held


@asynccontextmanager
async def a_load_that_has_failed_unseen() -> AsyncIterator[tuple[Case, Held]]:
    async with a_load_that_runs() as (case, held):
        case.backend.fail()
        yield case, held


@asynccontextmanager
async def a_plan_that_waits_for_room() -> AsyncIterator[tuple[Case, Held]]:
    """Two hold one failed target, and there is room for one; the one that waits is left."""
    async with opened() as case:
        token_ids = prompt(3, extra=0)
        make_resident(case.kv, token_ids, {GROUP: "cc-"})
        filler = granted(case.kv, prompt(4, seed=1, extra=0))
        leases = [granted(case.kv, token_ids, name=name) for name in ("one", "other")]
        case.backend.fail()
        await until(lambda: LeaseState.HELD in {lease.state for lease in leases})
        leases.sort(key=lambda lease: lease.state is LeaseState.HELD)
        goes_on = leases.pop(0)
        yield case, leases
        goes_on.release()
        filler.release()
        await assert_all_given_back(case)


@asynccontextmanager
async def ready_with_room_for_more() -> AsyncIterator[tuple[Case, Held]]:
    async with opened() as case:
        held = [granted(case.kv, prompt(3), reserve_tokens=2 * BLOCK)]
        held[0].confirm(BLOCK)
        yield case, held
        await assert_all_given_back(case)


@asynccontextmanager
async def a_store_that_runs() -> AsyncIterator[tuple[Case, Held]]:
    async with opened() as case:
        held = [granted(case.kv, prompt(3))]
        held[0].confirm(3 * BLOCK)
        await until(lambda: bool(case.backend.pending))
        yield case, held
        await assert_all_given_back(case)


@asynccontextmanager
async def an_extension_without_names() -> AsyncIterator[tuple[Case, Held]]:
    async with opened(gpu_blocks=LONG + 10) as case:
        held = [granted(case.kv, prompt(1))]
        held[0].try_extend((LONG - 1) * BLOCK)
        assert case.kv.audit().leases[0].unnamed_claims
        yield case, held
        await assert_all_given_back(case)


# Ways.


def release(held: Held) -> None:
    held.pop().release()


def finish(held: Held) -> None:
    held.pop().finish()


def preempt(held: Held) -> None:
    assert isinstance(held.pop().preempt(), Preempted)


def drop(held: Held) -> None:
    held.clear()


def release_twice_after_finish(held: Held) -> None:
    lease = held.pop()
    for leave in (lease.finish, lease.release, lease.release):
        leave()


STATES = (
    claims_without_names,
    a_load_without_names,
    a_load_that_runs,
    a_load_that_has_ended_unseen,
    a_load_that_has_failed_unseen,
    a_plan_that_waits_for_room,
    ready_with_room_for_more,
    a_store_that_runs,
    an_extension_without_names,
)


def is_held(case: Case, request_id: str) -> bool:
    audit = case.kv.audit()
    assert audit.violations == ()
    return any(lease.request_id == request_id for lease in audit.leases)


@pytest.mark.parametrize("leave", [release, finish, preempt, drop, release_twice_after_finish])
@pytest.mark.parametrize("state", STATES)
async def test_a_lease_may_be_left_in_every_state(state: Stage, leave: Callable[[Held], None]) -> None:
    """Law 4, invariants 1, 2 and 12: whoever leaves drops its own pins, the copies keep theirs."""
    asyncio.get_running_loop().set_debug(False)
    async with state() as (case, held):
        left = held[0].request_id
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of `drop`
            leave(held)
            assert case.kv.audit().violations == ()
            await until(lambda: not is_held(case, left))
            await turns(2)
        held_by = {pin.holder.split()[0] for pin in case.kv.audit().pins if pin.request_id == left}
        assert held_by == set(), "copies that are still running have no owner any more"
