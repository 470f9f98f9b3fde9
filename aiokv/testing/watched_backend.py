"""A fake backend whose submissions are told, before anything else happens, to somebody who keeps the books."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from aiokv.backends.base import DeviceEvent
from aiokv.backends.fake import FakeBackend
from aiokv.model.plan import CopyBatch
from aiokv.testing.passing_backend import PassingBackend

__all__ = ["WatchedBackend"]


@final
class WatchedBackend(PassingBackend):
    """Tells `on_submit` of every batch that a `FakeBackend` has taken."""

    __slots__ = ("_on_submit",)

    def __init__(self, fake: FakeBackend, *, on_submit: Callable[[CopyBatch], None]) -> None:
        super().__init__(fake)
        self._on_submit = on_submit

    def submit(self, batch: CopyBatch) -> DeviceEvent:
        """See `Backend`. What the fake refuses was never started."""
        event = super().submit(batch)
        self._on_submit(batch)
        return event
