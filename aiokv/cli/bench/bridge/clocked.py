"""A device without memory or thread, whose copies end when the clock says so: one after the other in each stream.

So it is known, without asking anybody, when a copy has ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import final

from aiokv.backends.base import BackendLayout, EventStatus, WakeMode
from aiokv.backends.no_streams import NoStreams
from aiokv.backends.pinning import NOTHING_TO_PIN
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch

__all__ = ["ClockedBackend", "ClockedEvent"]


@final
class ClockedEvent:
    """A copy that has ended once the clock has reached `done_at`."""

    __slots__ = ("done_at",)

    def __init__(self) -> None:
        self.done_at = math.inf
        """By `time.monotonic`."""

    def query(self) -> EventStatus:
        """See `DeviceEvent`."""
        return EventStatus.DONE if time.monotonic() >= self.done_at else EventStatus.PENDING

    def detail(self) -> str:
        """See `DeviceEvent`."""
        return ""

    def corrupt_copies(self) -> tuple[int, ...]:
        """See `DeviceEvent`."""
        return ()


@final
class ClockedBackend(NoStreams):
    """Every batch takes `copy_s` on its stream, as estimated. Nothing runs before `start`; after `hurry` none waits."""

    __slots__ = ("_copy_s", "_last", "_pace", "events")

    name = "clocked"
    wake_mode = WakeMode.POLL
    pinning = NOTHING_TO_PIN

    def __init__(self, *, copy_s: float) -> None:
        self._copy_s = copy_s
        self._pace = math.inf
        self._last = dict.fromkeys(Direction, -math.inf)
        self.events: list[ClockedEvent] = []
        """Of all batches since `hold`, in the order of their submission."""

    def hold(self) -> None:
        """What is submitted from now on stands still until `start`. Nothing may be in flight."""
        self._pace = math.inf
        self.events = []

    def start(self) -> None:
        """Copies run from now on: first those that have been submitted, all of which load."""
        self._pace = self._copy_s
        self._last = dict.fromkeys(Direction, -math.inf)
        for event in self.events:
            self._run(event, Direction.LOAD)

    def hurry(self) -> None:
        """Whatever runs has ended, and what comes ends at once."""
        self._pace = 0.0
        self._last = dict.fromkeys(Direction, -math.inf)
        now = time.monotonic()
        for event in self.events:
            event.done_at = min(event.done_at, now)

    def watch(self, place: int) -> None:
        """The end of every copy is known."""

    def done_at(self, place: int) -> float | None:
        """See `PacedBackend`."""
        return self.events[place].done_at

    def open(self, layout: BackendLayout) -> None:
        """There is nothing to open."""

    def attach_doorbell(self, ring: Callable[[], None]) -> None:
        """The bridge polls."""

    def submit(self, batch: CopyBatch) -> ClockedEvent:
        """See `Backend`."""
        event = ClockedEvent()
        self.events.append(event)
        self._run(event, batch.direction)
        return event

    def block_bytes(self, group: str) -> int:
        """Always 0: there is no memory."""
        return 0

    def eta_seconds(self, direction: Direction, num_bytes: int) -> float:
        """What a batch takes, exactly."""
        return self._copy_s

    def close(self, *, deadline_s: float) -> bool:
        """There is nothing to free."""
        return True

    def _run(self, event: ClockedEvent, direction: Direction) -> None:
        """Behind the copy before it on its stream; never, while they are held."""
        if self._pace < math.inf:
            self._last[direction] = event.done_at = max(time.monotonic(), self._last[direction]) + self._pace
