"""All copies, their figures, and what they must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aiokv.cli.bench.copy.settings import BUDGET, BUDGET_FROM_BYTES, CopySettings, Lie
from aiokv.cli.bench.copy.world import CopyWorld, Shared, Took, opened_world
from aiokv.cli.bench.garbage import collections_off
from aiokv.cli.bench.report import BenchReport
from aiokv.cli.bench.spread import spread_of
from aiokv.cli.output import new_still_progress
from aiokv.model.ids import Direction

__all__ = ["SCHEMA_VERSION", "complaints_about", "copy"]

SCHEMA_VERSION: Final = 1
_CASES: Final = tuple((direction, lie) for direction in Direction for lie in Lie)


@dataclass(slots=True, kw_only=True)
class _Seen:
    """The rounds of one case."""

    plain: list[Took] = field(default_factory=list)
    copied: list[Took] = field(default_factory=list)
    shared: list[Shared] = field(default_factory=list)
    wrong_blocks: int = 0


def copy(settings: CopySettings) -> BenchReport:
    """Run it, with a progress bar on stderr."""
    with new_still_progress() as progress:
        task = progress.add_task("copy", total=len(settings.block_bytes) * (1 + settings.repeats))
        cases: dict[str, dict[str, Any]] = {}
        for size in settings.block_bytes:
            cases |= _measure_size(size, settings, step=lambda: progress.update(task, advance=1, refresh=True))
    return BenchReport(
        benchmark="copy",
        schema_version=SCHEMA_VERSION,
        figures={
            "driver": "host",
            "garbage_collection": "off",
            "repeats": settings.repeats,
            "round_bytes": settings.round_bytes,
            **cases,
        },
        complaints=complaints_about(cases),
    )


def _measure_size(size: int, settings: CopySettings, *, step: Callable[[], None]) -> dict[str, dict[str, Any]]:
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
    return {
        f"{direction.value}_{lie.value}_{_size_name(size)}": _figures(found, block_bytes=size, moved=moved)
        for (direction, lie), found in seen.items()
    }


def _one_round(world: CopyWorld, case: tuple[Direction, Lie], *, found: _Seen) -> None:
    found.plain.append(world.plain(case[0]))
    found.copied.append(world.copy(*case))
    found.shared.append(world.shared_copy(*case))


def _figures(found: _Seen, *, block_bytes: int, moved: int) -> dict[str, Any]:
    pairs = list(zip(found.plain, found.copied, strict=True))
    return {
        "block_bytes": block_bytes,
        **spread_of("gb_per_s", [moved / copied.seconds / 1e9 for copied in found.copied]),
        **spread_of("plain_gb_per_s", [moved / plain.seconds / 1e9 for plain in found.plain]),
        **spread_of("us_per_block", [1e6 * copied.cpu_seconds * block_bytes / moved for copied in found.copied]),
        **spread_of("ratio", [plain.cpu_seconds / copied.cpu_seconds for plain, copied in pairs]),
        "best_ratio": round(_least_work(found.plain) / _least_work(found.copied), 3),
        **spread_of("shared_gb_per_s", [moved / shared.seconds / 1e9 for shared in found.shared]),
        **spread_of("shared_python", [shared.python_share for shared in found.shared]),
        "wrong_blocks": found.wrong_blocks,
    }


def _least_work(rounds: list[Took]) -> float:
    return min(took.cpu_seconds for took in rounds)


def complaints_about(cases: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Each promise that was not kept, in words."""
    wrong = [
        f"{name}: {found['wrong_blocks']} blocks are wrong" for name, found in cases.items() if found["wrong_blocks"]
    ]
    slow = [
        f"{name}: {found['best_ratio']} of a plain memcpy, not {BUDGET}"
        for name, found in cases.items()
        if found["block_bytes"] >= BUDGET_FROM_BYTES and found["best_ratio"] < BUDGET
    ]
    return (*wrong, *slow)


def _size_name(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size % unit == 0:
            return f"{size // unit}{name}"
    return f"{size}B"
