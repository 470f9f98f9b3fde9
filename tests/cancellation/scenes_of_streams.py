"""What is read as it comes: `events`, and the `transfers` of remote ranks, with whoever waits for their reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from aiokv import EventsDropped, Lease, Outcome
from aiokv.testing import make_resident
from tests.cancellation.scenarios import hold
from tests.cancellation.scenes import Act, Scenes, answer, assert_ranks_gave_back, opened_with_a_remote_rank
from tests.runtime.support import (
    BLOCK,
    GROUP,
    assert_all_given_back,
    assert_nothing_held,
    granted,
    opened,
    prompt,
    turns,
)

__all__ = ["STREAM_SCENES"]

STREAM_SCENES: Final = Scenes()


# events


def confirm_a_block(lease: Lease) -> None:
    lease.confirm(min(lease.confirmed_tokens + BLOCK, lease.num_tokens))


def confirmations(lease: Lease) -> tuple[Any, ...]:
    return (lambda: confirm_a_block(lease),) * 3


@STREAM_SCENES.add(suspensions=3)
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


@STREAM_SCENES.add(suspensions=3)
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


@STREAM_SCENES.add(suspensions=4)
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


@STREAM_SCENES.add(suspensions=2)
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


@STREAM_SCENES.add(suspensions=1)
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


@STREAM_SCENES.add(suspensions=1)
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


@STREAM_SCENES.add(suspensions=1)
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


@STREAM_SCENES.add(suspensions=1)
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
