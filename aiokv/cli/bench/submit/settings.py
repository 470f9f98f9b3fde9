"""What submissions are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aiokv.errors import ConfigError
from aiokv.model.ids import KeyEnum

__all__ = ["SCHEMA_VERSION", "Driver", "SubmitSettings"]

SCHEMA_VERSION: Final = 2

_COPIES: Final = (64, 512, 2_048, 8_192)


class Driver(KeyEnum):
    """Who moves the bytes."""

    AUTO = "auto"
    """A CUDA device, the fake driver of a checkout, or else the host: the first that there is."""
    CUDA = "cuda"
    """A CUDA device, or the fake driver of a checkout."""
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitSettings:
    """One run."""

    copies: tuple[int, ...] = _COPIES
    """Of one batch, each size in turn."""
    repeats: int = 50
    driver: Driver = Driver.AUTO

    def __post_init__(self) -> None:
        if not self.copies or min(self.copies) < 1:
            raise ConfigError("a batch has at least one copy")
