"""Coroutines of leases and preempted requests: `extend`, `ready`, `resume`, in every state in which they wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

from aiokv import CacheGeometry, InvalidTransition, Lease, LeaseReleased, SlidingWindow, Tier
from aiokv.testing import evict, make_resident
from tests.cancellation.scenarios import hold
from tests.cancellation.scenes import Act, Scenes, all_served, preempted_request
from tests.runtime.support import BLOCK, GROUP, Case, assert_all_given_back, granted, opened, prompt, turns

__all__ = ["LEASE_SCENES"]

LEASE_SCENES: Final = Scenes()
WINDOW: Final = CacheGeometry(groups=(SlidingWindow("swa", block_size=BLOCK, window=2 * BLOCK),), hash_block_size=BLOCK)


async def extended(lease: Lease, tokens: int) -> None:
    """Extend, then release; a cancelled extension leaves the lease the room that it had (law 2)."""
    before = lease.capacity_tokens
    try:
        assert await lease.extend(tokens) == before + tokens
    except asyncio.CancelledError:
        assert lease.capacity_tokens == before
        raise
    finally:
        lease.release()


def start(coroutine: Any, tasks: list[asyncio.Task[Any]]) -> None:  # noqa: ANN401  # any coroutine
    """Let somebody else wait as well."""
    tasks.append(asyncio.create_task(coroutine))


async def taken_and_left(case: Case, name: str, *, blocks: int, seed: int) -> None:
    """Somebody else's request."""
    async with case.kv.acquire(name, prompt(blocks, seed=seed, extra=0)):
        await turns(1)


# extend


@LEASE_SCENES.add(suspensions=1)
async def extend_in_a_full_pool() -> AsyncIterator[Act]:
    async with opened() as case:
        other, mine = hold(case, blocks=4), hold(case, blocks=4, seed=901)
        yield Act(begin=lambda: extended(mine, 16), moves=(other.release,))
        await assert_all_given_back(case)


@LEASE_SCENES.add(suspensions=1)
async def extend_behind_and_before_others() -> AsyncIterator[Act]:
    """Two extensions and an admission are in line; each is served in its turn, whoever leaves."""
    async with opened() as case:
        others = [hold(case, blocks=2, seed=seed) for seed in (900, 901)]
        mine = hold(case, blocks=2, seed=902)
        rest = hold(case, blocks=2, seed=903)
        tasks: list[asyncio.Task[Any]] = []
        start(extended(others[0], 2 * BLOCK), tasks)
        await turns(1)

        def follow() -> None:
            start(extended(others[1], 2 * BLOCK), tasks)
            start(taken_and_left(case, "behind", blocks=8, seed=904), tasks)

        yield Act(begin=lambda: extended(mine, 2 * BLOCK), moves=(follow, rest.release))
        rest.release()
        await all_served(tasks)
        await assert_all_given_back(case)


@LEASE_SCENES.add(suspensions=1)
async def extend_under_a_deadline() -> AsyncIterator[Act]:
    async with opened() as case:
        other, mine = hold(case, blocks=4), hold(case, blocks=4, seed=901)

        async def extend() -> None:
            try:
                await mine.extend(16, timeout=3600.0)
            finally:
                mine.finish()

        yield Act(begin=extend, moves=(other.release,))
        await assert_all_given_back(case)


@LEASE_SCENES.add(suspensions=1)
async def extend_while_a_load_fails() -> AsyncIterator[Act]:
    """The lease is planned again and extended in either order; `extend` goes first in line, the plan before it."""
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "cc-"})
        mine = granted(case.kv, prompt(3))
        other = hold(case, blocks=4)

        async def extend() -> None:
            try:
                await mine.extend(BLOCK)
                await mine.ready()
            finally:
                mine.release()

        yield Act(begin=extend, moves=(case.backend.fail, other.release))
        await assert_all_given_back(case)


@LEASE_SCENES.add(suspensions=1)
async def extend_of_a_lease_that_is_released_meanwhile() -> AsyncIterator[Act]:
    async with opened() as case:
        other, mine = hold(case, blocks=4), hold(case, blocks=4, seed=901)

        async def extend() -> None:
            with suppress(LeaseReleased):
                await mine.extend(16)

        yield Act(begin=extend, moves=(mine.release, other.release))
        mine.release()
        await assert_all_given_back(case)


# ready


async def readied(lease: Lease) -> None:
    """Wait for the loads, then release."""
    try:
        await lease.ready()
        assert lease.delivered.prompt_tokens == lease.num_tokens
    finally:
        lease.release()


@LEASE_SCENES.add(suspensions=1)
async def ready_of_a_load_that_fails() -> AsyncIterator[Act]:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        yield Act(begin=lambda: readied(lease), moves=(case.backend.fail,))
        await assert_all_given_back(case)


@LEASE_SCENES.add(suspensions=1)
async def ready_that_several_wait_for() -> AsyncIterator[Act]:
    """Each waits by itself: one that leaves takes the lease from nobody."""
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        tasks = [asyncio.create_task(lease.ready()) for _ in range(2)]
        yield Act(begin=lease.ready, moves=(case.backend.complete,))
        await all_served(tasks)
        lease.release()
        await assert_all_given_back(case)


@LEASE_SCENES.add(suspensions=1)
async def ready_of_two_failures() -> AsyncIterator[Act]:
    """The second plan loads what has not failed; that fails too, and the best prefix without loads is none."""
    async with opened(gpu_blocks=12, geometry=WINDOW) as case:
        make_resident(case.kv, prompt(6), {"swa": "cccccc"})
        lease = granted(case.kv, prompt(6))

        async def ready() -> None:
            try:
                await lease.ready()
                assert (lease.hit.cpu_tokens, lease.prefix_tokens) == (6 * BLOCK, 0)
                assert len(case.backend.history) == 2
            finally:
                lease.release()

        yield Act(begin=ready, moves=(case.backend.fail, case.backend.fail))
        await assert_all_given_back(case)


@LEASE_SCENES.add(suspensions=1)
async def ready_while_the_new_plan_waits_for_room() -> AsyncIterator[Act]:
    """Two hold one failed target; there is room for one of them, and a request in line behind both."""
    async with opened() as case:
        token_ids = prompt(3, extra=0)
        make_resident(case.kv, token_ids, {GROUP: "cc-"})
        first, second = granted(case.kv, token_ids), granted(case.kv, token_ids, name="second")
        other = hold(case, blocks=4)
        tasks: list[asyncio.Task[Any]] = []

        def follow() -> None:
            start(readied(first), tasks)
            start(taken_and_left(case, "behind", blocks=8, seed=904), tasks)

        yield Act(begin=lambda: readied(second), moves=(follow, case.backend.fail, other.release))
        await all_served(tasks)
        await assert_all_given_back(case)


@LEASE_SCENES.add(suspensions=1)
async def ready_across_a_reset() -> AsyncIterator[Act]:
    """An older epoch: the load serves its lease and registers nothing (invariant 4)."""
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        tasks: list[asyncio.Task[Any]] = []
        yield Act(begin=lambda: readied(lease), moves=(lambda: start(case.kv.reset(), tasks), case.backend.complete))
        await all_served(tasks)
        case.backend.complete_all()
        await case.kv.drain()
        for tier in Tier:
            keys = case.kv.keys(prompt(3))
            assert not case.kv.core.find_blocks(keys, group=0, tier=tier).present.any()
        await assert_all_given_back(case)


@LEASE_SCENES.add(suspensions=1)
async def ready_of_a_lease_that_is_finished_meanwhile() -> AsyncIterator[Act]:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))

        async def ready() -> None:
            with suppress(LeaseReleased):
                await lease.ready(timeout=3600.0)

        yield Act(begin=ready, moves=(lease.finish, case.backend.complete))
        lease.finish()
        await assert_all_given_back(case)


# resume


@LEASE_SCENES.add(suspensions=2)
async def resume_after_room_and_loads() -> AsyncIterator[Act]:
    """Cancelled in either, the request can be resumed again."""
    async with opened() as case:
        preempted = preempted_request(case, prompt(3))
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        other = hold(case, blocks=8)

        async def resume() -> None:
            try:
                resumed = await preempted.resume()
            except BaseException:
                again = preempted.try_resume()
                if isinstance(again, Lease):
                    again.release()
                raise
            resumed.release()

        yield Act(begin=resume, moves=(other.release, case.backend.complete))
        await assert_all_given_back(case)


@LEASE_SCENES.add(suspensions=3)
async def resume_as_context_manager() -> AsyncIterator[Act]:
    async with opened() as case:
        preempted = preempted_request(case, prompt(3))
        make_resident(case.kv, prompt(3), {GROUP: "cc-"})

        async def serve() -> None:
            async with preempted.resume(timeout=3600.0) as resumed:
                resumed.confirm(resumed.num_tokens)
                await turns(2)
                resumed.preempt().close()

        yield Act(begin=serve, moves=(case.backend.complete,))
        await assert_all_given_back(case)


@LEASE_SCENES.add(suspensions=2)
async def resume_of_a_long_request() -> AsyncIterator[Act]:
    """What was appended is hashed first, in slices; cancelled there, it can be resumed again."""
    async with opened(gpu_blocks=1300) as case:
        lease = granted(case.kv, prompt(1))
        lease.append(prompt(1200, seed=1))
        preempted = lease.preempt()

        async def resume() -> None:
            async with preempted.resume():
                pass

        yield Act(begin=resume)
        with suppress(InvalidTransition):  # it was resumed
            again = preempted.try_resume()
            assert isinstance(again, Lease)
            again.release()
        await assert_all_given_back(case)


@LEASE_SCENES.add(suspensions=1)
async def resume_by_the_load_of_another_that_fails() -> AsyncIterator[Act]:
    async with opened() as case:
        preempted = preempted_request(case, prompt(3))
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        other = granted(case.kv, prompt(3), name="other")

        async def resume() -> None:
            async with preempted.resume() as resumed:
                assert resumed.delivered.compute_tokens == resumed.num_tokens

        yield Act(begin=resume, moves=(case.backend.fail,))
        case.backend.complete_all()
        other.release()
        await assert_all_given_back(case)


@LEASE_SCENES.add(suspensions=1)
async def resume_across_a_reset() -> AsyncIterator[Act]:
    """Between two leases nothing is held, so a reset costs a resumption its hits and nothing else."""
    async with opened() as case:
        mine = granted(case.kv, prompt(3))
        mine.confirm(mine.num_tokens)
        preempted = mine.preempt()
        await turns(2)
        case.backend.complete_all()
        await case.kv.drain()
        evict(case.kv, prompt(3), {GROUP: (1, 2)}, tier=Tier.GPU)
        other = hold(case, blocks=8)
        tasks: list[asyncio.Task[Any]] = []

        async def resume() -> None:
            async with preempted.resume() as resumed:
                resumed.confirm(resumed.num_tokens)

        moves = (other.release, lambda: start(case.kv.reset(), tasks), case.backend.complete)
        yield Act(begin=resume, moves=moves)
        await all_served(tasks)
        await assert_all_given_back(case)
