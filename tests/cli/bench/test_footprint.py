"""`aiokv bench memory`: pools are really filled, and what they cost is the growth of a process."""

from __future__ import annotations

import json

import pytest

from aiokv.cli.bench.footprint.filling import fill, new_cache
from aiokv.cli.bench.footprint.runner import complaints_about
from aiokv.model.ids import Tier
from tests.cli.test_main import run

POOLS = ("gpu", "cpu", "gpu_with_events")


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("slots", [1, 700, 9000])
def test_a_pool_is_filled_whatever_its_size(tier: Tier, slots: int) -> None:
    cache = new_cache(tier, slots=slots)
    assert cache.pools()[tier].free == slots
    assert fill(cache, tier) == slots
    assert cache.live_leases == cache.unfinished_transfers == 0
    assert not cache.audit().violations


def test_each_pool_is_measured_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    slots = 250_000  # so many that what else a process allocates is little beside them
    status = run("bench", "memory", "--slots", str(slots), "--json")
    report = json.loads(capsys.readouterr().out)
    assert status == (0 if report["ok"] else 1)
    for pool in POOLS:
        seen = report[pool]
        assert seen["resident"] == seen["slots"] == slots
        assert 60 < seen["bytes_per_resident_slot"], "a digest and where it lies cannot take less"
        assert seen["bytes_per_resident_slot"] - seen["bytes_per_empty_slot"] > 32
    more = report["gpu_with_events"]["bytes_per_resident_slot"] - report["gpu"]["bytes_per_resident_slot"]
    assert more > 48, "of tokens alone there are 64 bytes a block"


def seen(**changes: float) -> dict[str, float]:
    return {"slots": 10, "resident": 10, "bytes_per_empty_slot": 40.0, "bytes_per_resident_slot": 200.0} | changes


def test_budgets_are_per_slot_and_events_may_cost_four_bytes_a_token_more() -> None:
    figures = {"gpu": seen(), "cpu": seen(), "gpu_with_events": seen(bytes_per_resident_slot=264.0)}
    assert complaints_about(figures) == ()
    broken = {
        "gpu": seen(bytes_per_empty_slot=40.5),
        "cpu": seen(resident=9),
        "gpu_with_events": seen(bytes_per_resident_slot=264.5),
    }
    assert complaints_about(broken) == (
        "gpu: bytes_per_empty_slot is 40.5, over 40",
        "cpu: 9 of 10 slots are resident",
        "gpu_with_events: bytes_per_resident_slot is 264.5, over 264",
    )


def test_pools_that_no_machine_can_hold_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "memory", "--slots", str(10**13), "--json") == 2
    assert "are available" in capsys.readouterr().err
