"""Waits that somebody gave up leave nothing behind while others go on, and take nothing that was granted since."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any, Final

import pytest

from aiokv.testing import make_resident
from tests.runtime.support import BLOCK, GROUP, assert_all_given_back, granted, opened, prompt, turns

MANY: Final = 60
FEW: Final = 10


def count_futures() -> int:
    """Those that are alive, as the loop makes them."""
    gc.collect()
    kind = type(asyncio.get_running_loop().create_future())
    return sum(type(thing) is kind for thing in gc.get_objects())


async def give_up(start: Callable[[], Coroutine[Any, Any, object]], *, times: int) -> None:
    for _ in range(times):
        waiting = asyncio.ensure_future(start())
        await turns(2)
        assert waiting.cancel()
        await asyncio.wait((waiting,))
        assert waiting.cancelled()


async def test_extensions_that_were_given_up_leave_nothing_with_the_lease() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(2, extra=0), name="grows")
        holder = granted(case.kv, prompt(6, seed=1, extra=0), name="holder")
        await give_up(lambda: lease.extend(BLOCK), times=FEW)
        before = count_futures()
        await give_up(lambda: lease.extend(BLOCK), times=MANY)
        assert count_futures() <= before + FEW
        lease.release()
        holder.release()
        await assert_all_given_back(case)


async def test_waits_for_loads_that_were_given_up_leave_nothing_with_the_lease() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        lease = granted(case.kv, prompt(2))
        await give_up(lease.ready, times=FEW)
        before = count_futures()
        await give_up(lease.ready, times=MANY)
        assert count_futures() <= before + FEW
        lease.release()
        await assert_all_given_back(case)


async def test_requests_that_gave_up_behind_one_that_waits_leave_nothing_in_the_line() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(8, extra=0), name="holder")
        first = asyncio.ensure_future(case.kv.acquire("first", prompt(8, seed=1, extra=0)))
        await give_up(lambda: case.kv.acquire("other", prompt(1, seed=2)), times=FEW)
        before = count_futures()
        await give_up(lambda: case.kv.acquire("other", prompt(1, seed=2)), times=MANY)
        assert count_futures() <= before + FEW
        lease.release()
        (await first).release()
        await assert_all_given_back(case)


@pytest.mark.parametrize("grows", [False, True], ids=["alone", "grown since"])
async def test_an_extension_that_is_given_up_as_it_is_granted_takes_nothing_from_a_later_one(*, grows: bool) -> None:
    async with opened() as case:
        loop = asyncio.get_running_loop()
        lease = granted(case.kv, prompt(2, extra=0), name="grows")
        holder = granted(case.kv, prompt(6, seed=1, extra=0), name="holder")
        waiting = asyncio.ensure_future(lease.extend(BLOCK))
        await turns(2)
        holder.release()

        def in_the_turn_of_the_grant() -> None:
            assert lease.capacity_tokens == 3 * BLOCK
            if grows:
                assert lease.try_extend(2 * BLOCK) == 5 * BLOCK
            waiting.cancel()

        loop.call_soon(in_the_turn_of_the_grant)
        await asyncio.wait((waiting,))
        assert waiting.cancelled()
        assert lease.capacity_tokens == (5 * BLOCK if grows else 2 * BLOCK)
        assert len(lease.block_table(GROUP)) >= lease.capacity_tokens // BLOCK
        lease.release()
        await assert_all_given_back(case)
