"""All copies, their figures, and what they must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aiokv.cli.bench.copy.batches import ROOM
from aiokv.cli.bench.copy.on_device import measure_on_device
from aiokv.cli.bench.copy.settings import BUDGET, BUDGET_FROM_BYTES, Adjacency, CopySettings
from aiokv.cli.bench.copy.world import CopyWorld, Shared, Took, opened_world
from aiokv.cli.bench.garbage import collections_off
from aiokv.cli.bench.memory import require_memory
from aiokv.cli.bench.movers import CopyBackend, find_device
from aiokv.cli.bench.report import BenchReport
from aiokv.cli.bench.summary import Spread, describe_interpreter
from aiokv.cli.output import new_still_progress
from aiokv.model.ids import Direction

__all__ = ["SCHEMA_VERSION", "complaints_about", "copy"]

SCHEMA_VERSION: Final = 2
_CASES: Final = tuple((direction, adjacency) for direction in Direction for adjacency in Adjacency)


@dataclass(slots=True, kw_only=True)
class _Seen:
    """The rounds of one case."""

    plain: list[Took] = field(default_factory=list)
    copied: list[Took] = field(default_factory=list)
    shared: list[Shared] = field(default_factory=list)
    wrong_blocks: int = 0


def copy(settings: CopySettings) -> BenchReport:
    """Run it, with a progress bar on stderr."""
    driver = find_device(settings.backend)
    require_memory(
        (2 if driver is None else 4) * ROOM * settings.round_bytes, what=f"the arenas for {settings.round_mib:,} MiB"
    )
    with new_still_progress() as progress:
        task = progress.add_task("copy", total=len(settings.block_bytes) * (1 + settings.repeats))
        cases: list[Mapping[str, Any]] = []
        for size in settings.block_bytes:
            measure = _measure_size if driver is None else measure_on_device
            cases += measure(size, settings, step=lambda: progress.update(task, advance=1, refresh=True))
    return BenchReport(
        benchmark="copy",
        schema_version=SCHEMA_VERSION,
        figures={
            "driver": CopyBackend.HOST.value if driver is None else driver.value,
            "gc": "off",
            "repeats": settings.repeats,
            "round_bytes": settings.round_bytes,
            **describe_interpreter(),
        },
        complaints=complaints_about(cases),
        cases=tuple(cases),
    )


def _measure_size(size: int, settings: CopySettings, *, step: Callable[[], None]) -> list[Mapping[str, Any]]:
    seen = {case: _Seen() for case in _CASES}
    with opened_world(block_bytes=size, round_bytes=settings.round_bytes) as world, collections_off():
        for case, found in seen.items():
            found.wrong_blocks = world.count_wrong(*case)
        step()
        for _ in range(settings.repeats):
            for case, found in seen.items():
                _one_round(world, case, found=found)
            step()
        moved = world.blocks * size
    return [
        {"direction": direction.value, "slots": adjacency.value, "block_bytes": size}
        | _figures(found, block_bytes=size, moved=moved)
        for (direction, adjacency), found in seen.items()
    ]


def _one_round(world: CopyWorld, case: tuple[Direction, Adjacency], *, found: _Seen) -> None:
    found.plain.append(world.plain(case[0]))
    found.copied.append(world.copy(*case))
    found.shared.append(world.shared_copy(*case))


def _figures(found: _Seen, *, block_bytes: int, moved: int) -> dict[str, Any]:
    pairs = zip(found.plain, found.copied, strict=True)
    return {
        "gb_per_s": Spread.of([moved / copied.seconds / 1e9 for copied in found.copied]).figures(),
        "plain_gb_per_s": Spread.of([moved / plain.seconds / 1e9 for plain in found.plain]).figures(),
        "us_per_block": round(_least_work(found.copied) * 1e6 * block_bytes / moved, 3),
        "ratio": Spread.of([plain.cpu_seconds / copied.cpu_seconds for plain, copied in pairs]).figures(),
        "best_ratio": round(_least_work(found.plain) / _least_work(found.copied), 3),
        "shared_gb_per_s": Spread.of([moved / shared.seconds / 1e9 for shared in found.shared]).figures(),
        "shared_python": Spread.of([shared.python_share for shared in found.shared]).figures(),
        "wrong_blocks": found.wrong_blocks,
    }


def _least_work(rounds: list[Took]) -> float:
    return min(took.cpu_seconds for took in rounds)


def complaints_about(cases: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Each promise that was not kept, in words."""
    wrong = [f"{_name(case)}: {case['wrong_blocks']} blocks are wrong" for case in cases if case["wrong_blocks"]]
    slow = [
        f"{_name(case)}: {case['best_ratio']} of a plain memcpy, not {BUDGET}"
        for case in cases
        if case["block_bytes"] >= BUDGET_FROM_BYTES and case.get("best_ratio", BUDGET) < BUDGET
    ]
    return (*wrong, *slow)


def _name(case: Mapping[str, Any]) -> str:
    return f"{case['direction']}, {case['slots']}, {case['block_bytes']} bytes a block"
