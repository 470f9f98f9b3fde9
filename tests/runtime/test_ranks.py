"""Several ranks: transfers handed out to other processes, their reports, and what becomes of a rank that is silent."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from aiokv import (
    ConfigError,
    CopyFailed,
    Direction,
    KVRuntime,
    LeaseState,
    Outcome,
    RankTransfer,
    RuntimeConfig,
    Tier,
    UsageError,
)
from aiokv.backends.arena import Layout
from aiokv.backends.base import EventStatus
from aiokv.backends.host import HostBackend
from aiokv.runtime.transfers import STREAM_DEPTH
from aiokv.testing import FakeBackend, evict, make_resident
from tests.observe.support import Scrape
from tests.runtime.support import (
    BLOCK,
    GEOMETRY,
    GROUP,
    Case,
    assert_all_given_back,
    assert_nothing_held,
    config_of,
    granted,
    prompt,
    turns,
    until,
)

OK, FAILED, LOST = Outcome.OK, Outcome.FAILED, Outcome.LOST


def runtime_of(backend: FakeBackend, **settings: Any) -> KVRuntime:  # noqa: ANN401  # any setting of the config
    defaults: dict[str, Any] = {
        "close_grace_s": 5.0,
        "world_size": 2,
        "remote_ranks": (1,),
        "cpu_blocks": 16,
        "watermark": 0.0,
    }
    return KVRuntime(config_of(backend=backend, **defaults | settings))


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[Case]:  # noqa: ANN401
    """Rank 0 is local, rank 1 remote, unless told otherwise."""
    backend = FakeBackend()
    async with runtime_of(backend, **settings) as kv:
        try:
            yield Case(kv=kv, backend=backend)
        finally:
            backend.complete_all()


async def answer(kv: KVRuntime) -> None:
    """Every remote rank makes every transfer at once, and says so."""
    async for transfer in kv.transfers():
        for rank in kv.config.remote_ranks:
            kv.report(transfer.transfer_id, rank, OK)


async def a_load(case: Case) -> RankTransfer:
    """The prompt's three blocks are in the CPU tier; the load that a request causes."""
    await until(lambda: bool(case.backend.pending))
    (transfer,) = case.kv.transfers().take()
    return transfer


# Handed out.


async def test_a_transfer_is_handed_out_with_its_copies_and_ends_with_the_last_report() -> None:
    async with opened(world_size=3, remote_ranks=(0, 2)) as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        waiting = asyncio.create_task(case.kv.acquire("request", prompt(3)))
        transfer = await a_load(case)
        (copy,) = case.backend.pending
        assert (transfer.batch.direction, transfer.batch.group) == (Direction.LOAD, GROUP)
        assert tuple(transfer.batch.source_blocks) == copy.source_blocks
        assert tuple(transfer.batch.target_blocks) == copy.target_blocks
        case.kv.report(transfer.transfer_id, 2, OK)
        case.backend.complete()
        await turns(3)
        assert not waiting.done()
        assert case.kv.snapshot().transfers[0].reported_by == (1, 2)
        case.kv.report(transfer.transfer_id, 0, OK)
        lease = await waiting
        assert lease.delivered.cpu_tokens == 3 * BLOCK
        lease.release()
        await assert_nothing_left(case)


async def assert_nothing_left(case: Case) -> None:
    """Invariant 12."""
    answering = asyncio.create_task(answer(case.kv))
    await assert_all_given_back(case)
    answering.cancel()
    await asyncio.wait([answering])


async def test_each_transfer_is_handed_out_once_in_order_of_submission() -> None:
    async with opened(gpu_blocks=17) as case:
        for seed in range(3):
            make_resident(case.kv, prompt(1, seed=seed), {GROUP: "c"})
        leases = [granted(case.kv, prompt(1, seed=0))]
        stream = case.kv.transfers()
        first = await anext(stream)
        waiting = asyncio.create_task(anext(stream))
        await turns(2)
        leases.append(granted(case.kv, prompt(1, seed=1)))
        second = await waiting
        leases.append(granted(case.kv, prompt(1, seed=2)))
        (third,) = case.kv.transfers().take()
        assert case.kv.transfers().take() == []
        handed_out = [first.transfer_id, second.transfer_id, third.transfer_id]
        assert handed_out == sorted({transfer.transfer_id for transfer in case.kv.snapshot().transfers})
        for transfer_id in reversed(handed_out):
            case.kv.report(transfer_id, 1, OK)
        case.backend.complete_all()
        for lease in leases:
            await lease.ready()
            lease.release()
        await assert_nothing_left(case)


async def test_a_reader_that_is_cancelled_loses_no_transfer() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        reader = asyncio.create_task(anext(case.kv.transfers()))
        await turns(2)
        lease = granted(case.kv, prompt(3))
        reader.cancel()
        await asyncio.wait([reader])
        transfer = await asyncio.wait_for(anext(case.kv.transfers()), 10.0)
        case.kv.report(transfer.transfer_id, 1, OK)
        case.backend.complete()
        await lease.ready()
        lease.release()
        await assert_nothing_left(case)


async def test_a_second_reader_is_told_that_there_is_one() -> None:
    async with opened() as case:
        reader = asyncio.create_task(anext(case.kv.transfers()))
        await turns(2)
        with pytest.raises(UsageError, match="another task"):
            await anext(case.kv.transfers())
        reader.cancel()
        await asyncio.wait([reader])


async def test_no_more_is_handed_out_than_a_stream_takes_while_a_rank_is_slow() -> None:
    asyncio.get_running_loop().set_debug(False)
    count = STREAM_DEPTH + 3
    async with opened(gpu_blocks=2 * count + 1, cpu_blocks=count) as case:
        for seed in range(count):
            make_resident(case.kv, prompt(1, seed=seed), {GROUP: "c"})
        leases = [granted(case.kv, prompt(1, seed=seed)) for seed in range(count)]
        case.backend.complete_all()
        await until(lambda: case.kv.core.partly_reported == STREAM_DEPTH)
        taken = case.kv.transfers().take()
        assert len(taken) == len(case.backend.history) == STREAM_DEPTH
        case.kv.report(taken[7].transfer_id, 1, OK)
        assert len(case.kv.transfers().take()) == 1
        for transfer in taken[:7] + taken[8:]:
            case.kv.report(transfer.transfer_id, 1, OK)
        last = [transfer for transfer in case.kv.core.transfers() if 1 in case.kv.core.missing_ranks(transfer)]
        for unfinished in last:
            case.kv.report(unfinished.transfer_id, 1, OK)
        case.backend.complete_all()
        for lease in leases:
            await lease.ready()
            lease.release()
        case.kv.transfers().take()


# Bad ends.


@pytest.mark.parametrize("remote_first", [True, False])
async def test_a_load_that_fails_on_the_remote_rank_is_planned_again_after_the_last_report(remote_first: bool) -> None:  # noqa: FBT001
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "gcc"})
        waiting = asyncio.create_task(case.kv.acquire("request", prompt(3)))
        transfer = await a_load(case)
        if remote_first:
            case.kv.report(transfer.transfer_id, 1, FAILED)
        else:
            case.backend.complete()
        await turns(3)
        held = case.kv.audit().pins
        assert {pin.blocks for pin in held if pin.holder.startswith("load")} == {2}
        if remote_first:
            case.backend.complete()
        else:
            case.kv.report(transfer.transfer_id, 1, FAILED)
        lease = await asyncio.wait_for(waiting, 10.0)
        assert (lease.prefix_tokens, lease.delivered.cpu_tokens) == (BLOCK, 0)
        lease.release()
        await assert_nothing_left(case)


async def test_what_the_local_backend_refuses_is_handed_out_to_nobody() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "gcc"})
        case.backend.fail_next_submit(CopyFailed(0, detail="the test refused it"))
        lease = await asyncio.wait_for(case.kv.acquire("request", prompt(3)), 10.0)
        assert lease.prefix_tokens == BLOCK
        for transfer in case.kv.transfers().take():
            assert transfer.batch.direction is Direction.STORE, "the refused load was handed out"
            case.kv.report(transfer.transfer_id, 1, OK)
        lease.release()
        await assert_nothing_left(case)


async def test_a_duplicate_changes_nothing_and_a_contradiction_is_refused() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        transfer = await a_load(case)
        case.kv.report(transfer.transfer_id, 1, OK)
        before = case.kv.snapshot()
        case.kv.report(transfer.transfer_id, 1, OK)
        for transfer_id, rank, outcome in (
            (transfer.transfer_id, 1, FAILED),
            (transfer.transfer_id, 0, OK),
            (transfer.transfer_id, 2, OK),
            (transfer.transfer_id + 1, 1, OK),
        ):
            with pytest.raises(UsageError):
                case.kv.report(transfer_id, rank, outcome)
        assert case.kv.snapshot() == before
        case.backend.complete()
        await lease.ready()
        with pytest.raises(UsageError):
            case.kv.report(transfer.transfer_id, 1, OK)
        lease.release()
        await assert_nothing_left(case)


async def test_a_report_from_another_thread_is_refused() -> None:
    async with opened() as case:
        errors: list[Exception] = []

        def report() -> None:
            try:
                case.kv.report(1, 1, OK)
            except UsageError as error:
                errors.append(error)

        thread = threading.Thread(target=report)
        thread.start()
        thread.join()
        assert len(errors) == 1


async def test_a_rank_that_is_lost_costs_the_cpu_tier_and_serving_goes_on() -> None:
    """A queued or untaken transfer was started nowhere: only what the rank was told of is quarantined."""
    async with opened(gpu_blocks=17) as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        make_resident(case.kv, prompt(2, seed=1), {GROUP: "cc"})
        first = asyncio.create_task(case.kv.acquire("first", prompt(3)))
        await a_load(case)
        second = asyncio.create_task(case.kv.acquire("second", prompt(2, seed=1)))
        await until(lambda: len(case.backend.pending) == 2)
        case.kv.lose_rank(1)
        case.backend.complete_all()
        for task in (first, second):
            lease = await asyncio.wait_for(task, 10.0)
            assert lease.prefix_tokens == 0
            lease.confirm(2 * BLOCK)
            lease.finish()
        await asyncio.wait_for(case.kv.drain(), 10.0)
        snapshot = case.kv.snapshot()
        assert snapshot.cpu is not None
        assert (snapshot.gpu.quarantined, snapshot.cpu.quarantined) == (3, 3)
        assert len(case.backend.history) == 2, "nothing is copied any more"
        assert Scrape(case.kv.collector)("aiokv_degraded", reason="backend_lost") == 1
        with pytest.raises(UsageError):
            case.kv.lose_rank(0)
        assert_nothing_held(case.kv)


# In between, and the end.


async def test_a_request_cancelled_between_two_reports_leaves_valid_blocks() -> None:
    """Law 4."""
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        waiting = asyncio.create_task(case.kv.acquire("cancelled", prompt(3)))
        transfer = await a_load(case)
        case.backend.complete()
        await turns(2)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert case.kv.snapshot().gpu.reserved == 3
        case.kv.report(transfer.transfer_id, 1, OK)
        async with case.kv.acquire("again", prompt(3)) as lease:
            assert lease.delivered.gpu_tokens == 3 * BLOCK
        await assert_nothing_left(case)


async def test_a_reset_between_two_reports_registers_nothing() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        transfer = await a_load(case)
        case.kv.report(transfer.transfer_id, 1, OK)
        await case.kv.reset()
        case.backend.complete()
        await lease.ready()
        lease.release()
        await case.kv.drain()
        assert case.kv.snapshot().gpu.resident == 0
        await assert_nothing_left(case)


async def test_aclose_waits_for_a_late_rank_and_ends_the_stream() -> None:
    kv = runtime_of(backend := FakeBackend())
    await kv.open()
    make_resident(kv, prompt(3), {GROUP: "ccc"})
    granted(kv, prompt(3)).release()
    stream = kv.transfers()
    transfer = await anext(stream)
    backend.complete()
    closing = asyncio.create_task(kv.aclose())
    await turns(10)
    assert not closing.done()
    kv.report(transfer.transfer_id, 1, OK)
    await closing
    assert [late async for late in stream] == []
    assert_nothing_held(kv)
    assert kv.snapshot().gpu.quarantined == 0


async def test_a_rank_that_never_reports_is_named_at_close_and_its_slots_are_quarantined(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv = runtime_of(backend := FakeBackend(), close_grace_s=0.0)
    await kv.open()
    make_resident(kv, prompt(3), {GROUP: "ccc"})
    granted(kv, prompt(3)).release()
    transfer = await anext(kv.transfers())
    backend.complete()
    await turns(2)
    with caplog.at_level(logging.ERROR):
        await kv.aclose()
    assert "ranks [1] never reported" in caplog.text
    assert kv.snapshot().gpu.quarantined == 3
    assert_nothing_held(kv)
    with pytest.raises(UsageError):
        kv.report(transfer.transfer_id, 1, OK)


@pytest.mark.parametrize("outcome", [FAILED, LOST])
async def test_a_rank_that_fails_during_the_close_lets_it_end(outcome: Outcome) -> None:
    """Its last report ends the drain; only what is lost stays out of use."""
    kv = runtime_of(backend := FakeBackend())
    await kv.open()
    make_resident(kv, prompt(3), {GROUP: "ccc"})
    granted(kv, prompt(3)).release()
    transfer = await anext(kv.transfers())
    closing = asyncio.create_task(kv.aclose())
    await turns(3)
    backend.complete()
    await turns(3)
    assert not closing.done()
    kv.report(transfer.transfer_id, 1, outcome)
    await asyncio.wait_for(closing, 10.0)
    assert_nothing_held(kv)
    assert kv.snapshot().gpu.quarantined == (3 if outcome is LOST else 0)


async def test_a_rank_that_is_gone_during_the_close_lets_it_end() -> None:
    kv = runtime_of(backend := FakeBackend())
    await kv.open()
    make_resident(kv, prompt(3), {GROUP: "ccc"})
    granted(kv, prompt(3)).release()
    await anext(kv.transfers())
    closing = asyncio.create_task(kv.aclose())
    await turns(3)
    kv.lose_rank(1)
    backend.complete()
    await asyncio.wait_for(closing, 10.0)
    assert_nothing_held(kv)
    assert kv.snapshot().gpu.quarantined == 3


async def test_a_transfer_that_nobody_took_is_withdrawn_at_close_and_loses_no_slot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv = runtime_of(backend := FakeBackend(), close_grace_s=0.0)
    await kv.open()
    make_resident(kv, prompt(3), {GROUP: "ccc"})
    granted(kv, prompt(3)).release()
    backend.complete()
    await turns(2)
    with caplog.at_level(logging.ERROR):
        await kv.aclose()
    assert not [record for record in caplog.records if record.name.startswith("aiokv")]
    assert kv.snapshot().gpu.quarantined == 0
    assert_nothing_held(kv)


# Who copies.


async def test_one_runtime_that_owns_all_arenas_needs_no_reports() -> None:
    async with opened(world_size=4, remote_ranks=()) as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        case.backend.complete()
        await lease.ready()
        assert case.kv.core.counters.rank_reports[OK] == 4
        with pytest.raises(UsageError, match="local"):
            case.kv.transfers()
        lease.release()
        await case.kv.drain()
        assert_nothing_held(case.kv)
        await case.kv.aclose()
        case.backend.complete_all()


async def test_a_runtime_without_ranks_of_its_own_copies_nothing_itself() -> None:
    config = RuntimeConfig(
        geometry=GEOMETRY, gpu_blocks=9, cpu_blocks=8, watermark=0.0, world_size=2, remote_ranks=range(2)
    )
    async with KVRuntime(config) as kv:
        make_resident(kv, prompt(3), {GROUP: "ccc"})
        lease = granted(kv, prompt(3))
        (transfer,) = kv.transfers().take()
        await turns(5)
        assert lease.state is LeaseState.LOADING
        for rank in (1, 0):
            kv.report(transfer.transfer_id, rank, OK)
        await lease.ready()
        assert lease.delivered.cpu_tokens == 3 * BLOCK
        lease.release()
        await kv.drain()
        assert_nothing_held(kv)


@pytest.mark.parametrize(
    "settings",
    [
        {"world_size": 0},
        {"world_size": True},
        {"world_size": "2"},
        {"remote_ranks": (2,)},
        {"remote_ranks": (-1,)},
        {"remote_ranks": (1, 1)},
        {"remote_ranks": 1},
        {"remote_ranks": (0, 1)},
    ],
    ids=str,
)
def test_ranks_that_make_no_runtime(settings: dict[str, Any]) -> None:
    """The last one: a backend object that would have nothing to copy."""
    with pytest.raises(ConfigError):
        config_of(**{"world_size": 2} | settings)


async def test_tensors_in_a_runtime_without_ranks_of_its_own_are_refused() -> None:
    config = RuntimeConfig(geometry=GEOMETRY, gpu_blocks=9, cpu_blocks=8, world_size=1, remote_ranks=(0,))
    with pytest.raises(ConfigError, match="remote"):
        await KVRuntime(config, arenas={GROUP: [np.zeros((9, 64), np.uint8)]}).open()


async def test_reports_and_stragglers_are_counted() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        transfer = await a_load(case)
        case.backend.complete()
        await turns(2)
        shown = Scrape(case.kv.collector)
        assert shown("aiokv_transfers_partly_reported") == 1
        assert shown("aiokv_transfer_inflight_blocks", direction="load") == 3
        case.kv.report(transfer.transfer_id, 1, FAILED)
        shown = Scrape(case.kv.collector)
        assert shown("aiokv_transfers_partly_reported") == 0
        assert shown("aiokv_rank_reports_total", outcome="ok") == 1
        assert shown("aiokv_rank_reports_total", outcome="error") == 1
        assert shown("aiokv_transfer_blocks_total", direction="load", outcome="error") == 3
        lease.release()
        await assert_nothing_left(case)


# Real bytes.


async def make_copies(kv: KVRuntime, worker: HostBackend) -> None:
    """What the process of rank 1 does: the same copies in its own arenas."""
    outcomes = {EventStatus.DONE: OK, EventStatus.FAILED: FAILED, EventStatus.LOST: LOST}
    async for transfer in kv.transfers():
        event = worker.submit(transfer.batch)
        await until(lambda event=event: event.query() is not EventStatus.PENDING)  # type: ignore[misc]  # bound now
        kv.report(transfer.transfer_id, 1, outcomes[event.query()])


async def test_blocks_come_back_on_every_rank_byte_for_byte() -> None:
    arenas = [np.zeros((9, 2, 64), np.uint8) for _ in range(2)]
    worker = HostBackend()
    worker.open(Layout(geometry=GEOMETRY, gpu_blocks=9, cpu_blocks=8, arenas={GROUP: [arenas[1]]}))
    config = config_of(backend=HostBackend(), cpu_blocks=8, watermark=0.0, world_size=2, remote_ranks=(1,))
    kv = KVRuntime(config, arenas={GROUP: [arenas[0]]})
    async with kv:
        copying = asyncio.create_task(make_copies(kv, worker))
        async with kv.acquire("compute", prompt(3)) as lease:
            for position, slot in enumerate(lease.block_table(GROUP)[:3]):
                for rank, arena in enumerate(arenas):
                    arena[slot] = 100 * rank + position + 1
            lease.confirm(3 * BLOCK)
        await kv.drain()
        evict(kv, prompt(3), {GROUP: range(3)}, tier=Tier.GPU)
        for arena in arenas:
            arena[1:] = 0xEE
        async with kv.acquire("again", prompt(3)) as lease:
            assert lease.delivered.cpu_tokens == 3 * BLOCK
            for rank, arena in enumerate(arenas):
                found = [np.unique(arena[slot]).tolist() for slot in lease.block_table(GROUP)[:3]]
                assert found == [[100 * rank + position + 1] for position in range(3)]
    await copying
    assert await asyncio.to_thread(worker.close, deadline_s=10.0)
