"""The memory plan of `aiokv doctor`: made from settings, shown as a table or as JSON.

Settings do not know the model. The size of a block is an option of the command; without it a pool that is sized in
bytes is taken to hold blocks of 1 MiB, and one that is sized in blocks has no known size.
"""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table

from aiokv.backends.host_memory import HostMemory
from aiokv.backends.memory_plan import (
    ARENA_PART,
    Demand,
    Limit,
    LimitKind,
    MemoryPlan,
    Registration,
    plan_memory,
)
from aiokv.model.sizes import format_bytes
from aiokv.runtime.config_file import Settings

__all__ = ["ArenaSize", "find_arena_size", "plan_as_json", "plan_as_table", "plan_settings"]

_USUAL_BLOCK_BYTES: Final = 1 << 20
_BLOCK_TOKENS: Final = 16


class ArenaSize(Enum):
    """Whether a plan tells all: the arena of a CPU pool in blocks has no size before these have one."""

    KNOWN = "known"
    UNKNOWN = "unknown"


def plan_settings(
    settings: Settings, host: HostMemory, *, registration: Registration, block_bytes: int | None = None
) -> MemoryPlan:
    """What a runtime with these settings takes of this machine; pure."""
    arena_bytes = (settings.cpu_blocks or 0) * (block_bytes or 0)
    cpu_slots = settings.cpu_blocks or 0
    if settings.cpu_bytes is not None:
        cpu_slots = settings.cpu_bytes // (block_bytes or _USUAL_BLOCK_BYTES)
        arena_bytes = cpu_slots * block_bytes if block_bytes else settings.cpu_bytes
    demand = Demand(
        gpu_slots=settings.gpu_blocks,
        cpu_slots=cpu_slots,
        arena_bytes=arena_bytes,
        block_tokens=_BLOCK_TOKENS,
        checksum=settings.checksum,
        registration=registration,
    )
    return plan_memory(demand, host)


def find_arena_size(settings: Settings, *, block_bytes: int | None) -> ArenaSize:
    """Whether the bytes of the CPU pool can be told; those of no pool can."""
    return ArenaSize.UNKNOWN if settings.cpu_blocks and not block_bytes else ArenaSize.KNOWN


def plan_as_json(plan: MemoryPlan, *, arena: ArenaSize) -> dict[str, object]:
    """Sizes in bytes. `arena_size` "unknown": then the arena counts for nothing, and `fits` is null.

    `registration` is null where the arena is not registered with a device.
    """
    chunks = plan.chunks
    return {
        "arena_size": arena.value,
        "total_bytes": plan.total_bytes,
        "fits": None if arena is ArenaSize.UNKNOWN else not plan.broken(LimitKind.FIXED, LimitKind.NOW),
        "parts": [asdict(part) for part in plan.parts],
        "limits": [
            {**asdict(limit), "kind": limit.kind.value, "is_kept": limit.is_kept}
            for limit in plan.limits
            if limit.allowed is not None
        ],
        "registration": None
        if chunks is None
        else {"calls": chunks.count, "largest_bytes": chunks.largest_bytes, "slots_per_call": chunks.slots_per_chunk},
    }


def plan_as_table(plan: MemoryPlan, host: HostMemory, *, arena: ArenaSize) -> RenderableType:
    """The parts, then what limits them, for people."""
    return Group(_table_of_parts(plan, arena=arena), "", _table_of_limits(plan, host))


def _table_of_parts(plan: MemoryPlan, *, arena: ArenaSize) -> Table:
    parts = Table(box=None, header_style="bold", pad_edge=False)
    parts.add_column("memory plan", no_wrap=True)
    parts.add_column("bytes", justify="right", no_wrap=True)
    parts.add_column("")
    unknown = arena is ArenaSize.UNKNOWN
    for part in plan.parts:
        if unknown and part.name == ARENA_PART:
            parts.add_row(part.name, "unknown", "give --block-bytes")
            continue
        parts.add_row(part.name, format_bytes(part.num_bytes), f"while {part.only_while}" if part.only_while else "")
    parts.add_row("all but the arena" if unknown else "all", format_bytes(plan.total_bytes), "")
    return parts


def _table_of_limits(plan: MemoryPlan, host: HostMemory) -> Table:
    limits = Table(box=None, header_style="bold", pad_edge=False)
    limits.add_column("limit", no_wrap=True)
    limits.add_column("allows", justify="right", no_wrap=True)
    limits.add_column("")
    for limit in plan.limits:
        if limit.allowed is not None:
            limits.add_row(limit.name, format_bytes(limit.allowed), "" if limit.is_kept else _tell(limit))
    if host.shm_free is not None:
        limits.add_row("/dev/shm", format_bytes(host.shm_free), "not used: the arena belongs to one process")
    return limits


def _tell(limit: Limit) -> str:
    wanted = f"{format_bytes(limit.wanted)} are wanted"
    if limit.kind is LimitKind.PINNING:
        return f"[yellow]{wanted}: the arena may stay unpinned[/]"
    return f"[bold red]{wanted}[/]"
