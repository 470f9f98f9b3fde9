"""What copies are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aiokv.cli.bench.movers import CopyBackend
from aiokv.errors import ConfigError
from aiokv.model.ids import KeyEnum

__all__ = ["BUDGET", "BUDGET_FROM_BYTES", "Adjacency", "CopySettings"]

BUDGET: Final = 0.9
"""Of the speed of a plain memcpy, for blocks of at least `BUDGET_FROM_BYTES`."""
BUDGET_FROM_BYTES: Final = 64 << 10

_SIZES: Final = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20)


class Adjacency(KeyEnum):
    """How the slots of one transfer lie."""

    ADJACENT = "adjacent"
    """One run on both sides: a pool that nothing has been evicted from."""
    ONE_SIDED = "one_sided"
    """The CPU slots adjacent, the GPU slots anywhere."""
    SCATTERED = "scattered"
    """Anywhere on both sides: no two copies are neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySettings:
    """One run."""

    block_bytes: tuple[int, ...] = _SIZES
    round_mib: int = 64
    """Bytes of one transfer, and of the plain memcpy beside it."""
    repeats: int = 9
    backend: CopyBackend = CopyBackend.AUTO

    def __post_init__(self) -> None:
        for size in self.block_bytes:
            if not 64 <= size <= self.round_bytes:
                raise ConfigError(
                    f"a block of {size} bytes: at least 64, and no more than the {self.round_mib} MiB copied"
                )

    @property
    def round_bytes(self) -> int:
        """`round_mib` in bytes."""
        return self.round_mib << 20
