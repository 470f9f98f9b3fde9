"""Each kind of pool, empty and full; what a slot of it costs, and what it may cost."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Final

from aiokv.cli.bench.footprint.filling import PROMPT_BLOCKS, fill, new_cache
from aiokv.cli.bench.memory import require_memory, resident_bytes
from aiokv.cli.bench.report import BenchReport
from aiokv.cli.output import new_progress
from aiokv.model.ids import Tier

__all__ = ["SCHEMA_VERSION", "MeasuredPool", "complaints_about", "complaints_about_pool", "measure", "memory"]

SCHEMA_VERSION: Final = 1

_TOKENS: Final = 16
_EMPTY_BYTES: Final = 40
_RESIDENT_BYTES: Final = 200
_TOKEN_BYTES: Final = 4
"""More, per token of a resident block, while somebody listens to events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPool:
    """Which pool is filled."""

    tier: Tier
    has_listener: bool

    @property
    def name(self) -> str:
        """In the figures."""
        return f"{self.tier.value}_with_events" if self.has_listener else self.tier.value

    @property
    def resident_budget(self) -> int:
        """Bytes."""
        return _RESIDENT_BYTES + (_TOKEN_BYTES * _TOKENS if self.has_listener else 0)


_POOLS: Final = (
    MeasuredPool(tier=Tier.GPU, has_listener=False),
    MeasuredPool(tier=Tier.CPU, has_listener=False),
    MeasuredPool(tier=Tier.GPU, has_listener=True),
)


def memory(slots: int) -> BenchReport:
    """One pool after the other, each in a process of its own, with a progress bar on stderr."""
    require_memory(slots * max(pool.resident_budget for pool in _POOLS), what=f"pools of {slots:,} slots")
    figures: dict[str, Any] = {"slots": slots}
    with new_progress() as progress:
        task = progress.add_task("memory", total=len(_POOLS))
        for pool in _POOLS:
            with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
                figures[pool.name] = process.submit(measure, pool, slots).result()
            progress.advance(task)
    return BenchReport(
        benchmark="memory",
        schema_version=SCHEMA_VERSION,
        figures=figures,
        complaints=complaints_about(figures),
    )


def measure(pool: MeasuredPool, slots: int) -> dict[str, Any]:
    """Bytes by which the process has grown per slot: for a pool of nothing but empty slots, and then for a full one.

    A small pool comes before, for what the interpreter and numpy take once, and stays: what it gave back would be taken
    again and not counted.
    """
    first = new_cache(pool.tier, slots=2 * PROMPT_BLOCKS)
    fill(first, pool.tier)
    gc.collect()
    before = resident_bytes()
    cache = new_cache(pool.tier, slots=slots)
    cache.events.is_on = pool.has_listener
    empty = resident_bytes()
    resident = fill(cache, pool.tier)
    gc.collect()
    full = resident_bytes()
    del first
    return {
        "slots": slots,
        "resident": resident,
        "bytes_per_empty_slot": round((empty - before) / slots, 2),
        "bytes_per_resident_slot": round((full - before) / slots, 2),
    }


def complaints_about(figures: Mapping[str, Any]) -> tuple[str, ...]:
    """Those about each pool, by its name in the figures."""
    return tuple(complaint for pool in _POOLS for complaint in complaints_about_pool(pool, figures[pool.name]))


def complaints_about_pool(pool: MeasuredPool, seen: Mapping[str, Any]) -> list[str]:
    """Each budget that was not kept, and that the pool was not full."""
    complaints = []
    if seen["resident"] != seen["slots"]:
        complaints.append(f"{pool.name}: {seen['resident']} of {seen['slots']} slots are resident")
    for name, budget in (("bytes_per_empty_slot", _EMPTY_BYTES), ("bytes_per_resident_slot", pool.resident_budget)):
        if seen[name] > budget:
            complaints.append(f"{pool.name}: {name} is {seen[name]}, over {budget}")
    return complaints
