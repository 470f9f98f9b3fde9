"""The time of one side, without what is not its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar, final

from aiokv.backends.base import Backend, DeviceEvent
from aiokv.model.plan import CopyBatch
from aiokv.testing.passing_backend import PassingBackend

__all__ = ["SideClock", "UntimedBackend"]

A = TypeVar("A")
T = TypeVar("T")


@final
class SideClock:
    """Wall and CPU time of this process since it was made, without what is excluded."""

    __slots__ = ("_cpu", "_wall")

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Seconds, and seconds of CPU."""
        return time.perf_counter() - self._wall, time.process_time() - self._cpu

    def excluded(self, function: Callable[[A], T]) -> Callable[[A], T]:
        """The same function, whose time does not count."""

        def timed(argument: A) -> T:
            wall, cpu = self.read()
            try:
                return function(argument)
            finally:
                now_wall, now_cpu = self.read()
                self._wall += now_wall - wall
                self._cpu += now_cpu - cpu

        return timed


@final
class UntimedBackend(PassingBackend):
    """What a fake backend checks and remembers of a submission is a test's: the peer's copies are not even made."""

    __slots__ = ("_ring", "_rings", "_submit")

    def __init__(self, inner: Backend, *, clock: SideClock) -> None:
        super().__init__(inner)
        self._submit = clock.excluded(inner.submit)
        self._ring: Callable[[], None] = self._note_ring
        self._rings = 0

    def attach_doorbell(self, ring: Callable[[], None]) -> None:
        """See `Backend`."""
        self._ring = ring
        self._inner.attach_doorbell(self._note_ring)

    def submit(self, batch: CopyBatch) -> DeviceEvent:
        """See `Backend`. What the doorbell makes the runtime do is timed."""
        event = self._submit(batch)
        if self._rings:
            self._rings = 0
            self._ring()
        return event

    def _note_ring(self) -> None:
        self._rings += 1
