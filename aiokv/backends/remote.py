"""The backend of a runtime that owns no arenas: every rank is in another process, which copies and reports.

What is submitted here has nothing to copy and so has ended well at once; its transfer waits for the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from aiokv.backends.base import BackendLayout, EventStatus, WakeMode
from aiokv.backends.no_streams import NoStreams
from aiokv.backends.pinning import NOTHING_TO_PIN
from aiokv.errors import ConfigError
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch

__all__ = ["RemoteBackend"]


@final
class _Done:
    """The event of a batch of which nothing is copied here."""

    __slots__ = ()

    def query(self) -> EventStatus:
        return EventStatus.DONE

    def detail(self) -> str:
        return ""

    def corrupt_copies(self) -> tuple[int, ...]:
        return ()


_DONE = _Done()


@final
class RemoteBackend(NoStreams):
    """Copies nothing. It has no memory, so that the CPU tier is sized in blocks."""

    __slots__ = ("_ring",)

    name = "remote"
    wake_mode = WakeMode.DOORBELL
    pinning = NOTHING_TO_PIN

    def __init__(self) -> None:
        self._ring: Callable[[], None] = _ring_nothing

    def open(self, layout: BackendLayout) -> None:
        """`ConfigError` for tensors: nobody here would copy them."""
        if layout.arenas:
            raise ConfigError("every rank is remote: the tensors belong to the processes of the ranks")

    def attach_doorbell(self, ring: Callable[[], None]) -> None:
        """`ring` is called at every `submit`."""
        self._ring = ring

    def submit(self, batch: CopyBatch) -> _Done:
        """There is nothing to do here."""
        self._ring()
        return _DONE

    def block_bytes(self, group: str) -> int:
        """None of it is here."""
        return 0

    def eta_seconds(self, direction: Direction, num_bytes: int) -> float:
        """There is nothing to wait for."""
        return 0.0

    def close(self, *, deadline_s: float) -> bool:
        """There is nothing to free."""
        return True


def _ring_nothing() -> None:
    """Stands for the doorbell until the bridge attaches its own."""
