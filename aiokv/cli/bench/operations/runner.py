"""All cases of one command, on one cache, and their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from rich.progress import Progress

from aiokv.cli.bench.cases import BLOCK, Case, Collector, Layout, Model, Operation
from aiokv.cli.bench.memory import BYTES_PER_SLOT, available_memory, require_memory, resident_bytes
from aiokv.cli.bench.operations import BenchWorld, Times, open_case
from aiokv.cli.bench.report import BenchReport, Judgement
from aiokv.cli.bench.summary import Spread, describe_interpreter
from aiokv.cli.output import new_progress
from aiokv.errors import ConfigError

__all__ = [
    "SCHEMA_VERSION",
    "OperationSettings",
    "check_memory",
    "filled_world",
    "measure",
    "pool_bytes",
]

SCHEMA_VERSION: Final = 1
_WARM_UP_ROUNDS: Final = 3
_BYTES_PER_BLOCK: Final = 4 * BLOCK * 2 + 32
"""Of a prompt that is hashed: its tokens, once more in its keys, and a hash."""
_BYTES_PER_PROMPT: Final = 2_000
_MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSettings:
    """What one command measures; `ConfigError` for cases that do not exist. Repeated sizes and layouts count once."""

    operation: Operation
    layouts: tuple[Layout, ...]
    blocks: tuple[int, ...]
    model: Model
    pool_slots: int
    requests: int
    repeats: int
    collector: Collector

    def __post_init__(self) -> None:
        self.cases()

    def cases(self) -> tuple[Case, ...]:
        """By layout, then by size."""
        return tuple(
            Case(
                operation=self.operation,
                layout=layout,
                model=self.model,
                blocks=blocks,
                pool_slots=self.pool_slots,
                requests=self.requests,
            )
            for layout in dict.fromkeys(self.layouts)
            for blocks in dict.fromkeys(self.blocks)
        )


def pool_bytes(pool_slots: int) -> int:
    """What both pools take about, full."""
    return 2 * pool_slots * BYTES_PER_SLOT


def check_memory(pool_slots: int, *, available: int) -> None:
    """`ConfigError` if the pools will not fit: better than being killed half way through."""
    if pool_bytes(pool_slots) > available:
        needed, found = pool_bytes(pool_slots) / _MIB, available / _MIB
        raise ConfigError(f"two pools of {pool_slots:,} slots take about {needed:,.0f} MiB, {found:,.0f} are available")


def filled_world(model: Model, *, pool_slots: int, progress: Progress) -> BenchWorld:
    """A cache with full pools, and a progress bar while they are filled."""
    needed = pool_bytes(pool_slots) / _MIB
    filling = progress.add_task(f"filling two pools, about {needed:,.0f} MiB", total=1.0)
    world = BenchWorld(model, pool_slots=pool_slots)
    world.fill(lambda done: progress.update(filling, completed=done))
    return world


def measure(settings: OperationSettings) -> BenchReport:
    """Fill the pools, measure every case, with a progress bar on stderr."""
    with new_progress() as progress:
        world = _new_world(settings, progress=progress)
        rows = list(_rows(settings, world=world, progress=progress))
    return BenchReport(
        benchmark=settings.operation.value,
        schema_version=SCHEMA_VERSION,
        figures={
            "model": settings.model.value,
            "pool_slots": settings.pool_slots,
            "requests": settings.requests,
            "repeats": settings.repeats,
            "gc": settings.collector.value,
            "resident_mib": round(resident_bytes() / _MIB),
            **describe_interpreter(),
        },
        complaints=(),
        cases=tuple(rows),
        judgement=Judgement.NONE,
    )


def _new_world(settings: OperationSettings, *, progress: Progress) -> BenchWorld | None:
    """A cache with full pools, for operations that need one."""
    if settings.operation is Operation.HASH:
        size = max(settings.blocks) * _BYTES_PER_BLOCK + _BYTES_PER_PROMPT
        require_memory(
            settings.requests * size, what=f"{settings.requests:,} prompts of {max(settings.blocks):,} blocks"
        )
        return None
    check_memory(settings.pool_slots, available=available_memory())
    return filled_world(settings.model, pool_slots=settings.pool_slots, progress=progress)


def _rows(
    settings: OperationSettings, *, world: BenchWorld | None, progress: Progress
) -> Iterable[Mapping[str, object]]:
    cases = settings.cases()
    task = progress.add_task(settings.operation.value, total=len(cases) * settings.repeats)
    for case in cases:
        bench = open_case(case, world=world, collector=settings.collector)
        for _ in range(_WARM_UP_ROUNDS):
            bench.run_round()
        rounds = []
        for _ in range(settings.repeats):
            bench.run_round()
            rounds.append(bench.times)
            progress.advance(task)
        yield _row(case, rounds)


def _row(case: Case, rounds: list[Times]) -> Mapping[str, object]:
    spread = Spread.of([times.total_ns / 1e3 for times in rounds])
    return {
        "layout": case.layout.value,
        "blocks": case.blocks,
        "median_us": round(spread.median, 2),
        "p10_us": round(spread.p10, 2),
        "p90_us": round(spread.p90, 2),
        "us_per_block": round(spread.median / case.blocks, 4),
        "parts_us": _medians(rounds, of=lambda times: times.counted),
        "beside_us": _medians(rounds, of=lambda times: times.beside),
    }


def _medians(rounds: list[Times], *, of: Callable[[Times], Mapping[str, int]]) -> Mapping[str, float]:
    """Of each part by itself: they need not sum to the median of the whole."""
    return {part: round(median(of(times)[part] for times in rounds) / 1e3, 2) for part in of(rounds[0])}
