"""Coroutines of an open runtime: `reset`, `drain`, `prepare_keys`, `ready`, `quiesce`, `events`, `transfers`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from typing import Any, Final

import numpy as np

from aiokv import BlockKeys, Deferred, EventsDropped, Lease, Outcome, Tier
from aiokv.testing import make_resident
from tests.cancellation.scenarios import hold
from tests.cancellation.scenes import (
    Act,
    Scenes,
    all_served,
    answer,
    assert_ranks_gave_back,
    opened_with_a_remote_rank,
)
from tests.runtime.support import (
    BLOCK,
    GROUP,
    Case,
    assert_all_given_back,
    assert_nothing_held,
    granted,
    opened,
    prompt,
    turns,
)

__all__ = ["RUNTIME_SCENES"]

RUNTIME_SCENES: Final = Scenes()

MANY: Final = 17_000
"""Blocks: more than a slice of a reset."""


@cache
def many_keys() -> BlockKeys:
    keys = BlockKeys(prompt(MANY, extra=0), hash_block_size=BLOCK)
    keys.hash_more(MANY)
    return keys


def count_found(case: Case, tier: Tier, keys: BlockKeys) -> int:
    return int(case.kv.core.find_blocks(keys, group=0, tier=tier).present.sum())


# reset


@RUNTIME_SCENES.add(suspensions=1)
async def reset_of_a_large_tier() -> AsyncIterator[Act]:
    """The tier answers nothing at once; the sweep goes on when its caller has left."""
    async with opened(gpu_blocks=MANY + 1) as case:
        make_resident(case.kv, many_keys(), {GROUP: "g" * MANY})
        yield Act(begin=lambda: case.kv.reset(Tier.GPU))
        assert count_found(case, Tier.GPU, many_keys()) == 0
        await assert_all_given_back(case)


@RUNTIME_SCENES.add(suspensions=1)
async def reset_twice_at_once() -> AsyncIterator[Act]:
    async with opened(gpu_blocks=MANY + 1) as case:
        make_resident(case.kv, many_keys(), {GROUP: "g" * MANY})
        tasks: list[asyncio.Task[Any]] = []

        def again() -> None:
            tasks.append(asyncio.create_task(case.kv.reset()))

        yield Act(begin=case.kv.reset, moves=(again,))
        await all_served(tasks)
        await assert_all_given_back(case)


@RUNTIME_SCENES.add(suspensions=0)
async def reset_under_old_leases_and_copies() -> AsyncIterator[Act]:
    """A load, a store and a lease of the older epoch live on; they register nothing (invariant 4)."""
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        loading, storing = granted(case.kv, prompt(3)), hold(case, blocks=2)
        storing.confirm(2 * BLOCK)
        await turns(2)
        assert {copy.direction for copy in case.backend.pending} == {"load", "store"}
        yield Act(begin=case.kv.reset, moves=(case.backend.complete, case.backend.complete))
        case.backend.complete_all()
        await case.kv.drain()
        for tier in Tier:
            for tokens in (prompt(3), prompt(2, seed=900)):
                assert count_found(case, tier, case.kv.keys(tokens)) == 0
        loading.release()
        storing.finish()
        await assert_all_given_back(case)


# drain


@RUNTIME_SCENES.add(suspensions=1)
async def drain_of_stores() -> AsyncIterator[Act]:
    async with opened() as case:
        lease = hold(case, blocks=4)
        lease.confirm(lease.num_tokens)
        lease.finish()
        yield Act(begin=case.kv.drain, moves=(case.backend.complete, case.backend.complete))
        await assert_all_given_back(case)


@RUNTIME_SCENES.add(suspensions=1)
async def drain_that_two_wait_for() -> AsyncIterator[Act]:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        granted(case.kv, prompt(3)).release()
        tasks = [asyncio.create_task(case.kv.drain())]
        yield Act(begin=case.kv.drain, moves=(case.backend.fail,))
        await all_served(tasks)
        await assert_all_given_back(case)


# keys, ready


@RUNTIME_SCENES.add(suspensions=2)
async def prepare_keys_of_a_list() -> AsyncIterator[Act]:
    async with opened() as case:
        yield Act(begin=lambda: case.kv.prepare_keys(prompt(1200)))
        await assert_all_given_back(case)


@RUNTIME_SCENES.add(suspensions=2)
async def prepare_keys_of_an_array() -> AsyncIterator[Act]:
    async with opened() as case:
        yield Act(begin=lambda: case.kv.prepare_keys(np.array(prompt(1200), np.int64), salt="tenant"))
        await assert_all_given_back(case)


@RUNTIME_SCENES.add(suspensions=0)
async def ready_of_the_runtime() -> AsyncIterator[Act]:
    async with opened() as case:
        yield Act(begin=case.kv.ready)
        await assert_all_given_back(case)


# quiesce


@RUNTIME_SCENES.add(suspensions=3)
async def quiesce_alone() -> AsyncIterator[Act]:
    async with opened() as case:

        async def capture() -> None:
            async with case.kv.quiesce():
                await turns(3)

        yield Act(begin=capture)
        await assert_all_given_back(case)


@RUNTIME_SCENES.add(suspensions=6)
async def quiesce_nested_while_copies_end_and_requests_wait() -> AsyncIterator[Act]:
    """Inside, nothing is polled or let in; once out, by whatever door, what was due goes on by itself."""
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(lease.ready())]

        async def ask() -> None:
            async with case.kv.acquire("waits", prompt(2, seed=1)):
                pass

        async def capture() -> None:
            async with case.kv.quiesce():
                tasks.append(asyncio.create_task(ask()))
                async with case.kv.quiesce():
                    await turns(4)
                    assert not any(task.done() for task in tasks)
                assert isinstance(case.kv.try_acquire("poller", prompt(1, seed=2)), Deferred)
                await turns(2)

        yield Act(begin=capture, moves=(case.backend.complete,))
        case.backend.complete_all()
        await all_served(tasks)
        lease.release()
        await assert_all_given_back(case)


# events


def confirm_a_block(lease: Lease) -> None:
    lease.confirm(min(lease.confirmed_tokens + BLOCK, lease.num_tokens))


def confirmations(lease: Lease) -> tuple[Any, ...]:
    return (lambda: confirm_a_block(lease),) * 3


@RUNTIME_SCENES.add(suspensions=3)
async def events_in_a_context() -> AsyncIterator[Act]:
    """A reader that leaves takes nothing from the cache, nor from another reader."""
    async with opened() as case:
        lease = hold(case, blocks=3)
        async with case.kv.events() as theirs:

            async def read() -> None:
                async with case.kv.events() as stream:
                    for _ in range(3):
                        await anext(stream)

            yield Act(begin=read, moves=(*confirmations(lease), lease.release))
            lease.release()
            async with asyncio.timeout(10.0):
                events = [await anext(theirs) for _ in range(3)]
            assert len(events) == 3
        await assert_all_given_back(case)


@RUNTIME_SCENES.add(suspensions=3)
async def events_by_plain_iteration() -> AsyncIterator[Act]:
    async with opened() as case:
        lease = hold(case, blocks=3)

        async def read() -> None:
            seen = 0
            async for _ in case.kv.events():
                seen += 1
                if seen == 3:
                    break

        yield Act(begin=read, moves=confirmations(lease))
        lease.release()
        await assert_all_given_back(case)


@RUNTIME_SCENES.add(suspensions=4)
async def events_of_a_slow_reader() -> AsyncIterator[Act]:
    async with opened() as case:
        lease = hold(case, blocks=3)

        async def read() -> None:
            async with case.kv.events(backlog=1) as stream:
                await turns(12)
                kinds = [type(await anext(stream)) for _ in range(2)]
                assert kinds[1] is EventsDropped

        yield Act(begin=read, moves=confirmations(lease))
        lease.release()
        await assert_all_given_back(case)


# ranks


@RUNTIME_SCENES.add(suspensions=2)
async def transfers_of_a_remote_rank() -> AsyncIterator[Act]:
    """Each transfer is handed out once: a reader that is cancelled has it, or leaves it to the next one."""
    async with opened_with_a_remote_rank() as case:
        make_resident(case.kv, prompt(1), {GROUP: "c"})
        make_resident(case.kv, prompt(1, seed=1), {GROUP: "c"})
        leases: list[Lease] = []

        async def read() -> None:
            stream = case.kv.transfers()
            for _ in range(2):
                transfer = await anext(stream)
                case.kv.report(transfer.transfer_id, 1, Outcome.OK)

        moves = [lambda seed=seed: leases.append(granted(case.kv, prompt(1, seed=seed))) for seed in range(2)]
        yield Act(begin=read, moves=(*moves, case.backend.complete_all))
        answer(case.kv)
        case.backend.complete_all()
        await asyncio.wait_for(asyncio.gather(*(lease.ready() for lease in leases)), 10.0)
        for lease in leases:
            lease.release()
        await assert_ranks_gave_back(case)


@RUNTIME_SCENES.add(suspensions=1)
async def acquire_while_a_rank_is_missing() -> AsyncIterator[Act]:
    """The local copy has ended, the remote rank reports late: until then the slots are nobody's (law 4)."""
    async with opened_with_a_remote_rank() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})

        async def acquire() -> None:
            async with case.kv.acquire("request", prompt(3)) as lease:
                assert lease.delivered.cpu_tokens == 3 * BLOCK

        def others_get_the_rest() -> None:
            for seed in range(1, 6):
                hold(case, blocks=1, seed=seed).release()

        moves = (case.backend.complete, others_get_the_rest, lambda: answer(case.kv))
        yield Act(begin=acquire, moves=moves)
        await assert_ranks_gave_back(case)


@RUNTIME_SCENES.add(suspensions=1)
async def acquire_of_a_load_that_fails_on_one_rank() -> AsyncIterator[Act]:
    """The first failure decides; the lease is planned again after the last report."""
    async with opened_with_a_remote_rank() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})

        async def acquire() -> None:
            async with case.kv.acquire("request", prompt(3)) as lease:
                assert lease.prefix_tokens == 0

        def fail() -> None:
            for transfer in case.kv.transfers().take():
                case.kv.report(transfer.transfer_id, 1, Outcome.FAILED)
                case.kv.report(transfer.transfer_id, 1, Outcome.FAILED)

        yield Act(begin=acquire, moves=(fail, case.backend.complete))
        await assert_ranks_gave_back(case)


@RUNTIME_SCENES.add(suspensions=1)
async def extend_and_drain_while_a_rank_is_missing() -> AsyncIterator[Act]:
    """A store that one rank has not reported keeps its source, so there is no room until it has."""
    async with opened_with_a_remote_rank() as case:
        storing, mine = hold(case, blocks=4), hold(case, blocks=4, seed=901)
        storing.confirm(4 * BLOCK)
        await turns(2)
        storing.finish()

        async def extend() -> None:
            try:
                await mine.extend(BLOCK)
                await case.kv.drain()
            finally:
                mine.release()

        yield Act(begin=extend, moves=(case.backend.complete_all, lambda: answer(case.kv)))
        await assert_ranks_gave_back(case)


@RUNTIME_SCENES.add(suspensions=1)
async def acquire_when_the_missing_rank_is_lost() -> AsyncIterator[Act]:
    """Its copies are LOST there: the targets are out of use, the request computes (invariant 12 for what is left)."""
    async with opened_with_a_remote_rank() as case:
        make_resident(case.kv, prompt(1), {GROUP: "c"})

        async def acquire() -> None:
            async with case.kv.acquire("request", prompt(1)) as lease:
                assert lease.prefix_tokens == 0

        def lose() -> None:
            case.kv.transfers().take()
            case.kv.lose_rank(1)

        yield Act(begin=acquire, moves=(lose, case.backend.complete))
        await case.kv.drain()
        assert_nothing_held(case.kv)
