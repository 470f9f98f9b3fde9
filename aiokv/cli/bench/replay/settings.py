"""What a replay is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from aiokv.model.spec import CacheGeometry, FullAttention

__all__ = ["GROUP", "WATERMARK", "ReplaySettings", "TokenForm"]

GROUP: Final = "full"
WATERMARK: Final = 0.01
"""Of both sides: the part of the GPU pool that no admission takes while others run."""

_BUSY: Final = 0.9
"""The part of the GPU pool that requests in flight may need together; the rest is for blocks that are being stored."""


class TokenForm(Enum):
    """How the runtime is given a prompt; the peer takes lists only."""

    ARRAY = "array"
    """int32, as an engine keeps what it will hand to its kernels."""
    LIST = "list"
    """Integers, as a tokenizer gives them; they are converted first, which takes as long as hashing them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """One run. The pools are those of one large server: a million tokens in the GPU tier, eight in the CPU tier."""

    trace: Path
    peer_python: Path | None = None
    requests: int | None = None
    gpu_blocks: int = 65_536
    cpu_blocks: int = 524_288
    block_size: int = 16
    in_flight: int = 64
    tokens: TokenForm = TokenForm.ARRAY
    slice_requests: int = 250
    timeout_s: float = 600.0
    """For one answer of the peer."""

    @property
    def geometry(self) -> CacheGeometry:
        """One group of full attention."""
        return CacheGeometry(
            groups=(FullAttention(GROUP, block_size=self.block_size),), hash_block_size=self.block_size
        )

    @property
    def blocks_in_flight(self) -> int:
        """Most GPU blocks that requests in flight may need together."""
        return int((self.gpu_blocks - 1) * _BUSY)
