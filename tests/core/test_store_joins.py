"""Stores that several want: one copy, dropped only when all who want it have left before it is submitted."""

from __future__ import annotations

from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import LeaseRecord
from aiokv.model.ids import Direction, Tier
from aiokv.model.plan import DeclineReason, Outcome
from aiokv.model.spec import FullAttention
from aiokv.testing.host import Host
from aiokv.testing.streams import geometry_of

FULL = geometry_of(FullAttention("full", block_size=4))


def host() -> Host:
    return Host(FULL, gpu_blocks=32, cpu_blocks=32)


def joined() -> tuple[Host, LeaseRecord, LeaseRecord]:
    """Two leases of one prompt: the second wants the blocks whose store the first has begun."""
    h = host()
    first = h.admit(0, 17)
    h.confirm(first, 17)
    h.run_slices()
    second = h.admit(0, 17)
    h.run_slices()
    return h, first, second


def store_of(h: Host) -> Transfer:
    (store,) = h.in_flight(direction=Direction.STORE)
    return store


def stored(h: Host) -> int:
    return h.cache.counters.transferred_blocks[Direction.STORE, Outcome.OK]


def test_who_joined_a_queued_store_keeps_it_when_the_first_leaves() -> None:
    h, first, second = joined()
    assert store_of(h).waiters == {first.lease_id, second.lease_id}
    assert h.cache.counters.store_skipped_blocks[DeclineReason.IN_FLIGHT] == 4
    h.release(first)
    h.check()
    h.end_all()
    assert h.letters(0)[:4] == "bbbb"
    assert stored(h) == 4
    h.tear_down()


def test_a_queued_store_that_all_have_left_is_dropped() -> None:
    h = host()
    leases = [h.admit(0, 17)]
    h.confirm(leases[0], 17)
    h.run_slices()
    leases += [h.admit(0, 17), h.admit(0, 17)]
    h.run_slices()
    for lease in leases:
        assert h.in_flight(direction=Direction.STORE)
        h.release(lease)
        h.check()
    assert not h.in_flight(direction=Direction.STORE)
    assert h.letters(0)[:4] == "gggg"
    h.tear_down()


def test_a_store_of_one_who_finished_is_not_dropped_with_one_who_joined() -> None:
    h, first, second = joined()
    h.finish(first)
    h.release(second)
    h.check()
    h.end_all()
    assert h.letters(0)[:4] == "bbbb"
    h.tear_down()


def test_a_store_that_nobody_asked_for_is_not_dropped_with_one_who_hit_its_blocks() -> None:
    """A hole is filled for whoever comes; a request that comes and goes meanwhile takes nothing away."""
    h = host()
    runs = h.admit(0, 17)
    h.confirm(runs, 17)
    h.end_all()
    h.evict(0, [1, 2], tier=Tier.CPU)
    other = h.admit(1, 5)
    h.confirm(other, 5)
    h.run_slices()
    assert sorted(map(len, h.in_flight(direction=Direction.STORE))) == [1, 2]
    passing = h.admit(0, 17)
    h.run_slices()
    h.release(passing)
    h.check()
    h.end_all()
    assert h.letters(0)[:4] == "bbbb"
    h.tear_down()


def test_a_store_that_ended_is_no_more_of_those_who_joined() -> None:
    """They leave later, when the store is gone."""
    h, first, second = joined()
    h.end_all()
    for lease in (second, first):
        h.release(lease)
        h.check()
    h.tear_down()
