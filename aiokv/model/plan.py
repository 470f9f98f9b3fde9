"""Answers of the core, as values: hits, refusals, policies, copies to make."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Self

from aiokv.model.ids import BoolArray, Direction, IntArray, KeyEnum, SlotArray, Tier

__all__ = [
    "Checksum",
    "CopyBatch",
    "DeclineReason",
    "Declined",
    "DeferReason",
    "Deferred",
    "Found",
    "Hit",
    "Outcome",
    "RankTransfer",
    "StorePolicy",
]


class StorePolicy(Enum):
    """When GPU blocks are copied to the CPU tier."""

    EAGER = "eager"
    LAZY = "lazy"
    SELECTIVE = "selective"


class Checksum(Enum):
    """Which bytes of a block in the CPU tier are checked when it is loaded."""

    OFF = "off"
    SAMPLED = "sampled"
    """64 bytes of every 4 KiB page: what befalls whole pages or slots is found, a single wrong byte seldom."""
    FULL = "full"
    """All that a load copies."""


class DeferReason(KeyEnum):
    """Why a request must wait. Each is a metric label."""

    CAPACITY = "capacity"
    WATERMARK = "watermark"
    QUEUED = "queued"


class DeclineReason(KeyEnum):
    """Why something will not be done. Each is a metric label."""

    ALREADY_CACHED = "already_cached"
    IN_FLIGHT = "in_flight"
    POOL_FULL = "pool_full"
    BACKPRESSURE = "backpressure"
    REQUEST_GONE = "request_gone"
    UNHASHED = "unhashed"
    SEEN_TOO_SELDOM = "seen_too_seldom"
    QUOTA = "quota"


class Outcome(KeyEnum):
    """How a transfer ended."""

    OK = "ok"
    CORRUPT = "corrupt"
    """The copies of a load were made, but some blocks are not as they were stored."""
    FAILED = "error"
    DROPPED = "cancelled"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Deferred:
    """Not now: nothing was changed, ask again when capacity has been freed."""

    reason: DeferReason


@dataclass(frozen=True, slots=True)
class Declined:
    """Will not be done, by policy; nothing was changed.

    As a context manager it does nothing, so that `with kv.keep(...)` runs its body whatever the answer was.
    """

    reason: DeclineReason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing was held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Where the tokens of a prompt come from. The three sources sum to `prompt_tokens`."""

    prompt_tokens: int
    gpu_tokens: int
    cpu_tokens: int
    compute_tokens: int

    def __post_init__(self) -> None:
        if self.gpu_tokens + self.cpu_tokens + self.compute_tokens != self.prompt_tokens:
            raise ValueError(f"the sources of {self} do not sum to the prompt")


class Found(NamedTuple):
    """The answer of an index to `n` keys: `slots[i]` has a meaning only where `present[i]`."""

    present: BoolArray
    slots: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyBatch:
    """Copies of whole blocks of one group, in one direction: `source_blocks[i]` to `target_blocks[i]`.

    A load reads CPU slots and writes GPU slots, a store the other way round. Slots within one side are distinct. The
    copies wait for every fence in `after`, the backend's own or a tuple of them, where there is one (law 5).
    """

    direction: Direction
    group: str
    source_blocks: SlotArray
    target_blocks: SlotArray
    after: object = None

    def __post_init__(self) -> None:
        if len(self.source_blocks) != len(self.target_blocks):
            raise ValueError(f"{len(self.source_blocks)} sources but {len(self.target_blocks)} targets")

    def __len__(self) -> int:
        return len(self.source_blocks)

    def slots(self, tier: Tier) -> SlotArray:
        """Its side in one tier: `slots(Tier.GPU)[i]` and `slots(Tier.CPU)[i]` are the two ends of copy `i`."""
        return self.source_blocks if tier is self.direction.source_tier else self.target_blocks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTransfer:
    """Copies that every remote rank makes in its own arenas and then reports by `transfer_id`.

    A fence in `batch.after` is one of this process: each rank orders the copies behind its own compute stream (law 5).
    """

    transfer_id: int
    batch: CopyBatch
