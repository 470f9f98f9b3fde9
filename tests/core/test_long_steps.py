"""Law 8: what hangs on one step and can be many goes on in slices. Judged by counts: how much each slice does."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest

from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.model.ids import Direction, Tier
from aiokv.model.plan import Outcome
from aiokv.model.spec import FullAttention
from aiokv.testing.host import Host
from aiokv.testing.streams import geometry_of

FULL: Final = geometry_of(FullAttention("full", block_size=4))
SLICE: Final = 64


def crowd(count: int) -> tuple[Host, list[LeaseRecord]]:
    """So many leases that wait for one load of 8 blocks, which is running."""
    h = Host(FULL, gpu_blocks=40 + 10 * count, cpu_blocks=8, slice_blocks=SLICE)
    h.place(0, range(8), tier=Tier.CPU)
    records = [h.admit(0, 33) for _ in range(count)]
    h.run_slices()
    h.submit_all()
    return h, records


def ready(records: list[LeaseRecord]) -> int:
    return sum(record.state is LeaseState.READY for record in records)


def told(records: list[LeaseRecord]) -> int:
    return sum(not record.waiting for record in records)


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.FAILED])
def test_those_who_wait_for_one_load_are_told_some_a_slice_and_all_in_the_end(outcome: Outcome) -> None:
    h, records = crowd(40)
    (load,) = h.in_flight(direction=Direction.LOAD)
    h.end(load, outcome)
    counts = [0, told(records)]
    while h.cache.has_work:
        h.cache.run_slice()
        h.check()
        counts.append(told(records))
    assert 1 <= max(np.diff(counts)) <= SLICE // 8
    assert (told(records), ready(records)) == (40, 40)
    h.tear_down()


def test_who_leaves_while_others_are_told_is_passed_over() -> None:
    h, records = crowd(40)
    (load,) = h.in_flight(direction=Direction.LOAD)
    h.end(load, Outcome.FAILED)
    h.cache.run_slice()
    assert records[-1].waiting
    h.release(records[-1])
    h.check()
    assert records[-1].lease_id not in load.waiters
    h.run_slices()
    assert ready(records[:-1]) == 39
    h.check()
    h.tear_down()
