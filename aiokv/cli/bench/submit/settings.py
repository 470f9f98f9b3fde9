"""What submissions are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aiokv.cli.bench.movers import CopyBackend
from aiokv.errors import ConfigError

__all__ = ["SCHEMA_VERSION", "SubmitSettings"]

SCHEMA_VERSION: Final = 2

_COPIES: Final = (64, 512, 2_048, 8_192)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitSettings:
    """One run."""

    copies: tuple[int, ...] = _COPIES
    """Of one batch, each size in turn."""
    repeats: int = 50
    backend: CopyBackend = CopyBackend.AUTO

    def __post_init__(self) -> None:
        if not self.copies or min(self.copies) < 1:
            raise ConfigError("a batch has at least one copy")
