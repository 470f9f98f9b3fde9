"""What a soak is asked for, and the model and prompts it talks about."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from aiokv.errors import ConfigError
from aiokv.model.plan import StorePolicy
from aiokv.model.spec import CacheGeometry, ChunkedLocal, FullAttention, SlidingWindow

__all__ = ["BLOCK", "GEOMETRY", "LONGEST_TOKENS", "Sabotage", "SoakSettings"]

BLOCK: Final = 16
"""Tokens."""
GEOMETRY: Final = CacheGeometry(
    groups=(
        FullAttention("full", block_size=BLOCK),
        SlidingWindow("window", block_size=BLOCK, window=100),
        ChunkedLocal("chunk", block_size=BLOCK, chunk=64),
    ),
    hash_block_size=BLOCK,
)
LONGEST_TOKENS: Final = 40 * BLOCK
"""No request knows or reserves more tokens."""


class Sabotage(StrEnum):
    """What is broken on purpose, so that a run shows what it would find."""

    NONE = "none"
    BYTE = "byte"
    """Some copies end well with one byte wrong."""
    LEASE = "lease"
    """One lease is kept and never given back."""
    COPY = "copy"
    """One copy never ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSettings:
    """One run."""

    seconds: float = 60.0
    seed: int = 0
    clients: int = 32
    gpu_blocks: int = 512
    cpu_blocks: int = 1024
    faults: float = 0.02
    """Fraction of copies that fail; as many are late, half as many are refused."""
    store_policy: StorePolicy = StorePolicy.EAGER
    sabotage: Sabotage = Sabotage.NONE

    def __post_init__(self) -> None:
        """`ConfigError` for pools in which a long request never fits."""
        least = len(GEOMETRY.groups) * LONGEST_TOKENS // BLOCK + 1
        if self.gpu_blocks < least:
            raise ConfigError(f"a soak needs at least {least} GPU blocks, not {self.gpu_blocks}")
