"""What a lease shows and does, from admission to its end."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiokv import CacheGeometry, DeferReason, Deferred, Hit, Lease, LeaseState, RecurrentState, Tier
from aiokv.testing import make_resident
from tests.runtime.support import (
    BLOCK,
    GROUP,
    HYBRID,
    Case,
    assert_all_given_back,
    finish_copies,
    granted,
    opened,
    prompt,
    turns,
    until,
)


def hit_of(lease: Lease) -> tuple[int, int, int]:
    return (lease.hit.gpu_tokens, lease.hit.cpu_tokens, lease.hit.compute_tokens)


def found(case: Case, token_ids: list[int], *, tier: Tier) -> list[bool]:
    """Which full blocks of a prompt are findable in a tier."""
    present: list[bool] = case.kv.core.find_blocks(case.kv.keys(token_ids), group=0, tier=tier).present.tolist()
    return present


# What is promised and delivered.


async def test_a_hit_says_where_every_token_comes_from() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(5), {GROUP: "gcgcb"})
        lease = granted(case.kv, prompt(5))
        assert lease.hit == Hit(prompt_tokens=81, gpu_tokens=48, cpu_tokens=32, compute_tokens=1)
        assert (lease.prefix_tokens, lease.request_id, lease.num_tokens) == (80, "request", 81)
        case.backend.complete()
        await lease.ready()
        assert lease.delivered == lease.hit
        lease.release()
        await assert_all_given_back(case)


async def test_a_lease_without_loads_is_ready_at_once() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(2))
        assert lease.state is LeaseState.READY
        await asyncio.wait_for(lease.ready(), 10.0)
        assert lease.delivered == Hit(prompt_tokens=33, gpu_tokens=0, cpu_tokens=0, compute_tokens=33)
        lease.release()


async def test_states_of_a_lease_from_loading_to_released() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        lease = granted(case.kv, prompt(2))
        seen = [lease.state]
        case.backend.complete()
        seen.append(lease.state)  # completions are seen in a later turn
        await until(lambda: lease.state is LeaseState.READY)
        lease.release()
        seen.append(lease.state)
        assert seen == [LeaseState.LOADING, LeaseState.LOADING, LeaseState.RELEASED]
        assert "released" in str(lease)


async def test_a_failed_load_shortens_what_is_delivered_and_is_computed_instead() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(4), {GROUP: "ggcc"})
        lease = granted(case.kv, prompt(4))
        assert hit_of(lease) == (32, 32, 1)
        case.backend.fail()
        await lease.ready()
        assert lease.hit == Hit(prompt_tokens=65, gpu_tokens=32, cpu_tokens=32, compute_tokens=1)
        assert lease.delivered == Hit(prompt_tokens=65, gpu_tokens=32, cpu_tokens=0, compute_tokens=33)
        assert (lease.prefix_tokens, lease.confirmed_tokens) == (32, 32)
        assert found(case, prompt(4), tier=Tier.CPU)[2:] == [True, True], "a failed copy says nothing of its source"
        lease.release()
        await assert_all_given_back(case)


# The table.


async def test_the_table_covers_prompt_and_reserve_with_slots_of_its_own() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(2), reserve_tokens=2 * BLOCK)
        table = lease.block_table(GROUP)
        assert len(table) == 5
        assert len(set(table)) == 5
        assert 0 not in table
        assert lease.capacity_tokens == 4 * BLOCK + 1
        lease.release()


async def test_positions_that_a_window_skips_hold_the_null_block() -> None:
    async with opened(geometry=HYBRID, gpu_blocks=20) as case:
        make_resident(case.kv, prompt(6), {GROUP: "gggggg", "swa": "----gg"})
        lease = granted(case.kv, prompt(6))
        assert lease.prefix_tokens == 6 * BLOCK
        assert lease.block_table("swa")[:4] == (0, 0, 0, 0)
        assert 0 not in lease.block_table("swa")[4:]
        assert 0 not in lease.block_table(GROUP)
        lease.release()


async def test_block_ids_are_the_table_from_a_position_on() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(4))
        table = lease.block_table(GROUP)
        ids = lease.block_ids(GROUP, start=2)
        assert ids.dtype == np.int32
        assert tuple(ids.tolist()) == table[2:]
        assert lease.block_ids(GROUP, start=99).tolist() == []
        ids[:] = 0
        assert lease.block_table(GROUP) == table, "the lease keeps its own"
        lease.release()


async def test_the_table_may_be_read_while_the_loads_run() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "gcg"})
        lease = granted(case.kv, prompt(3))
        assert lease.state is LeaseState.LOADING
        table = lease.block_table(GROUP)
        await until(lambda: bool(case.backend.pending))
        assert case.backend.pending[0].target_blocks == (table[1],)
        case.backend.complete()
        await lease.ready()
        assert lease.block_table(GROUP) == table
        lease.release()


# Growing.


async def test_append_and_extend_make_room_for_generated_tokens() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(2, extra=0))
        lease.append([7] * 3)
        assert (lease.num_tokens, lease.capacity_tokens) == (35, 32)
        before = lease.block_table(GROUP)
        assert await lease.extend(3) == 35
        assert lease.block_table(GROUP)[:2] == before
        assert len(lease.block_table(GROUP)) == 3
        assert lease.try_extend(13) == 48
        assert len(lease.block_table(GROUP)) == 3
        lease.release()
        await assert_all_given_back(case)


async def test_the_keys_of_the_caller_stay_as_they_were() -> None:
    async with opened() as case:
        keys = case.kv.keys(prompt(2))
        lease = granted(case.kv, keys)
        lease.append([5] * BLOCK)
        assert (keys.num_tokens, lease.num_tokens) == (33, 49)
        lease.release()


async def test_what_the_caller_does_to_its_keys_changes_nothing_for_a_request() -> None:
    """Law 10: a block is registered under the hash of what was computed, even if the keys went another way since."""
    async with opened(gpu_blocks=17) as case:
        keys = case.kv.keys(prompt(4))
        lease = granted(case.kv, keys)
        lease.confirm(4 * BLOCK)
        lease.finish()
        await turns(2)
        assert case.backend.pending, "the store is on its way"
        keys.truncate(BLOCK)
        keys.append(prompt(4, seed=1))
        await finish_copies(case)
        for tier in Tier:
            assert found(case, prompt(4), tier=tier) == [True] * 4
            assert found(case, [*prompt(4)[:BLOCK], *prompt(4, seed=1)], tier=tier) == [
                True,
                False,
                False,
                False,
                False,
            ]
        waiting = granted(case.kv, prompt(8, seed=9), reserve_tokens=7 * BLOCK)
        task = asyncio.create_task(case.kv.admit("waiting", keys))
        await turns(3)
        asked = keys.num_tokens
        keys.truncate(3)
        waiting.release()
        again = await task
        assert again.num_tokens == asked
        again.release()
        await assert_all_given_back(case)


# Confirming.


async def test_confirmed_full_blocks_become_findable_and_are_stored() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(3))
        lease.confirm(2 * BLOCK + 5)
        assert found(case, prompt(3), tier=Tier.GPU) == [True, True, False]
        assert lease.confirmed_tokens == 2 * BLOCK + 5
        await until(lambda: bool(case.backend.pending))
        assert case.backend.pending[0].source_blocks == lease.block_table(GROUP)[:2]
        assert found(case, prompt(3), tier=Tier.CPU) == [False] * 3, "law 3: not before the copy has ended"
        case.backend.complete()
        await turns(3)
        assert found(case, prompt(3), tier=Tier.CPU) == [True, True, False]
        lease.release()
        await assert_all_given_back(case)


async def test_confirming_no_more_than_is_confirmed_changes_nothing() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(3))
        lease.confirm(2 * BLOCK)
        await finish_copies(case)
        before = case.kv.snapshot()
        lease.confirm(BLOCK)
        lease.confirm(2 * BLOCK)
        assert case.kv.snapshot() == before
        lease.release()


async def test_the_states_that_were_captured_may_come_as_an_iterator() -> None:
    """Checking them does not use them up."""
    geometry = CacheGeometry(groups=(RecurrentState("state", block_size=BLOCK),), hash_block_size=BLOCK)
    async with opened(geometry=geometry) as case:
        async with case.kv.acquire("request", prompt(2)) as lease:
            lease.confirm(2 * BLOCK, states=iter((2 * BLOCK,)))
        await finish_copies(case)
        async with case.kv.acquire("again", prompt(2)) as lease:
            assert lease.hit.gpu_tokens == 2 * BLOCK


async def test_publish_to_limits_what_becomes_findable() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(4))
        lease.confirm(4 * BLOCK, publish_to=2 * BLOCK)
        assert found(case, prompt(4), tier=Tier.GPU) == [True, True, False, False]
        lease.confirm(4 * BLOCK + 1, publish_to=3 * BLOCK)
        assert found(case, prompt(4), tier=Tier.GPU) == [True, True, True, False]
        lease.finish()
        await finish_copies(case)
        assert found(case, prompt(4), tier=Tier.CPU) == [True, True, True, False]
        await assert_all_given_back(case)


async def test_unconfirmed_tokens_are_neither_findable_nor_stored() -> None:
    """Invariant 9."""
    async with opened() as case:
        granted(case.kv, prompt(3)).finish()
        await finish_copies(case)
        assert not any(found(case, prompt(3), tier=Tier.GPU))
        assert case.backend.history == ()
        await assert_all_given_back(case)


# The end.


async def test_a_clean_exit_stores_the_backlog() -> None:
    async with opened() as case:
        async with case.kv.acquire("request", prompt(3)) as lease:
            lease.confirm(3 * BLOCK)
        assert lease.state is LeaseState.RELEASED
        await finish_copies(case)
        assert found(case, prompt(3), tier=Tier.CPU) == [True] * 3


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, KeyError])
async def test_an_exception_does_not_store_the_backlog(error: type[BaseException]) -> None:
    async with opened() as case:
        with pytest.raises(error):
            async with case.kv.acquire("request", prompt(3)) as lease:
                lease.confirm(3 * BLOCK)
                raise error
        assert lease.state is LeaseState.RELEASED
        await finish_copies(case)
        assert case.backend.history == ()
        assert found(case, prompt(3), tier=Tier.GPU) == [True] * 3, "what was computed is still free cache"
        await assert_all_given_back(case)


async def test_release_drops_stores_that_were_not_submitted() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(3))
        lease.confirm(3 * BLOCK)
        lease.release()
        await finish_copies(case)
        assert case.backend.history == ()


async def test_finish_of_a_long_request_stores_all_of_it_in_slices() -> None:
    blocks = 2500
    async with opened(gpu_blocks=blocks + 2, cpu_blocks=blocks) as case:
        asyncio.get_running_loop().set_debug(False)
        keys = await case.kv.prepare_keys(prompt(blocks))
        lease = granted(case.kv, keys)
        lease.confirm(blocks * BLOCK)
        lease.finish()
        await finish_copies(case)
        assert sum(map(len, case.backend.history)) == blocks
        assert {slot for copy in case.backend.history for slot in copy.source_blocks} == set(range(1, blocks + 1))


async def test_a_lease_that_leaves_its_body_early_may_be_left_again() -> None:
    async with opened() as case:
        async with case.kv.acquire("request", prompt(3)) as lease:
            lease.release()
        async with case.kv.acquire("request", prompt(3)) as lease:
            lease.finish()
        await assert_all_given_back(case)


# Being told.


async def test_done_callbacks_run_in_a_turn_of_the_loop_with_the_lease() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        lease = granted(case.kv, prompt(2))
        told: list[Lease] = []
        lease.add_done_callback(told.append)
        lease.add_done_callback(told.append)
        await turns(3)
        assert told == []
        case.backend.complete()
        await until(lambda: len(told) == 2)
        assert told == [lease, lease]
        lease.add_done_callback(told.append)
        assert len(told) == 2, "not inside the call"
        await turns(1)
        assert told == [lease] * 3
        lease.release()


@pytest.mark.parametrize("end", [Lease.release, Lease.finish])
async def test_done_callbacks_run_once_when_the_lease_is_given_back(end: object) -> None:
    async with opened() as case:
        assert callable(end)
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        lease = granted(case.kv, prompt(2))
        told: list[LeaseState] = []
        lease.add_done_callback(lambda lease: told.append(lease.state))
        end(lease)
        case.backend.complete_all()
        await turns(4)
        assert told == [LeaseState.RELEASED]
        lease.add_done_callback(lambda lease: told.append(lease.state))
        await turns(1)
        assert told == [LeaseState.RELEASED] * 2


async def test_a_callback_that_raises_stops_nobody_else() -> None:
    async with opened() as case:
        loop, errors = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: errors.append(context))
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        lease = granted(case.kv, prompt(2))
        told: list[Lease] = []

        def fail(_: Lease) -> None:
            raise ValueError

        lease.add_done_callback(fail)
        lease.add_done_callback(told.append)
        case.backend.complete()
        await lease.ready()
        await turns(2)
        assert told == [lease]
        assert len(errors) == 1
        lease.release()


# Polling.


async def test_a_scheduler_that_polls_needs_no_coroutine() -> None:
    async with opened(manual=False) as case:
        keys = await case.kv.prepare_keys(prompt(3))
        make_resident(case.kv, keys, {GROUP: "ccc"})
        lease = case.kv.try_acquire("polled", keys)
        assert isinstance(lease, Lease)
        steps = 0
        while lease.state is not LeaseState.READY:
            await turns(1)
            steps += 1
        assert steps
        assert case.kv.try_acquire("too much", prompt(8, seed=1, extra=0)) == Deferred(DeferReason.CAPACITY)
        lease.release()
        await assert_all_given_back(case)
