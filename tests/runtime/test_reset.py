"""A reset of one tier or both, while copies run and leases of the older epoch live."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from aiokv import Lease, Tier
from aiokv.testing import make_resident
from tests.runtime.support import (
    BLOCK,
    GROUP,
    Case,
    assert_all_given_back,
    finish_copies,
    granted,
    opened,
    prompt,
    turns,
)

RESIDENT, LOADED, COMPUTED, NEW = range(4)
"""Prompts, by seed."""

either_or_both = pytest.mark.parametrize("tier", [Tier.GPU, Tier.CPU, None], ids=["gpu", "cpu", "both"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """A lease with a load under way, and one with a store under way and a block it has not confirmed."""

    loading: Lease
    storing: Lease


def found(case: Case, seed: int, tier: Tier) -> str:
    """One letter per block of a prompt: 1 where it is findable in a tier."""
    keys = case.kv.keys(prompt(3, seed=seed))
    return "".join(str(int(here)) for here in case.kv.core.find_blocks(keys, group=0, tier=tier).present)


async def make_busy(case: Case) -> Busy:
    make_resident(case.kv, prompt(3, seed=RESIDENT), {GROUP: "gcb"})
    make_resident(case.kv, prompt(3, seed=LOADED), {GROUP: "ccc"})
    loading = granted(case.kv, prompt(3, seed=LOADED))
    storing = granted(case.kv, prompt(3, seed=COMPUTED))
    storing.confirm(2 * BLOCK)
    await turns(2)
    assert sorted(copy.direction for copy in case.backend.pending) == ["load", "store"]
    return Busy(loading=loading, storing=storing)


def was_reset(tier: Tier, asked: Tier | None) -> bool:
    return asked in (tier, None)


@either_or_both
async def test_a_tier_that_was_reset_answers_nothing_and_the_other_answers_as_before(tier: Tier | None) -> None:
    async with opened(gpu_blocks=17) as case:
        busy = await make_busy(case)
        await asyncio.wait_for(case.kv.reset(tier), 10.0)
        for each, letters in ((Tier.GPU, "101"), (Tier.CPU, "011")):
            assert found(case, RESIDENT, each) == ("000" if was_reset(each, tier) else letters)
        assert found(case, LOADED, Tier.CPU) == ("000" if was_reset(Tier.CPU, tier) else "111")
        assert found(case, COMPUTED, Tier.GPU) == ("000" if was_reset(Tier.GPU, tier) else "110")
        busy.loading.release()
        busy.storing.release()
        await assert_all_given_back(case)


@either_or_both
async def test_copies_that_end_after_a_reset_register_nothing_and_still_serve_who_waits(tier: Tier | None) -> None:
    """Invariants 4 and 10: late completions give back and publish nothing, in either tier."""
    async with opened(gpu_blocks=17) as case:
        busy = await make_busy(case)
        waiting = asyncio.create_task(busy.loading.ready())
        await turns(1)
        await case.kv.reset(tier)
        await finish_copies(case)
        await asyncio.wait_for(waiting, 10.0)
        assert busy.loading.delivered.cpu_tokens == 3 * BLOCK
        assert found(case, LOADED, Tier.GPU) == "000"
        assert found(case, COMPUTED, Tier.CPU) == "000"
        busy.loading.release()
        busy.storing.release()
        await assert_all_given_back(case)


@either_or_both
async def test_a_lease_of_an_older_epoch_finishes_and_publishes_nothing_in_the_tier(tier: Tier | None) -> None:
    """Invariant 4. After a reset of the CPU tier alone the GPU tier may still learn what it computes."""
    async with opened(gpu_blocks=17) as case:
        busy = await make_busy(case)
        await case.kv.reset(tier)
        await finish_copies(case)
        stores = len(case.backend.history)
        busy.storing.confirm(3 * BLOCK)
        busy.storing.finish()
        busy.loading.finish()
        await finish_copies(case)
        assert len(case.backend.history) == stores, "nothing of it is stored"
        assert found(case, COMPUTED, Tier.GPU) == ("000" if was_reset(Tier.GPU, tier) else "111")
        await assert_all_given_back(case)


@either_or_both
async def test_what_is_computed_after_a_reset_is_published_and_stored_though_old_leases_live(tier: Tier | None) -> None:
    async with opened(gpu_blocks=17) as case:
        busy = await make_busy(case)
        await case.kv.reset(tier)
        for seed in (NEW, COMPUTED):
            async with case.kv.acquire("new", prompt(3, seed=seed)) as lease:
                lease.confirm(3 * BLOCK)
            await finish_copies(case)
            assert [found(case, seed, each) for each in (Tier.GPU, Tier.CPU)] == ["111", "111"]
        busy.loading.release()
        busy.storing.release()
        await assert_all_given_back(case)
