"""A wake-up costs the same however many transfers are in flight: as soon after the end of its copy, and as much CPU."""

from __future__ import annotations

from contextlib import AsyncExitStack
from statistics import median

import pytest

from aiokv import run
from aiokv.cli.bench.bridge.rounds import WakeUps, opened_crowd
from aiokv.cli.bench.bridge.settings import BUDGET, BridgeSettings
from aiokv.cli.bench.garbage import collections_off

DEGRADED = 2 * BUDGET
FEW, MANY = 1, 2_000
ENOUGH_ROUNDS, MOST_ROUNDS = 2, 8
SETTINGS = BridgeSettings(completions=50, copy_us=20_000)


def latency(found: list[WakeUps]) -> float:
    return min(median(one.latencies_s) for one in found)


def loop_time(found: list[WakeUps]) -> float:
    return min(one.loop_s for one in found)


async def wake_ups_until_as_cheap() -> dict[int, list[WakeUps]]:
    """Rounds with few and with many in flight in turn; some more where the machine is busy with other things."""
    seen: dict[int, list[WakeUps]] = {FEW: [], MANY: []}
    async with AsyncExitStack() as stack:
        crowds = {size: await stack.enter_async_context(opened_crowd(size, settings=SETTINGS)) for size in seen}
        for rounds in range(1, MOST_ROUNDS + 1):
            for size, crowd in crowds.items():
                seen[size].append(await crowd.run_round())
            is_as_cheap = all(judge(seen[MANY]) <= DEGRADED * judge(seen[FEW]) for judge in (latency, loop_time))
            if rounds >= ENOUGH_ROUNDS and is_as_cheap:
                break
    return seen


@pytest.mark.timeout(300)
def test_a_wake_up_with_thousands_in_flight_is_like_one_with_a_single_one() -> None:
    with collections_off():
        seen = run(wake_ups_until_as_cheap())
    assert all(one.least_in_flight == size for size, found in seen.items() for one in found)
    assert latency(seen[MANY]) <= DEGRADED * latency(seen[FEW])
    assert loop_time(seen[MANY]) <= DEGRADED * loop_time(seen[FEW])
