"""What is measured of being watched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aiokv.model.ids import KeyEnum
from aiokv.model.spec import CacheGeometry, FullAttention

__all__ = ["BLOCK", "GEOMETRY", "GROUP", "EventsSettings", "Listeners"]

BLOCK: Final = 16
"""Tokens."""
GROUP: Final = "full"
GEOMETRY: Final = CacheGeometry(groups=(FullAttention(GROUP, block_size=BLOCK),), hash_block_size=BLOCK)


class Listeners(KeyEnum):
    """Who listens to a runtime."""

    NONE = "none"
    ONE = "one"
    FOUR = "four"
    SLOW = "slow"
    """One that never reads, and whose backlog overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsSettings:
    """One run."""

    blocks: int = 1_024
    """Of each prompt; every one is new, so that as many blocks are evicted in each tier."""
    repeats: int = 30
    pool_prompts: int = 4
    """The pools hold so many prompts in the GPU tier, twice as many in the CPU tier."""

    @property
    def gpu_blocks(self) -> int:
        """Of every runtime, the null block and one that follows each prompt included."""
        return (self.blocks + 1) * self.pool_prompts + 1

    @property
    def cpu_blocks(self) -> int:
        """Of every runtime."""
        return 2 * self.gpu_blocks
