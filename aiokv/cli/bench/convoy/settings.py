"""What a convoy is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aiokv.model.spec import CacheGeometry, FullAttention

__all__ = ["BLOCK", "GEOMETRY", "GROUP", "ConvoySettings"]

BLOCK: Final = 16
"""Tokens."""
GROUP: Final = "full"
GEOMETRY: Final = CacheGeometry(groups=(FullAttention(GROUP, block_size=BLOCK),), hash_block_size=BLOCK)

_WORD_BYTES: Final = 8
_PLANES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvoySettings:
    """One run."""

    clients: int = 50
    tokens: int = 10_000
    rounds: int = 5
    block_bytes: int = 64 * 1024

    @property
    def blocks(self) -> int:
        """Of the prefix."""
        return self.tokens // BLOCK

    @property
    def token_words(self) -> int:
        """Words of one token in each plane of the model's memory."""
        return max(1, round(self.block_bytes / (BLOCK * _PLANES * _WORD_BYTES)))

    @property
    def gpu_blocks(self) -> int:
        """Room for the prefix, for a question of each client, and the null block."""
        return self.blocks + 2 * self.clients + 2

    @property
    def cpu_blocks(self) -> int:
        """More than GPU blocks, as it should be; questions are never confirmed, and so never stored."""
        return self.gpu_blocks + 1
