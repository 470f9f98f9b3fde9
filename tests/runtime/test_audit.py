"""Audits of a runtime that serves: since when, for whom, beside requests, and which leases are overdue."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from aiokv.core.audit import HolderKind
from aiokv.testing import make_resident
from tests.observe.support import Scrape
from tests.runtime.support import (
    GROUP,
    Case,
    assert_all_given_back,
    finish_copies,
    granted,
    opened,
    prompt,
    turns,
    until,
)

AT_ONCE_S = 1e-9
"""So short a limit that a lease is overdue in the next turn."""
NEVER_S = 1e9


async def test_leases_and_copies_are_told_with_the_time_since_when() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        before = time.monotonic()
        lease = granted(case.kv, prompt(3), name="mine")
        await turns(3)
        after = time.monotonic()
        for audit in (case.kv.audit(), await case.kv.audit_sliced()):
            assert audit.violations == ()
            assert {holding.kind for holding in audit.pins} == {HolderKind.LEASE, HolderKind.LOAD}
            assert {holding.request_id for holding in audit.pins} == {"mine"}
            for holding in audit.pins:
                assert holding.since is not None
                assert before <= holding.since <= after
            assert audit.taken_at is not None
            assert audit.taken_at >= after
            assert audit.overdue == ()
        lease.release()
        await assert_all_given_back(case)


async def test_a_lease_that_is_flushed_keeps_its_time() -> None:
    """It still pins blocks after `finish`, so whoever asks who holds them wants to know since when."""
    async with opened(gpu_blocks=5001, cpu_blocks=5001) as case:
        lease = granted(case.kv, prompt(5000, extra=0))
        await case.kv.drain()
        lease.confirm(lease.num_tokens)
        lease.finish()
        (view,) = case.kv.audit().leases
        assert view.since is not None
        await assert_all_given_back(case)


async def serve(case: Case, number: int) -> None:
    async with case.kv.acquire(f"request {number}", prompt(1 + number % 7, seed=number % 5)) as lease:
        await turns(number % 4)
        lease.confirm(lease.num_tokens)
        await turns(number % 3)


async def test_a_sliced_audit_beside_requests_finds_nothing_and_ends_with_what_is() -> None:
    async with opened(gpu_blocks=4000, cpu_blocks=4000, manual=False) as case:
        audits = asyncio.ensure_future(case.kv.audit_sliced())
        served = 0
        while not audits.done():
            await asyncio.gather(*(serve(case, served + n) for n in range(8)))
            served += 8
        assert (await audits).violations == ()
        assert served >= 8
        await case.kv.drain()
        now, slow = case.kv.audit(), await case.kv.audit_sliced()
        assert (now.leases, now.pins, now.reservations) == (slow.leases, slow.pins, slow.reservations)


async def test_audits_at_once_while_nothing_may_be_polled() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(3))
        async with case.kv.quiesce():
            first, second = await asyncio.gather(case.kv.audit_sliced(), case.kv.audit_sliced())
        assert first.pins == second.pins
        assert [holding.blocks for holding in first.pins] == [4]
        lease.release()


async def test_a_sliced_audit_lets_the_loop_turn() -> None:
    """Law 8: one slice a turn."""
    async with opened(gpu_blocks=50_000) as case:
        audits = asyncio.ensure_future(case.kv.audit_sliced())
        turned = 0
        while not audits.done():
            await asyncio.sleep(0)
            turned += 1
        assert turned >= 50_000 / 1024
        assert (await audits).violations == ()


async def test_the_runtime_may_close_under_a_sliced_audit() -> None:
    async with opened(gpu_blocks=20_000) as case:
        audits = asyncio.ensure_future(case.kv.audit_sliced())
        await turns(5)
    assert (await audits).violations == ()


# Overdue leases.


async def test_an_overdue_lease_is_reported_once_flagged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="aiokv")
    async with opened(lease_age_limit_s=AT_ONCE_S) as case:
        lease = granted(case.kv, prompt(3), name="forgotten")
        scrape = Scrape(case.kv.collector)
        assert (scrape("aiokv_leases", state="active"), scrape("aiokv_leases", state="overdue")) == (1, 0)
        await until(lambda: bool(caplog.records))
        (record,) = caplog.records
        assert "'forgotten'" in record.getMessage()
        assert str(prompt(3)[0]) not in record.getMessage(), "no tokens"
        for audit in (case.kv.audit(), await case.kv.audit_sliced()):
            assert [overdue.request_id for overdue in audit.overdue] == ["forgotten"]
        scrape = Scrape(case.kv.collector)
        assert (scrape("aiokv_leases", state="active"), scrape("aiokv_leases", state="overdue")) == (0, 1)
        await turns(20)
        assert len(caplog.records) == 1
        lease.release()
        scrape = Scrape(case.kv.collector)
        assert (scrape("aiokv_leases", state="active"), scrape("aiokv_leases", state="overdue")) == (0, 0)
        await assert_all_given_back(case)


async def test_without_a_limit_no_lease_is_overdue(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(3))
        await turns(5)
        assert case.kv.audit().overdue == ()
        assert Scrape(case.kv.collector)("aiokv_leases", state="overdue") == 0
        assert caplog.records == []
        lease.release()


async def test_leases_in_time_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(lease_age_limit_s=NEVER_S) as case:
        lease = granted(case.kv, prompt(3))
        await turns(5)
        assert case.kv.audit().overdue == ()
        assert caplog.records == []
        lease.release()
        await finish_copies(case)
