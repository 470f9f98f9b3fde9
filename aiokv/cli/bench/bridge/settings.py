"""What wake-ups are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aiokv.errors import ConfigError
from aiokv.model.ids import KeyEnum

__all__ = ["BUDGET", "BridgeBackend", "BridgeSettings"]

BUDGET: Final = 1.3
"""The median with most in flight is no more than so many times that with fewest."""

_IN_FLIGHT: Final = (1, 100, 10_000)


class BridgeBackend(KeyEnum):
    """Whose copies are waited for."""

    AUTO = "auto"
    """The fake driver of a checkout, or else a clock."""
    CUDA = "cuda"
    """The CUDA backend on the fake driver of a checkout, where copies take as long as they are told to."""
    CLOCKED = "clocked"
    """Copies that are nothing but times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSettings:
    """One run."""

    in_flight: tuple[int, ...] = _IN_FLIGHT
    """Transfers in flight, each size in turn; one request waits for each."""
    completions: int = 200
    """Measured, for each size in each repeat."""
    repeats: int = 5
    copy_us: int = 4_000
    """What one transfer takes on its stream; the device's own estimate is right."""
    idle_ms: int = 500
    """How long is listened whether a runtime without transfers wakes its thread."""
    backend: BridgeBackend = BridgeBackend.AUTO

    def __post_init__(self) -> None:
        if not self.in_flight or min(self.in_flight) < 1:
            raise ConfigError("at least one transfer must be in flight")

    @property
    def copy_s(self) -> float:
        """`copy_us` in seconds."""
        return self.copy_us / 1e6
