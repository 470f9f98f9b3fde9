"""Rounds in pools of all sizes in turns, so that they share whatever the machine does to them; then ratios."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from rich.progress import Progress

from aiokv.cli.bench.cases import Case, Collector, Layout
from aiokv.cli.bench.memory import resident_bytes
from aiokv.cli.bench.operations import BenchWorld, open_case
from aiokv.cli.bench.operations.runner import available_memory, check_memory, filled_world
from aiokv.cli.bench.report import BenchReport
from aiokv.cli.bench.scale.settings import ScaleSettings, Sweep
from aiokv.cli.bench.summary import Spread, describe_interpreter
from aiokv.cli.output import new_progress

__all__ = ["MOST_RATIO", "SCHEMA_VERSION", "Measured", "complaints_about", "measure_scale"]

SCHEMA_VERSION: Final = 1
MOST_RATIO: Final = 3.0
"""Of a block in large pools to one in the smallest."""

_WARM_UP_ROUNDS: Final = 3
_MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Nanoseconds of one case's rounds, and of the same operation in the smallest pools meanwhile."""

    case: Case
    base: Case
    taken_ns: tuple[int, ...]
    base_ns: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return median(self.taken_ns) / max(median(self.base_ns), 1)

    @property
    def is_too_slow(self) -> bool:
        """Whether a block costs too much in these pools."""
        return self.ratio > MOST_RATIO

    @property
    def is_like_base(self) -> bool:
        """Whether prompts come back as soon as in the smallest pools, and so are as warm in the processor's caches."""
        return self.case.rounds_in_turn == self.base.rounds_in_turn

    @property
    def prompts_in_turn(self) -> int:
        """After so many a prompt comes back; 0 with the layout MISS, where none does."""
        return 0 if self.case.layout is Layout.MISS else self.case.rounds_in_turn

    def as_json(self) -> dict[str, object]:
        """The figures of one case."""
        case = self.case
        spread = Spread.of([taken / 1e3 / case.blocks for taken in self.taken_ns])
        return {
            "operation": case.operation.value,
            "layout": case.layout.value,
            "pool_slots": case.pool_slots,
            "prompts_in_turn": self.prompts_in_turn,
            "us_per_block": round(spread.median, 4),
            "p10": round(spread.p10, 4),
            "p90": round(spread.p90, 4),
            "ratio": round(self.ratio, 3),
        }


def measure_scale(settings: ScaleSettings) -> tuple[BenchReport, list[Measured]]:
    """Fill the pools of all sizes, measure everything, with a progress bar on stderr.

    `ConfigError`, before anything is made, if they will not fit into memory together.
    """
    check_memory(sum(settings.sizes), available=available_memory())
    with new_progress() as progress:
        worlds = {slots: filled_world(settings.model, pool_slots=slots, progress=progress) for slots in settings.sizes}
        results = _measure_all(settings, worlds=worlds, progress=progress)
        resident = resident_bytes()
    report = BenchReport(
        benchmark="scale",
        schema_version=SCHEMA_VERSION,
        figures={
            "model": settings.model.value,
            "blocks": settings.blocks,
            "repeats": settings.repeats,
            "gc": Collector.OFF.value,
            "most_ratio": MOST_RATIO,
            "resident_mib": round(resident / _MIB),
            **describe_interpreter(),
        },
        complaints=complaints_about(results),
        cases=tuple(result.as_json() for result in results),
    )
    return report, results


def complaints_about(results: Sequence[Measured]) -> tuple[str, ...]:
    """Each ratio that is too large, in words."""
    return tuple(
        f"{result.case.operation.value} {result.case.layout.value}: a block in pools of {result.case.pool_slots:,} "
        f"slots takes {result.ratio:.2f}x what it takes in the smallest, over {MOST_RATIO:g}x"
        for result in results
        if result.is_too_slow
    )


def _measure_all(settings: ScaleSettings, *, worlds: Mapping[int, BenchWorld], progress: Progress) -> list[Measured]:
    sweeps = settings.sweeps()
    task = progress.add_task("measuring", total=len(sweeps) * settings.repeats)
    results = []
    for sweep in sweeps:
        results += _measure(sweep, worlds=worlds, repeats=settings.repeats, step=lambda: progress.advance(task))
    return results


def _measure(
    sweep: Sweep, *, worlds: Mapping[int, BenchWorld], repeats: int, step: Callable[[], None]
) -> list[Measured]:
    benches = [open_case(case, world=worlds[case.pool_slots]) for case in sweep.cases]
    for bench in benches:
        for _ in range(_WARM_UP_ROUNDS):
            bench.run_round()
    turns = []
    for _ in range(repeats):
        gc.collect()
        turns.append([bench.run_round() for bench in benches])
        step()
    columns = [tuple(column) for column in zip(*turns, strict=True)]
    return [
        Measured(case=case, base=sweep.base, taken_ns=taken, base_ns=columns[0])
        for case, taken in zip(sweep.cases, columns, strict=True)
    ]
