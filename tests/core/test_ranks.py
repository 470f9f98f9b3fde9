"""Reports of ranks: who ends a transfer, how, and when its slots go back (laws 3 and 4, invariants 4 and 10)."""

from __future__ import annotations

from itertools import permutations

import pytest

from aiokv.core.cache import CacheState
from aiokv.core.inflight import Transfer, TransferState
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.errors import ConfigError, UsageError
from aiokv.model.ids import Direction, Tier
from aiokv.model.plan import Outcome
from aiokv.model.spec import FullAttention
from aiokv.testing.host import Host, state_of
from aiokv.testing.streams import geometry_of

FULL = geometry_of(FullAttention("full", block_size=4))
GPU, CPU = Tier.GPU, Tier.CPU
OK, FAILED, LOST = Outcome.OK, Outcome.FAILED, Outcome.LOST


def host(*, world_size: int = 3, gpu: int = 32, slice_blocks: int = 1024) -> Host:
    return Host(FULL, gpu_blocks=gpu, cpu_blocks=32, slice_blocks=slice_blocks, world_size=world_size)


def loading(h: Host) -> tuple[LeaseRecord, Transfer]:
    """A request whose four blocks are being loaded on every rank."""
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 17)
    h.submit_all()
    (load,) = h.running
    return record, load


def reserved(h: Host) -> tuple[int, int]:
    return h.counts(GPU).reserved, h.counts(CPU).reserved


@pytest.mark.parametrize("order", [*permutations(range(3))], ids=str)
def test_a_load_has_ended_when_every_rank_has_reported_it_in_any_order(order: tuple[int, ...]) -> None:
    h = host()
    record, load = loading(h)
    for told, rank in enumerate(order):
        assert h.cache.missing_ranks(load) == tuple(sorted(order[told:]))
        assert state_of(record) is LeaseState.LOADING
        assert h.letters(0).startswith("cccc"), "law 3: nothing is findable before the last rank"
        assert h.cache.partly_reported == bool(told)
        h.report(load, rank)
        h.check()
    assert state_of(record) is LeaseState.READY
    assert h.letters(0).startswith("bbbb")
    assert h.cache.partly_reported == 0
    assert h.cache.counters.rank_reports == {OK: 3, Outcome.CORRUPT: 0, FAILED: 0, LOST: 0}
    h.tear_down()


def test_a_world_of_one_needs_one_report() -> None:
    h = host(world_size=1)
    record, load = loading(h)
    h.report(load, 0)
    assert state_of(record) is LeaseState.READY
    h.tear_down()


def test_one_rank_late_by_many_steps_keeps_its_slots_and_holds_nobody_else_up() -> None:
    h = host()
    record, load = loading(h)
    h.report(load, 2)
    h.report(load, 0)
    held = h.cache.audit().pins
    for step in range(20):
        other = h.admit(1, 9, request_id=f"step {step}")
        h.confirm(other, 9)
        h.finish(other)
        h.turn()
        h.submit_all()
        for transfer in [running for running in h.running if running is not load]:
            for rank in (1, 2, 0):
                h.report(transfer, rank)
        h.check()
    assert state_of(record) is LeaseState.LOADING
    assert set(held) <= set(h.cache.audit().pins)
    h.report(load, 1)
    assert state_of(record) is LeaseState.READY
    h.tear_down()


@pytest.mark.parametrize("failing", range(3))
def test_one_failed_rank_decides_and_the_slots_go_back_after_the_last_report(failing: int) -> None:
    """Law 4: while another rank may still write its part, the targets are nobody else's."""
    h = host()
    record, load = loading(h)
    before = reserved(h)
    outcomes = [FAILED if rank == failing else OK for rank in range(3)]
    for rank in (0, 1):
        h.report(load, rank, outcome=outcomes[rank])
        assert reserved(h) == before
        assert state_of(record) is LeaseState.LOADING
    h.report(load, 2, outcome=outcomes[2])
    h.turn()
    assert state_of(load) is TransferState.FAILED
    assert state_of(record) is LeaseState.READY
    assert (record.length, record.delivered.compute_tokens) == (0, 17)
    assert h.letters(0).startswith("cccc"), "the CPU copy stays"
    h.tear_down()


def test_a_store_that_failed_on_one_rank_is_findable_nowhere_and_may_be_tried_again() -> None:
    h = host(world_size=2)
    record = h.admit(0, 17)
    h.confirm(record, 17)
    h.turn()
    h.submit_all()
    (store,) = h.running
    h.report(store, 1, outcome=FAILED)
    h.report(store, 0)
    h.turn()
    assert h.letters(0).startswith("gggg")
    assert h.counts(CPU).free == 32
    h.finish(record)
    h.admit(0, 17, request_id="again")
    h.end_all()
    assert h.letters(0).startswith("bbbb")
    h.tear_down()


def test_a_request_that_comes_after_the_first_failure_does_not_join_the_doomed_load() -> None:
    h = host(world_size=2, gpu=64)
    first, doomed = loading(h)
    joined = h.admit(0, 17, request_id="joined")
    assert h.in_flight(direction=Direction.LOAD) == [doomed]
    h.report(doomed, 0, outcome=FAILED)
    late = h.admit(0, 17, request_id="late")
    h.submit_all()
    h.check()
    (fresh,) = [transfer for transfer in h.running if transfer is not doomed]
    third = h.admit(0, 17, request_id="joins the second load")
    h.report(doomed, 1)
    h.turn()
    h.check()
    fourth = h.admit(0, 17, request_id="joins it after the first has ended")
    assert [t for t in h.in_flight(direction=Direction.LOAD) if fourth.lease_id in t.waiters] == [fresh]
    for rank in (1, 0):
        h.report(fresh, rank)
    h.turn()
    assert [record.delivered.cpu_tokens for record in (late, third, fourth)] == [16, 16, 16]
    h.end_all()
    assert {state_of(record) for record in (first, joined)} == {LeaseState.READY}
    h.tear_down()


@pytest.mark.parametrize("outcomes", [(LOST, OK, OK), (FAILED, LOST, OK), (OK, FAILED, LOST)], ids=str)
def test_a_lost_rank_decides_lost_whatever_the_others_say(outcomes: tuple[Outcome, ...]) -> None:
    h = host()
    record, load = loading(h)
    for rank, outcome in enumerate(outcomes):
        assert h.counts(GPU).quarantined == 0
        h.report(load, rank, outcome=outcome)
        assert h.cache.is_backend_lost == (LOST in outcomes[: rank + 1])
    h.turn()
    assert (h.counts(GPU).quarantined, h.counts(CPU).quarantined) == (4, 4)
    assert state_of(record) is LeaseState.READY
    assert record.length == 0
    h.check()
    h.tear_down()


def test_the_same_report_twice_counts_once() -> None:
    h = host(world_size=2)
    record, load = loading(h)
    h.report(load, 1)
    before = h.cache.snapshot()
    for _ in range(3):
        h.cache.report(load.transfer_id, 1, OK)
    assert h.cache.snapshot() == before
    assert h.cache.counters.rank_reports[OK] == 1
    assert state_of(record) is LeaseState.LOADING
    h.report(load, 0)
    assert state_of(record) is LeaseState.READY
    h.tear_down()


@pytest.mark.parametrize(
    ("rank", "outcome"),
    [(1, FAILED), (1, LOST), (2, OK), (-1, OK), (True, OK), ("0", OK), (0, Outcome.DROPPED), (0, "ok")],
    ids=str,
)
def test_a_report_that_no_rank_may_make_changes_nothing(rank: int, outcome: Outcome) -> None:
    """Rank 1 has said OK: another outcome is a contradiction."""
    h = host(world_size=2)
    _, load = loading(h)
    h.report(load, 1)
    before = h.cache.snapshot()
    with pytest.raises(UsageError):
        h.cache.report(load.transfer_id, rank, outcome)
    assert h.cache.snapshot() == before
    h.tear_down()


def test_a_transfer_that_is_unknown_queued_or_ended_cannot_be_reported() -> None:
    h = host(world_size=2, slice_blocks=1)
    h.place(0, range(4), tier=CPU)
    h.admit(0, 17)
    h.run_slices()
    (load,) = h.queued

    def refused(transfer_id: int) -> None:
        before = h.cache.snapshot()
        with pytest.raises(UsageError):
            h.cache.report(transfer_id, 0, OK)
        assert h.cache.snapshot() == before

    refused(load.transfer_id)
    refused(load.transfer_id + 1)
    h.submit_all()
    h.report(load, 1)
    h.report(load, 0)
    assert h.cache.unfinished_transfers == 1, "it is completed in slices"
    refused(load.transfer_id)
    h.run_slices()
    refused(load.transfer_id)
    h.tear_down()


def test_an_abandoned_load_is_registered_after_the_last_report() -> None:
    h = host()
    record, load = loading(h)
    h.report(load, 0)
    h.release(record)
    assert reserved(h)[0] == 4, "law 4: the copy owns its blocks"
    for rank in (2, 1):
        h.report(load, rank)
    assert h.letters(0).startswith("bbbb")
    h.tear_down()


@pytest.mark.parametrize("tiers", [(GPU,), (CPU,), (GPU, CPU)], ids=str)
def test_a_reset_between_two_reports_registers_nothing(tiers: tuple[Tier, ...]) -> None:
    """Invariant 4."""
    h = host(world_size=2)
    record, load = loading(h)
    h.report(load, 0)
    h.reset(*tiers)
    h.run_slices()
    h.check()
    h.report(load, 1)
    assert "g" not in h.letters(0)
    assert "b" not in h.letters(0)
    assert state_of(record) is LeaseState.READY
    h.tear_down()


def test_transfers_may_end_in_any_order_across_ranks() -> None:
    """Invariant 10: rank 0 is fast on the first, rank 1 on the second transfer."""
    h = host(world_size=2)
    h.place(0, range(4), tier=CPU)
    h.place(1, range(4), tier=CPU)
    records = [h.admit(0, 17), h.admit(1, 17)]
    h.submit_all()
    first, second = h.running
    h.report(first, 0)
    h.report(second, 1)
    assert h.cache.partly_reported == 2
    h.report(second, 0)
    assert [state_of(record) for record in records] == [LeaseState.LOADING, LeaseState.READY]
    h.report(first, 1)
    assert [state_of(record) for record in records] == [LeaseState.READY, LeaseState.READY]
    h.tear_down()


def test_complete_speaks_for_every_rank_that_has_not_reported() -> None:
    h = host()
    record, load = loading(h)
    h.report(load, 1, outcome=FAILED)
    h.end(load, OK)
    assert state_of(load) is TransferState.FAILED
    assert h.cache.partly_reported == 0
    h.end_all()
    assert state_of(record) is LeaseState.READY
    h.tear_down()


def test_a_rank_that_is_gone_loses_what_it_has_not_reported_and_no_more() -> None:
    h = host(world_size=2)
    h.place(0, range(4), tier=CPU)
    h.place(1, range(3), tier=CPU)
    records = [h.admit(0, 17), h.admit(1, 13)]
    h.submit_all()
    first, second = h.running
    h.report(first, 1)
    h.cache.lose_rank(1)
    h.cache.lose_rank(1)
    assert h.cache.is_backend_lost
    assert (h.cache.missing_ranks(first), h.cache.missing_ranks(second)) == ((0,), (0,))
    with pytest.raises(UsageError):
        h.cache.lose_rank(2)
    h.report(first, 0)
    assert state_of(records[0]) is LeaseState.READY
    assert h.letters(0).startswith("bbbb")
    h.reports[second.transfer_id] = {1: LOST}
    h.report(second, 0)
    h.turn()
    assert state_of(records[1]) is LeaseState.READY
    assert h.counts(GPU).quarantined == 3
    h.tear_down()


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_without_ranks_makes_no_cache(world_size: int) -> None:
    with pytest.raises(ConfigError):
        CacheState(FULL, gpu_blocks=8, world_size=world_size)
