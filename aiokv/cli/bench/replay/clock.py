"""The time of one slice, without what is not the side's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar, final

__all__ = ["SliceClock"]

P = TypeVar("P")
T = TypeVar("T")


@final
class SliceClock:
    """Wall and CPU time of this process since it was made, without what is excluded."""

    __slots__ = ("_cpu", "_wall")

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Seconds, and seconds of CPU."""
        return time.perf_counter() - self._wall, time.process_time() - self._cpu

    def excluded(self, function: Callable[[P], T]) -> Callable[[P], T]:
        """The same function, whose time does not count."""

        def timed(argument: P) -> T:
            wall, cpu = self.read()
            try:
                return function(argument)
            finally:
                now_wall, now_cpu = self.read()
                self._wall += now_wall - wall
                self._cpu += now_cpu - cpu

        return timed
