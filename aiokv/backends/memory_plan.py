"""What a runtime will take of the machine's memory, and what limits it: said before anything is touched.

The GPU pool is the engine's and not counted. Sizes of the arena are exact; those of the books are upper bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, final

from aiokv.backends.arena import Layout
from aiokv.backends.chunks import MOST_BYTES_PER_CALL, Chunks, cut_chunks
from aiokv.backends.host_memory import HostMemory
from aiokv.errors import ConfigError
from aiokv.model.plan import Checksum
from aiokv.model.sizes import format_bytes

__all__ = [
    "ARENA_PART",
    "SLOT_STATE_BYTES",
    "Demand",
    "Limit",
    "LimitKind",
    "MemoryPlan",
    "Part",
    "Registration",
    "plan_memory",
]

ARENA_PART: Final = "CPU arena"
"""The name of the part that holds the CPU pool's blocks."""
SLOT_STATE_BYTES: Final = 132
"""No more a slot takes in either tier, its index entry included, where no events are on; mostly about 100."""
_CHECKSUM_BYTES: Final = 9
"""Per CPU slot."""
_ORIGIN_BYTES: Final = 37
"""Per GPU slot while events are read, beside 4 for each token of a block."""


class Registration(Enum):
    """Whether the CPU arena is registered with a device."""

    NONE = "none"
    PINNED = "pinned"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is wanted. `arena_bytes` is that of `cpu_slots` slots of the CPU pool."""

    gpu_slots: int
    cpu_slots: int
    arena_bytes: int
    block_tokens: int
    checksum: Checksum = Checksum.OFF
    registration: Registration = Registration.NONE

    @classmethod
    def of(cls, layout: Layout, *, registration: Registration = Registration.NONE) -> Demand:
        """Of a runtime with these pools."""
        return cls(
            gpu_slots=layout.gpu_blocks,
            cpu_slots=layout.cpu_blocks,
            arena_bytes=layout.cpu_blocks * layout.cpu_block_bytes,
            block_tokens=max(layout.geometry.block_sizes),
            checksum=layout.checksum,
            registration=registration,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One use of memory. `only_while` says when it is taken; empty: for as long as the runtime lives."""

    name: str
    num_bytes: int
    only_while: str = ""

    @property
    def is_lasting(self) -> bool:
        """Whether it is taken for as long as the runtime lives."""
        return not self.only_while


class LimitKind(Enum):
    """What it means to be over a limit."""

    FIXED = "fixed"
    """It can never fit."""
    NOW = "now"
    """It does not fit beside what runs now."""
    PINNING = "pinning"
    """It fits, but may stay unpinned."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Bytes that are wanted, and bytes that something lets one have; `None`: as many as one likes."""

    name: str
    kind: LimitKind
    wanted: int
    allowed: int | None

    @property
    def is_kept(self) -> bool:
        """Whether it lets one have what is wanted."""
        return self.allowed is None or self.wanted <= self.allowed


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The parts and the limits. `chunks` are the calls that register the arena; `None` where it is not registered."""

    arena_bytes: int
    parts: tuple[Part, ...]
    limits: tuple[Limit, ...]
    chunks: Chunks | None = None

    @property
    def total_bytes(self) -> int:
        """Of all parts that are taken for as long as the runtime lives."""
        return _sum_lasting(self.parts)

    def broken(self, *kinds: LimitKind) -> tuple[Limit, ...]:
        """Limits of these kinds that do not let it have what it wants."""
        return tuple(limit for limit in self.limits if limit.kind in kinds and not limit.is_kept)

    def require_fit(self) -> None:
        """`ConfigError` that names the limit, if the memory would not be there: better than being killed for it."""
        for limit in self.broken(LimitKind.FIXED, LimitKind.NOW):
            lasting = (part for part in self.parts if part.is_lasting)
            parts = ", ".join(f"{part.name} {format_bytes(part.num_bytes)}" for part in lasting)
            raise ConfigError(
                f"the pools take {format_bytes(self.total_bytes)} of memory ({parts}), but {limit.name} is "
                f"{format_bytes(limit.allowed or 0)}: make the CPU pool smaller, or raise that"
            )


def plan_memory(demand: Demand, host: HostMemory) -> MemoryPlan:
    """Hold what is wanted against what there is; pure."""
    parts = tuple(_find_parts(demand))
    limits = list(_find_limits(host, total=_sum_lasting(parts)))
    if demand.registration is Registration.NONE or not demand.arena_bytes:
        return MemoryPlan(arena_bytes=demand.arena_bytes, parts=parts, limits=tuple(limits))
    slots = demand.cpu_slots or 1  # less than one slot of the size that is supposed where it is not known
    chunks = cut_chunks(slots=slots, slot_bytes=demand.arena_bytes // slots)
    limits += _find_pinning_limits(host, arena_bytes=demand.arena_bytes, call_bytes=chunks.largest_bytes)
    return MemoryPlan(arena_bytes=demand.arena_bytes, parts=parts, limits=tuple(limits), chunks=chunks)


def _sum_lasting(parts: Iterable[Part]) -> int:
    return sum(part.num_bytes for part in parts if part.is_lasting)


def _find_parts(demand: Demand) -> Iterator[Part]:
    slots = demand.gpu_slots + demand.cpu_slots
    yield Part(name=ARENA_PART, num_bytes=demand.arena_bytes)
    yield Part(name="index and slot state", num_bytes=slots * SLOT_STATE_BYTES)
    if demand.checksum is not Checksum.OFF:
        yield Part(name="checksums", num_bytes=demand.cpu_slots * _CHECKSUM_BYTES)
    event_bytes = demand.gpu_slots * (_ORIGIN_BYTES + 4 * demand.block_tokens)
    yield Part(name="cache events", num_bytes=event_bytes, only_while="somebody reads them")


def _find_limits(host: HostMemory, *, total: int) -> Iterator[Limit]:
    """What the system does not say limits nothing."""
    available = host.memory_available + host.swap_free if host.memory_available else None
    yield Limit(name="the machine's memory", kind=LimitKind.FIXED, wanted=total, allowed=host.memory_total or None)
    yield Limit(name="the cgroup's memory limit", kind=LimitKind.FIXED, wanted=total, allowed=host.memory_limit)
    yield Limit(name="the memory available now", kind=LimitKind.NOW, wanted=total, allowed=available)
    yield Limit(name="the room left in the cgroup", kind=LimitKind.NOW, wanted=total, allowed=host.memory_left)
    yield Limit(
        name="what may be mapped without overcommit", kind=LimitKind.NOW, wanted=total, allowed=host.commit_left
    )


def _find_pinning_limits(host: HostMemory, *, arena_bytes: int, call_bytes: int) -> Iterator[Limit]:
    yield Limit(
        name="one registration with the driver",
        kind=LimitKind.PINNING,
        wanted=call_bytes,
        allowed=MOST_BYTES_PER_CALL,
    )
    yield Limit(name="memlock", kind=LimitKind.PINNING, wanted=arena_bytes, allowed=host.memlock_limit)
