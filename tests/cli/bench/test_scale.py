"""`aiokv bench scale`: the same work in pools of every size, and a block that costs too much in large ones is told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from aiokv.cli.bench.cases import Case, Layout, Model, Operation
from aiokv.cli.bench.operations import BenchWorld, open_case
from aiokv.cli.bench.scale.runner import MOST_RATIO, Measured, complaints_about
from aiokv.cli.bench.scale.settings import MEASURED, ScaleSettings
from aiokv.errors import ConfigError
from tests.cli.test_main import run

BLOCKS, REPEATS = 8, 3
SIZES = (60, 200, 600)
ARGUMENTS = ("--blocks", str(BLOCKS), "--repeats", str(REPEATS), *(f"--pool-slots={slots}" for slots in SIZES))
SMALLEST = Case(operation=Operation.LOOKUP, layout=Layout.CPU, model=Model.FULL, blocks=BLOCKS, pool_slots=60)


def sweep_of(operation: Operation, layout: Layout) -> list[tuple[int, int]]:
    """Slots and prompts in turn: every size as the smallest, and larger ones as they themselves allow."""
    settings = ScaleSettings(pool_slots=SIZES, blocks=BLOCKS)
    (sweep,) = [
        sweep for sweep in settings.sweeps() if (sweep.base.operation, sweep.base.layout) == (operation, layout)
    ]
    return [(case.pool_slots, case.rounds_in_turn) for case in sweep.cases]


def test_sizes_are_alike_in_prompts_and_larger_ones_are_measured_with_more_too() -> None:
    assert sweep_of(Operation.LOOKUP, Layout.GPU) == [(60, 1), (200, 1), (600, 1), (200, 5), (600, 16)]
    assert sweep_of(Operation.STORE, Layout.MISS) == [(60, 1), (200, 1), (600, 1)]


def test_prompts_come_back_after_as_many_as_half_a_pool_holds_or_fewer() -> None:
    large = replace(SMALLEST, pool_slots=200)
    assert (SMALLEST.rounds_in_turn, large.rounds_in_turn) == (1, 5)
    assert replace(large, most_prompts=2).rounds_in_turn == 2
    assert replace(large, most_prompts=1, requests=2).rounds_in_turn == 1
    with pytest.raises(ConfigError, match="at least one prompt"):
        replace(large, most_prompts=0)


@pytest.mark.parametrize("prompts", [1, 3, 5])
def test_as_many_prompts_are_computed_as_come_back(prompts: int) -> None:
    world = BenchWorld(Model.FULL, pool_slots=200)
    world.fill(lambda _done: None)
    case = replace(SMALLEST, pool_slots=200, most_prompts=prompts)
    counters = world.cache.counters
    before = sum(counters.lookups.values())
    bench = open_case(case, world=world)
    assert sum(counters.lookups.values()) - before == 2 * prompts, "each, and the one that leads it in"
    for _ in range(2 * prompts):
        assert bench.run_round() > 0


def test_every_operation_is_measured_in_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    status = run("bench", "scale", *ARGUMENTS, "--json")
    report = json.loads(capsys.readouterr().out)
    assert status == (0 if report["ok"] else 1)
    assert (report["benchmark"], report["blocks"], report["repeats"]) == ("scale", BLOCKS, REPEATS)
    measured = [(case["operation"], case["layout"], case["pool_slots"]) for case in report["cases"]]
    assert measured == [
        (operation.value, layout.value, slots)
        for operation, layout in MEASURED
        for slots in (*SIZES, *(() if layout is Layout.MISS else SIZES[1:]))
    ]
    for case in report["cases"]:
        assert 0 < case["p10"] <= case["us_per_block"] <= case["p90"]
        is_smallest = case["pool_slots"] == SIZES[0]
        base = next(
            other
            for other in report["cases"]
            if (other["operation"], other["layout"]) == (case["operation"], case["layout"])
        )
        assert case["ratio"] == pytest.approx(case["us_per_block"] / base["us_per_block"], rel=0.02)
        assert case["ratio"] == 1.0 or not is_smallest
        assert (case["prompts_in_turn"] == 0) is (case["layout"] == "miss")
    assert len(report["complaints"]) == sum(case["ratio"] > MOST_RATIO for case in report["cases"])


def test_people_read_a_row_per_operation_and_a_column_per_size(capsys: pytest.CaptureFixture[str]) -> None:
    run("bench", "scale", *ARGUMENTS)
    lines = capsys.readouterr().out.splitlines()
    assert ["operation", "60", "200", "600"] in [line.split() for line in lines]
    rows = {line.split("  ")[0]: line.count("x ") + line.rstrip().endswith("x") for line in lines}
    assert (rows["lookup gpu"], rows["lookup gpu, many prompts"], rows["store miss"]) == (3, 2, 3)


def measured(*, ratio: float) -> Measured:
    large = replace(SMALLEST, pool_slots=600)
    return Measured(case=large, base=SMALLEST, taken_ns=(1, int(1_000 * ratio), 10**9), base_ns=(1, 1_000, 10**9))


def test_a_block_may_cost_three_times_as_much_and_no_more() -> None:
    assert complaints_about([measured(ratio=MOST_RATIO)]) == ()
    assert complaints_about([measured(ratio=0.1), measured(ratio=3.25)]) == (
        "lookup cpu: a block in pools of 600 slots takes 3.25x what it takes in the smallest, over 3x",
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--pool-slots", "500", "--pool-slots", "500", "--blocks", "4"), "at least two sizes"),
        (("--pool-slots", "50", "--pool-slots", "500", "--blocks", "40"), "needs 123 slots"),
        (("--pool-slots", "20000", "--pool-slots", str(10**13)), "are available"),
        (("--repeats", "0"), ""),
        (("--pool-slots", "0"), ""),
    ],
)
def test_what_cannot_be_compared_is_refused(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", "scale", *arguments, "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in " ".join(captured.err.split())
