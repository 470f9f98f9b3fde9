"""Host copies of large blocks are about as fast as a plain memcpy, in CPU time of the copying thread and in one run."""

from __future__ import annotations

import sys

import pytest

from aiokv.cli.bench.copy.settings import BUDGET, BUDGET_FROM_BYTES, Adjacency
from aiokv.cli.bench.copy.world import opened_world
from aiokv.model.ids import Direction

DEGRADED = BUDGET / 2
ENOUGH_ROUNDS, MOST_ROUNDS = 3, 12


@pytest.mark.parametrize("adjacency", list(Adjacency), ids=lambda adjacency: adjacency.value)
@pytest.mark.parametrize("direction", list(Direction), ids=lambda direction: direction.value)
def test_a_large_block_is_copied_at_no_less_than_half_the_budget(direction: Direction, adjacency: Adjacency) -> None:
    """The best rounds of both are compared, as what else runs on the machine only takes; a few more where it does."""
    plain, copied = [], []
    with opened_world(block_bytes=BUDGET_FROM_BYTES, round_bytes=16 << 20) as world:
        for rounds in range(1, MOST_ROUNDS + 1):
            plain.append(world.plain(direction).cpu_seconds)
            copied.append(world.copy(direction, adjacency).cpu_seconds)
            if rounds >= ENOUGH_ROUNDS and min(plain) >= DEGRADED * min(copied):
                return
    raise AssertionError(f"{min(plain) / min(copied):.2f} of a plain memcpy, the budget is {BUDGET}")


def test_scattered_copies_go_on_while_another_thread_wants_the_gil_all_the_time() -> None:
    """Row by row each would wait for the interval at which Python takes the GIL away, and one copy for hundreds."""
    with opened_world(block_bytes=BUDGET_FROM_BYTES, round_bytes=32 << 20) as world:
        shared = min(world.shared_copy(Direction.STORE, Adjacency.SCATTERED).seconds for _ in range(3))
        assert shared < world.blocks * sys.getswitchinterval() / 4
