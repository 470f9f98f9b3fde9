"""What submissions are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aiokv.errors import ConfigError
from aiokv.model.ids import KeyEnum

__all__ = ["Driver", "SubmitSettings"]

_COPIES: Final = (64, 512, 2_048, 8_192)


class Driver(KeyEnum):
    """Who moves the bytes."""

    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitSettings:
    """One run."""

    copies: tuple[int, ...] = _COPIES
    """Of one batch, each size in turn."""
    repeats: int = 50
    driver: Driver = Driver.HOST

    def __post_init__(self) -> None:
        if not self.copies or min(self.copies) < 1:
            raise ConfigError("a batch has at least one copy")
