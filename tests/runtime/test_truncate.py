"""`lease.truncate`: what a scheduler sees when tokens are rejected or a conversation is edited."""

from __future__ import annotations

import pytest

from aiokv import DeferReason, Deferred, InvalidTransition, LeaseReleased, Tier, UsageError
from aiokv.testing import make_resident
from tests.observe.support import Scrape
from tests.runtime.support import (
    BLOCK,
    GROUP,
    Case,
    assert_all_given_back,
    finish_copies,
    granted,
    opened,
    prompt,
    state_of,
    turns,
)


def found(case: Case, token_ids: list[int], *, tier: Tier = Tier.GPU) -> list[bool]:
    present: list[bool] = case.kv.core.find_blocks(case.kv.keys(token_ids), group=0, tier=tier).present.tolist()
    return present


async def test_rejected_drafts_cost_nothing() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(2), reserve_tokens=BLOCK)
        lease.confirm(2 * BLOCK + 1)
        table = lease.block_table(GROUP)
        for _ in range(20):
            lease.append([1, 2, 3, 4])
            assert lease.truncate(lease.num_tokens - 4) == lease.confirmed_tokens == 2 * BLOCK + 1
        assert (lease.block_table(GROUP), lease.num_tokens) == (table, 2 * BLOCK + 1)
        lease.release()
        await assert_all_given_back(case)


async def test_an_edited_conversation_keeps_both_versions() -> None:
    async with opened() as case:
        token_ids = prompt(4, extra=0)
        lease = granted(case.kv, token_ids)
        lease.confirm(4 * BLOCK)
        keys, room = lease.keys, lease.capacity_tokens
        assert lease.truncate(2 * BLOCK + 5) == 2 * BLOCK
        edited = [*token_ids[: 2 * BLOCK + 5], *prompt(2, seed=1)[: 2 * BLOCK - 5]]
        lease.append(edited[2 * BLOCK + 5 :])
        assert (keys.num_tokens, lease.num_tokens, lease.capacity_tokens) == (4 * BLOCK, 4 * BLOCK, room)
        lease.confirm(4 * BLOCK)
        lease.finish()
        await finish_copies(case)
        for version in (token_ids, edited):
            assert found(case, version) == found(case, version, tier=Tier.CPU) == [True] * 4
        assert sum(map(len, case.backend.history)) == 6, "each block is stored once"
        await assert_all_given_back(case)


async def test_a_store_in_flight_is_not_written_over() -> None:
    """Law 4: the copy reads its slots, the lease writes into others."""
    async with opened() as case:
        lease = granted(case.kv, prompt(3, extra=0))
        lease.confirm(3 * BLOCK)
        await turns(3)
        (store,) = case.backend.pending
        lease.truncate(BLOCK)
        assert not set(lease.block_table(GROUP)[1:]) & set(store.source_blocks)
        lease.release()
        await assert_all_given_back(case)


async def test_refused_truncations_change_nothing() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        lease = granted(case.kv, prompt(3))
        with pytest.raises(InvalidTransition):
            lease.truncate(40)
        case.backend.complete_all()
        await lease.ready()
        before = state_of(case.kv)
        for bad in (-1, 31, 50, True, "4", 2.0, None):
            with pytest.raises(UsageError):
                lease.truncate(bad)  # type: ignore[arg-type]  # on purpose
        assert (state_of(case.kv), lease.num_tokens) == (before, 49)
        lease.release()
        with pytest.raises(LeaseReleased):
            lease.truncate(40)


async def test_slots_that_others_hold_are_waited_for() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(5, extra=0))
        lease.confirm(5 * BLOCK)
        other = granted(case.kv, [*prompt(5, extra=0), 7], name="other")
        third = granted(case.kv, prompt(2, seed=3, extra=0), name="third")
        before = state_of(case.kv)
        assert lease.truncate(BLOCK) == Deferred(DeferReason.CAPACITY)
        assert (state_of(case.kv), lease.num_tokens, lease.confirmed_tokens) == (before, 5 * BLOCK, 5 * BLOCK)
        third.release()
        other.release()
        assert lease.truncate(BLOCK) == BLOCK
        lease.release()
        await assert_all_given_back(case)


async def test_quiet_times_defer_only_what_takes_slots() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(2))
        lease.confirm(2 * BLOCK)
        async with case.kv.quiesce():
            assert lease.truncate(2 * BLOCK) == 2 * BLOCK
            assert lease.truncate(BLOCK) == Deferred(DeferReason.QUEUED)
        assert lease.truncate(BLOCK) == BLOCK
        lease.release()


async def test_what_is_given_up_is_counted() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(3))
        lease.confirm(3 * BLOCK)
        lease.truncate(BLOCK + 1)
        assert Scrape(case.kv.collector)("aiokv_truncated_tokens_total") == 2 * BLOCK
        lease.release()
