"""A backend around another one: the start of every backend that watches, spoils or prepares what is copied."""

from __future__ import annotations

from collections.abc import Callable

from aiokv.backends.base import Backend, BackendLayout, DeviceEvent, Pinning
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch

__all__ = ["PassingBackend"]


class PassingBackend:
    """Passes everything on to the backend inside."""

    __slots__ = ("_inner", "name", "needs_fences", "wake_mode")

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.name = inner.name
        self.wake_mode = inner.wake_mode
        self.needs_fences = inner.needs_fences

    @property
    def pinning(self) -> Pinning:
        """See `Backend`."""
        return self._inner.pinning

    def open(self, layout: BackendLayout) -> None:
        """See `Backend`."""
        self._inner.open(layout)

    def attach_doorbell(self, ring: Callable[[], None]) -> None:
        """See `Backend`."""
        self._inner.attach_doorbell(ring)

    def submit(self, batch: CopyBatch) -> DeviceEvent:
        """See `Backend`."""
        return self._inner.submit(batch)

    def fence(self, stream: object) -> object | None:
        """See `Backend`."""
        return self._inner.fence(stream)

    def fence_done(self, fence: object) -> bool:
        """See `Backend`."""
        return self._inner.fence_done(fence)

    def wait(self, stream: object, fence_or_event: object) -> None:
        """See `Backend`."""
        self._inner.wait(stream, fence_or_event)

    def block_bytes(self, group: str) -> int:
        """See `Backend`."""
        return self._inner.block_bytes(group)

    def eta_seconds(self, direction: Direction, num_bytes: int) -> float:
        """See `Backend`."""
        return self._inner.eta_seconds(direction, num_bytes)

    def close(self, *, deadline_s: float) -> bool:
        """See `Backend`."""
        return self._inner.close(deadline_s=deadline_s)
