"""A lease that nobody gave back: noticed at the loop's next turn, warned about, counted, its blocks back (law 4)."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest

from aiokv import Lease, LeaseState
from aiokv.core.counters import Closing
from aiokv.testing import make_resident
from tests.runtime.support import (
    GROUP,
    Case,
    assert_all_given_back,
    assert_nothing_held,
    granted,
    opened,
    prompt,
    turns,
    until,
)


@pytest.fixture(autouse=True)
def _collect_by_hand() -> Iterator[None]:
    """So that a lease dies when the test says so, and looking for it costs little."""
    gc.collect()
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


def drop(case: Case) -> None:
    granted(case.kv, prompt(3), name="dropped")


def drop_in_a_cycle(case: Case) -> None:
    lease = granted(case.kv, prompt(3), name="dropped")
    lease.add_done_callback([lease].append)
    cycle: list[object] = [lease]
    cycle.append(cycle)
    del lease, cycle
    gc.collect()


def drop_on_another_thread(case: Case) -> None:
    held = [granted(case.kv, prompt(3), name="dropped")]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()


def drop_in_a_cycle_on_another_thread(case: Case) -> None:
    """The collector runs in whatever thread allocates: here it finds the cycle in one that is not the loop's."""
    lease = granted(case.kv, prompt(3), name="dropped")
    cycle: list[object] = [lease]
    cycle.append(cycle)
    del lease, cycle
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()


def drop_while_it_loads(case: Case) -> None:
    make_resident(case.kv, prompt(3), {GROUP: "ccc"})
    granted(case.kv, prompt(3), name="dropped")


@pytest.mark.allow_blocking("the test itself waits for its thread")
@pytest.mark.parametrize(
    "how", [drop, drop_in_a_cycle, drop_on_another_thread, drop_in_a_cycle_on_another_thread, drop_while_it_loads]
)
async def test_a_dropped_lease_is_warned_about_counted_and_given_back(how: Callable[[Case], None]) -> None:
    async with opened() as case:
        with pytest.warns(ResourceWarning, match="'dropped' was garbage collected") as warned:
            how(case)
            await turns(2)
            gc.collect()
            await until(lambda: case.kv.core.live_leases == 0)
            await turns(2)
        assert len(warned) == 1
        assert case.kv.core.counters.leases_closed[Closing.FINALIZER] == 1
        await assert_all_given_back(case)


async def test_a_dropped_lease_lets_in_who_waits() -> None:
    """Nothing else happens in the program that would wake anybody."""
    async with opened() as case:
        held = [granted(case.kv, prompt(8, extra=0))]
        waiting = asyncio.create_task(case.kv.acquire("waiting", prompt(8, seed=1, extra=0)))
        await turns(3)
        with pytest.warns(ResourceWarning):
            held.clear()
            lease = await asyncio.wait_for(waiting, 10.0)
            await turns(2)
        lease.release()
        await assert_all_given_back(case)


async def test_a_dropped_lease_is_back_before_the_next_call_looks() -> None:
    """Not even a turn of the loop is needed by who calls in between."""
    async with opened() as case:
        with pytest.warns(ResourceWarning):
            granted(case.kv, prompt(8, extra=0))
            granted(case.kv, prompt(8, seed=1, extra=0)).release()
            await turns(2)
        await assert_all_given_back(case)


async def test_a_callback_that_holds_a_loading_lease_keeps_it() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        told: list[Lease] = []
        granted(case.kv, prompt(3)).add_done_callback(told.append)
        gc.collect()
        case.backend.complete()
        await until(lambda: bool(told))
        assert told[0].state is LeaseState.READY
        told.pop().release()
        await assert_all_given_back(case)


async def test_a_result_that_nobody_takes_is_given_back() -> None:
    async with opened() as case:
        task = asyncio.create_task(case.kv.acquire("dropped", prompt(2)))
        await asyncio.wait([task])
        with pytest.warns(ResourceWarning, match="dropped"):
            del task
            gc.collect()
            await until(lambda: case.kv.core.live_leases == 0)
            await turns(2)
        await assert_all_given_back(case)


async def test_leases_that_were_given_back_are_collected_in_silence() -> None:
    async with opened() as case:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for end in (Lease.release, Lease.finish):
                lease = granted(case.kv, prompt(2))
                end(lease)
                del lease
            gc.collect()
            await turns(3)
        assert caught == []
        assert case.kv.core.counters.leases_closed[Closing.FINALIZER] == 0


async def test_leases_that_outlive_the_runtime_are_collected_in_silence() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with opened() as case:
            lease = granted(case.kv, prompt(2))
        del lease
        gc.collect()
        await turns(3)
    assert caught == []
    assert_nothing_held(case.kv)


async def test_many_dropped_leases_are_all_given_back() -> None:
    async with opened(gpu_blocks=301) as case:
        with pytest.warns(ResourceWarning) as warned:
            held = [granted(case.kv, prompt(1, seed=seed, extra=0), name=f"{seed}") for seed in range(300)]
            held.clear()
            await until(lambda: case.kv.core.live_leases == 0)
            await turns(2)
        assert len(warned) == 300
        await assert_all_given_back(case)
