"""What to change where the pools do not fit into memory: how large the CPU pool may be, in the unit it was given in.

Each number says which limit it comes from, and what share of it that is. A pool that keeps to all of them is fine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, final

from aiokv.backends.host_memory import HostMemory
from aiokv.backends.memory_plan import LimitKind, MemoryPlan, Registration
from aiokv.cli.memory_view import plan_settings
from aiokv.model.sizes import format_bytes
from aiokv.runtime.config_file import Settings

__all__ = ["Room", "advise_smaller_pool", "find_shortages"]

_COMFORTABLE_PERCENT: Final = 80
_MIB: Final = 1 << 20
_NO_POOL: Final = "leave the CPU pool out"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes that the pools may take together. `origin` says why so many; `remedy` what else would help, if anything."""

    num_bytes: int
    origin: str
    remedy: str = ""


def find_shortages(plan: MemoryPlan, host: HostMemory) -> tuple[Room, ...]:
    """The rooms that `plan` does not keep to: the least that lasts, then one that is still less for the moment."""
    lasting = sorted(_lasting_rooms(host), key=_size_of)[:1]
    passing = sorted(_passing_rooms(plan, host), key=_size_of)[:1]
    if lasting and passing and lasting[0].num_bytes <= passing[0].num_bytes:
        passing = []
    return tuple(room for room in (*lasting, *passing) if room.num_bytes < plan.total_bytes)


def advise_smaller_pool(room: Room, host: HostMemory, *, settings: Settings, block_bytes: int | None) -> str:
    """How large the CPU pool of `settings` may be for both pools to keep to `room`, and why."""
    most = _find_most(settings, host, block_bytes=block_bytes, room=room.num_bytes)
    return f"{most}: {room.origin}{room.remedy}"


def _size_of(room: Room) -> int:
    return room.num_bytes


def _lasting_rooms(host: HostMemory) -> Iterator[Room]:
    if host.memory_total:
        yield _comfortable_share("the machine's memory", host.memory_total)
    if host.memory_limit is not None:
        yield replace(
            _comfortable_share("the cgroup's memory limit", host.memory_limit), remedy="; or raise that limit"
        )


def _comfortable_share(name: str, num_bytes: int) -> Room:
    share = f"{_COMFORTABLE_PERCENT} % of {name}, {format_bytes(num_bytes)}"
    return Room(
        num_bytes=num_bytes * _COMFORTABLE_PERCENT // 100,
        origin=f"{share}; the rest is for the model and this process",
    )


def _passing_rooms(plan: MemoryPlan, host: HostMemory) -> Iterator[Room]:
    for limit in plan.limits:
        if limit.kind is LimitKind.NOW and limit.allowed is not None:
            refused = "" if limit.is_kept else ", over which a runtime refuses to open"
            origin = f"{limit.name}, {format_bytes(limit.allowed)}{refused}"
            yield Room(num_bytes=limit.allowed, origin=origin, remedy="; or free memory")
    if host.memory_available and host.swap_free:
        origin = f"the memory available now without swap, {format_bytes(host.memory_available)}"
        yield Room(num_bytes=host.memory_available, origin=origin, remedy="; or free memory")


def _find_most(settings: Settings, host: HostMemory, *, block_bytes: int | None, room: int) -> str:
    """The largest CPU pool, with what is kept of its slots, as a setting that can be typed."""

    def taken_with(smaller: Settings) -> int:
        return plan_settings(smaller, host, registration=Registration.NONE, block_bytes=block_bytes).total_bytes

    if settings.cpu_blocks is not None:
        counts = range(settings.cpu_blocks + 1)
        blocks = bisect_right(counts, room, key=lambda count: taken_with(replace(settings, cpu_blocks=count))) - 1
        told = f"set cpu_blocks to at most {blocks} ({format_bytes(blocks * (block_bytes or 0))})"
        return told if blocks > 0 else _NO_POOL
    counts = range((settings.cpu_bytes or 0) // _MIB + 1)
    mib = bisect_right(counts, room, key=lambda count: taken_with(replace(settings, cpu_bytes=count * _MIB))) - 1
    return f'set cpu_bytes to at most "{mib}MiB" ({format_bytes(mib * _MIB)})' if mib > 0 else _NO_POOL
