"""Law 8 for prompts of many slices: they are hashed, let in and named in turns apart, and may be cancelled in each."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

import numpy as np
import pytest

from aiokv import Lease, Tier
from aiokv.core.slices import SLICE_BLOCKS
from aiokv.errors import LeaseReleased
from aiokv.model.tokens import TokenIds
from tests.runtime.support import BLOCK, opened

BLOCKS = 4 * SLICE_BLOCKS
ROOM = BLOCKS + 9
TOKENS = np.arange(BLOCKS * BLOCK, dtype=np.int32)


@pytest.mark.parametrize("convert", [np.asarray, list, lambda tokens: array("i", tokens)])
async def test_keys_are_prepared_in_slices_of_whatever_holds_the_tokens(convert: Callable[[object], TokenIds]) -> None:
    async with opened() as case:
        given = convert(TOKENS)
        task = asyncio.ensure_future(case.kv.prepare_keys(given))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        keys, at_once = await task, case.kv.keys(TOKENS)
        assert turns > BLOCKS // SLICE_BLOCKS
        assert np.array_equal(keys.digests(1, 0, BLOCKS), at_once.digests(1, 0, BLOCKS))


@pytest.mark.parametrize("tokens", [np.zeros((2, 2 * BLOCK), np.int32), np.zeros(2 * BLOCK), np.full(BLOCK, 2**40)])
async def test_arrays_that_are_no_token_ids_are_refused_as_at_once(tokens: TokenIds) -> None:
    async with opened() as case:
        with pytest.raises(Exception) as at_once:
            case.kv.keys(tokens)
        with pytest.raises(type(at_once.value)) as in_slices:
            await case.kv.prepare_keys(tokens)
        assert str(in_slices.value) == str(at_once.value)


async def test_an_acquired_prompt_has_all_its_slots() -> None:
    async with opened(gpu_blocks=ROOM, cpu_blocks=ROOM + 1) as case:
        lease = await case.kv.acquire("long", TOKENS)
        assert not case.kv.audit().leases[0].unnamed_claims
        lease.release()


async def test_readiness_after_admission_names_what_is_left_and_reading_before_does_too() -> None:
    async with opened(gpu_blocks=ROOM, cpu_blocks=ROOM + 1) as case:
        lease = await case.kv.admit("long", TOKENS)
        assert case.kv.audit().leases[0].unnamed_claims
        await asyncio.gather(lease.ready(), lease.ready())
        assert not case.kv.audit().leases[0].unnamed_claims
        lease.release()
        lease = await case.kv.admit("read at once", TOKENS)
        assert len(set(lease.block_table("full"))) == BLOCKS
        lease.release()


async def test_a_poller_is_told_when_its_slots_have_names_and_reading_is_short() -> None:
    """Law 8: it need not name a long prompt in one hold."""
    async with opened(gpu_blocks=ROOM, cpu_blocks=ROOM + 1) as case:
        lease = case.kv.try_acquire("polls", await case.kv.prepare_keys(TOKENS))
        assert isinstance(lease, Lease)
        turns = 0
        while not lease.is_named:
            assert case.kv.audit().leases[0].unnamed_claims == BLOCKS - (1 + turns) * SLICE_BLOCKS
            await asyncio.sleep(0)
            turns += 1
        assert turns == BLOCKS // SLICE_BLOCKS - 1
        assert len(set(lease.block_table("full"))) == BLOCKS
        lease.release()
        with pytest.raises(LeaseReleased):
            _ = lease.is_named


async def test_who_waits_is_not_held_up_while_the_runtime_is_quiet() -> None:
    async with opened(gpu_blocks=ROOM, cpu_blocks=ROOM + 1) as case:
        lease = await case.kv.admit("long", TOKENS)
        async with case.kv.quiesce():
            await lease.ready()
            assert case.kv.audit().leases[0].unnamed_claims, "nothing is pinned while a graph is captured"
        await lease.ready()
        assert not case.kv.audit().leases[0].unnamed_claims
        lease.release()


async def test_a_request_that_is_cancelled_in_any_of_its_turns_leaves_nothing() -> None:
    async with opened(gpu_blocks=ROOM, cpu_blocks=ROOM + 1) as case:
        empty, cancelled = case.kv.snapshot(), 0
        for turns in range(100):
            task = asyncio.ensure_future(case.kv.acquire("long", TOKENS))
            for _ in range(turns):
                await asyncio.sleep(0)
            if task.done():
                (await task).release()
                break
            task.cancel()
            await asyncio.wait([task])
            cancelled += task.cancelled()
            await case.kv.drain()
            assert not case.kv.core.live_leases
            counts = case.kv.core.pools()[Tier.GPU]
            assert (counts.free, counts.claimed) == (empty.gpu.free, 0)
        assert cancelled > 2 * BLOCKS // SLICE_BLOCKS, "it was cancelled while it was hashed and while it was named"
