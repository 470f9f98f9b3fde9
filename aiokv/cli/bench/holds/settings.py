"""What `aiokv bench hold` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aiokv.errors import ConfigError
from aiokv.model.ids import KeyEnum
from aiokv.model.spec import CacheGeometry, FullAttention

__all__ = ["BLOCK", "GEOMETRY", "GROUP", "HoldSettings", "Turn"]

BLOCK: Final = 16
"""Tokens."""
GROUP: Final = "full"
GEOMETRY: Final = CacheGeometry(groups=(FullAttention(GROUP, block_size=BLOCK),), hash_block_size=BLOCK)

_GPU_SPARE: Final = 1.25
_CPU_SPARE: Final = 2


class Turn(KeyEnum):
    """Where the prompt of a request lies when it comes."""

    COLD = "cold"
    """Nowhere: nobody has seen it, and the pools are full."""
    GPU = "gpu"
    GROWING = "growing"
    """In the GPU tier, but for what a conversation has grown by; then tokens are generated, one by one."""
    CPU = "cpu"
    INTERLEAVED = "interleaved"
    """Every second block in the CPU tier only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldSettings:
    """One run."""

    clients: int = 64
    tokens: int = 131_072
    rounds: int = 2
    churn_slots: int = 1_000_000
    churn_blocks: int = 2_000_000

    def __post_init__(self) -> None:
        needed = -(-self.tokens // BLOCK)
        if self.churn_slots < needed:
            raise ConfigError(
                f"a prompt of {self.tokens} tokens needs {needed} slots, the churned pool has {self.churn_slots}: "
                "give more --churn-slots"
            )

    @property
    def blocks(self) -> int:
        """Of a prompt."""
        return self.tokens // BLOCK

    @property
    def gpu_blocks(self) -> int:
        """Room for a prompt of each client, grown, what is generated then, and a quarter more."""
        most_tokens = self.tokens + self.grown_tokens + self.generated_tokens + BLOCK
        return int(self.clients * -(-most_tokens // BLOCK) * _GPU_SPARE) + 1

    @property
    def cpu_blocks(self) -> int:
        """Twice as many."""
        return _CPU_SPARE * self.gpu_blocks

    @property
    def most_slots(self) -> int:
        """Of both tiers, in the phase with the larger pools."""
        return max(self.gpu_blocks + self.cpu_blocks, self.churn_slots + self.churn_cpu_slots)

    @property
    def churn_cpu_slots(self) -> int:
        """A quarter more than there are in the GPU tier."""
        return self.churn_slots * 5 // 4

    @property
    def grown_tokens(self) -> int:
        """By so many a conversation grows from one request to the next: a sixteenth, at least two blocks."""
        return max(self.tokens // 16, 2 * BLOCK)

    @property
    def generated_tokens(self) -> int:
        """So many a growing conversation generates, one by one; then a block more, for which it is extended."""
        return 4 * BLOCK

    @property
    def churn_clients(self) -> int:
        """As many as half of the churned pool has room for."""
        return max(1, min(self.clients, self.churn_slots // (2 * self.blocks)))

    @property
    def churn_prompts(self) -> int:
        """They fill the churned pool, then insert and evict `churn_blocks` more."""
        return -(-(self.churn_slots + self.churn_blocks) // self.blocks)
