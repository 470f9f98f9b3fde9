"""What benchmarks of single operations vary: the operation, where the prompt's blocks lie, the model, the sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from aiokv.errors import ConfigError
from aiokv.model.ids import KeyEnum
from aiokv.model.spec import CacheGeometry, FullAttention, SlidingWindow

__all__ = ["BLOCK", "GEOMETRIES", "LAYOUTS", "Case", "Collector", "Layout", "Model", "Operation"]

BLOCK: Final = 16
"""Tokens per block, in every group."""
_WINDOW: Final = 1_024
_LEAD_IN_BLOCKS: Final = 64
_MOST_PROMPTS: Final = 64


class Operation(KeyEnum):
    """What is timed; each is described where it is implemented."""

    HASH = "hash"
    LOOKUP = "lookup"
    RESERVE = "reserve"
    RELEASE = "release"
    STORE = "store"
    LOAD = "load"
    LIFECYCLE = "lifecycle"


class Layout(KeyEnum):
    """Where the prompt's blocks lie before a round. Those on the GPU have a CPU copy, as eager stores leave them."""

    GPU = "gpu"
    CPU = "cpu"
    INTERLEAVED = "interleaved"
    """Blocks 0, 2, 4 ... are on the GPU, the others in the CPU tier alone."""
    MISS = "miss"


class Model(KeyEnum):
    """Which groups the model has."""

    FULL = "full"
    HYBRID = "hybrid"
    """A full group and one with a sliding window of 1,024 tokens."""


class Collector(KeyEnum):
    """Python's garbage collector while an operation is timed."""

    ON = "on"
    OFF = "off"


LAYOUTS: Final[Mapping[Operation, tuple[Layout, ...]]] = {
    Operation.HASH: (Layout.MISS,),
    Operation.LOOKUP: tuple(Layout),
    Operation.RESERVE: (Layout.MISS,),
    Operation.RELEASE: (Layout.GPU,),
    Operation.STORE: (Layout.MISS,),
    Operation.LOAD: (Layout.CPU, Layout.INTERLEAVED),
    Operation.LIFECYCLE: tuple(Layout),
}
"""The layouts in which an operation exists."""

_FULL: Final = FullAttention("full", block_size=BLOCK)
GEOMETRIES: Final[Mapping[Model, CacheGeometry]] = {
    Model.FULL: CacheGeometry(groups=(_FULL,), hash_block_size=BLOCK),
    Model.HYBRID: CacheGeometry(
        groups=(_FULL, SlidingWindow("window", block_size=BLOCK, window=_WINDOW)), hash_block_size=BLOCK
    ),
}
"""The groups of each model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement: prompts of `blocks` blocks, pools of `pool_slots` slots in each tier.

    In a round so many requests as `requests` says, each with a prompt of its own, go through the operation one right
    after the other, as in a scheduler's step. `ConfigError` for a layout in which the operation does not exist, and for
    prompts that do not fit into the pools.
    """

    operation: Operation
    layout: Layout
    model: Model
    blocks: int
    pool_slots: int
    requests: int = 1
    most_prompts: int = _MOST_PROMPTS
    """Of those that come back: so many are measured in turn, or fewer, see `rounds_in_turn`."""

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS[self.operation]:
            known = ", ".join(layout.value for layout in LAYOUTS[self.operation])
            raise ConfigError(f"{self.operation.value} has no layout {self.layout.value!r}, only {known}")
        if self.blocks < 1:
            raise ConfigError(f"a prompt has at least one block, not {self.blocks}")
        if self.requests < 1:
            raise ConfigError(f"a round has at least one request, not {self.requests}")
        if self.most_prompts < 1:
            raise ConfigError(f"at least one prompt is measured, not {self.most_prompts}")
        if self.operation is not Operation.HASH and self.slots > self.pool_slots:
            raise ConfigError(
                f"a round of {self.requests} x {self.blocks} blocks, led in by {self.lead_in_blocks}, needs "
                f"{self.slots} slots with the model {self.model.value}, a pool of {self.pool_slots} has too few"
            )

    @property
    def groups(self) -> int:
        """Of the model."""
        return len(GEOMETRIES[self.model].groups)

    @property
    def lead_in_blocks(self) -> int:
        """Of the request that goes through the operation untimed, right before those that are timed."""
        return min(self.blocks, _LEAD_IN_BLOCKS)

    @property
    def held_slots(self) -> int:
        """What a round holds of a pool, in all groups: the blocks of each prompt, one more for the token after them."""
        return (self.requests * (self.blocks + 1) + self.lead_in_blocks + 1) * self.groups

    @property
    def slots(self) -> int:
        """What a round needs of a pool: what it holds, and as much for all but the last request to evict, so that these
        evict nothing of prompts that come after them."""
        return 2 * self.held_slots - (self.blocks + 1) * self.groups

    @property
    def rounds_in_turn(self) -> int:
        """After so many rounds the prompts of the first come back: as many as fill half a pool, so that a large one is
        not measured in one warm spot, unless `most_prompts` says less. With the layout MISS no prompt comes back."""
        return max(1, min(self.most_prompts // self.requests, self.pool_slots // (2 * self.held_slots)))
