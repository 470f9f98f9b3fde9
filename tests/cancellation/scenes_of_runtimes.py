"""Coroutines of an open runtime: `reset`, `drain`, `audit_sliced`, `prepare_keys`, `ready`, `quiesce`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from typing import Any, Final

import numpy as np

from aiokv import BlockKeys, Deferred, KVRuntime, Tier
from aiokv.testing import FakeBackend, make_resident
from tests.cancellation.scenarios import hold
from tests.cancellation.scenes import Act, Scenes, all_served
from tests.runtime.staged_pinning import PinningBackend, StagedPinning
from tests.runtime.support import (
    BLOCK,
    GROUP,
    Case,
    assert_all_given_back,
    config_of,
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


# audit_sliced


@RUNTIME_SCENES.add(suspensions=3)
async def audit_sliced_while_a_lease_leaves_and_another_audit_runs() -> AsyncIterator[Act]:
    async with opened(gpu_blocks=3000) as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        loading = granted(case.kv, prompt(3))
        other = asyncio.create_task(case.kv.audit_sliced())

        async def audit() -> None:
            assert (await case.kv.audit_sliced()).violations == ()

        yield Act(begin=audit, moves=(loading.release, case.backend.complete))
        await all_served([other])
        assert other.result().violations == ()
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


@RUNTIME_SCENES.add(suspensions=1)
async def ready_while_the_arena_is_pinned() -> AsyncIterator[Act]:
    staged = StagedPinning()
    async with KVRuntime(config_of(backend=PinningBackend(FakeBackend(manual=False), staged))) as kv:
        yield Act(begin=kv.ready, moves=(staged.pin,))
        assert len(staged.waiting) <= 1, "the runtime's own"


# quiesce


@RUNTIME_SCENES.add(suspensions=3)
async def quiesce_that_waits_for_a_registration() -> AsyncIterator[Act]:
    """Wherever it is given up, pinning goes on, and requests are let in."""
    staged = StagedPinning()
    async with KVRuntime(config_of(backend=PinningBackend(FakeBackend(manual=False), staged))) as kv:

        async def capture() -> None:
            async with kv.quiesce():
                await turns(2)

        yield Act(begin=capture, moves=(staged.end_call,))
        assert staged.pauses == 0
        staged.end_call()
        (await asyncio.wait_for(kv.acquire("afterwards", prompt(1)), 10.0)).release()


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
