"""A fake backend whose submissions are told, before anything else happens, to somebody who keeps the books."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from aiokv.backends.base import BackendLayout, DeviceEvent
from aiokv.backends.fake import FakeBackend
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch

__all__ = ["WatchedBackend"]


@final
class WatchedBackend:
    """Passes everything on to a `FakeBackend`."""

    __slots__ = ("_fake", "_on_submit", "name", "wake_mode")

    def __init__(self, fake: FakeBackend, *, on_submit: Callable[[CopyBatch], None]) -> None:
        self._fake = fake
        self._on_submit = on_submit
        self.name = fake.name
        self.wake_mode = fake.wake_mode

    def open(self, layout: BackendLayout) -> None:
        """See `Backend`."""
        self._fake.open(layout)

    def attach_doorbell(self, ring: Callable[[], None]) -> None:
        """See `Backend`."""
        self._fake.attach_doorbell(ring)

    def submit(self, batch: CopyBatch) -> DeviceEvent:
        """See `Backend`. What the fake refuses was never started."""
        event = self._fake.submit(batch)
        self._on_submit(batch)
        return event

    def block_bytes(self, group: str) -> int:
        """See `Backend`."""
        return self._fake.block_bytes(group)

    def eta_seconds(self, direction: Direction, num_bytes: int) -> float:  # as in the protocol
        """See `Backend`."""
        return self._fake.eta_seconds(direction, num_bytes)

    def close(self, *, deadline_s: float) -> bool:
        """See `Backend`."""
        return self._fake.close(deadline_s=deadline_s)
