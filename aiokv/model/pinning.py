"""How the CPU arena stands with the device: known to it ("pinned"), on the way there, or not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, final

__all__ = ["NOT_NEEDED", "PinState", "PinStatus"]


class PinState(Enum):
    """The states of a CPU arena: PINNING goes to PINNED or UNPINNED, each of the three to CLOSED."""

    NOT_NEEDED = "not_needed"
    """Nothing is pinned here: no device copies from this arena, or there is none."""
    PINNING = "pinning"
    """Pages are being touched and registered, in the background. No copy may use the arena yet."""
    PINNED = "pinned"
    """The device reads and writes all of it."""
    UNPINNED = "unpinned"
    """None of it is registered: copies work, slower, and the reason is told."""
    CLOSED = "closed"
    """It is not used any more."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PinStatus:
    """One moment of it; sizes in bytes. `reason` is empty unless UNPINNED."""

    state: PinState
    registered_bytes: int = 0
    total_bytes: int = 0
    reason: str = ""

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.state is not PinState.PINNING


NOT_NEEDED: Final = PinStatus(state=PinState.NOT_NEEDED)
"""The status where nothing is ever pinned."""
