"""Whether a thread that copies has to wait for the GIL before each call.

Another thread that never rests gives the GIL up once in a switch interval only (5 ms), to whoever asked that long. A
loop of short copies may lose it after each of them, and then takes hundreds of times as long: fewer calls that copy
twice are faster. It may as well get it back at once each time, which depends on the machine; so it is looked at.
"""

from __future__ import annotations

import sys
import time
from typing import Final, Protocol, final

__all__ = ["Gil", "GilWatch"]

_INTERVALS_LOST: Final = 2
"""A step that waited for less has not lost the GIL after every call."""
_STEPS_TO_BELIEVE: Final = 2
"""One step may have been interrupted by another program."""
_STEPS_TO_STAY: Final = 16
"""So many steps are made with few calls before many are tried again."""


class Gil(Protocol):
    """What a copy is told of the GIL, and tells of its steps."""

    @property
    def is_scarce(self) -> bool:
        """Whether fewer calls are better than fewer bytes."""
        ...

    def begin(self) -> None:
        """A step begins."""
        ...

    def end(self) -> None:
        """A step has ended."""
        ...


@final
class GilWatch:
    """Times steps of the thread that uses it, on the clock and in work done."""

    __slots__ = ("_began", "_began_work", "_steps_left", "_waits")

    def __init__(self) -> None:
        self._began = self._began_work = 0.0
        self._waits = 0
        self._steps_left = 0

    @property
    def is_scarce(self) -> bool:
        """See `Gil`."""
        return self._steps_left > 0

    def begin(self) -> None:
        """See `Gil`."""
        self._began, self._began_work = time.perf_counter(), time.thread_time()

    def end(self) -> None:
        """See `Gil`."""
        if self._steps_left:
            self._steps_left -= 1
            return
        waited = time.perf_counter() - self._began - (time.thread_time() - self._began_work)
        self._waits = self._waits + 1 if waited > _INTERVALS_LOST * sys.getswitchinterval() else 0
        if self._waits == _STEPS_TO_BELIEVE:
            self._waits, self._steps_left = 0, _STEPS_TO_STAY
