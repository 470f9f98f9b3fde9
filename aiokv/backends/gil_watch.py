"""Whether a thread that copies has to wait for the GIL: another thread that never rests gives it up once in 5 ms only.

Then each call between two copies costs more than the copies, and fewer calls that copy twice are faster.
"""

from __future__ import annotations

import time
from typing import Final, Protocol, final

__all__ = ["Gil", "GilWatch"]

_STEPS_TO_BELIEVE: Final = 2
"""One step may have been interrupted by another program."""


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

    __slots__ = ("_began", "_began_work", "_waits")

    def __init__(self) -> None:
        self._began = self._began_work = 0.0
        self._waits = 0

    @property
    def is_scarce(self) -> bool:
        """Whether the last steps waited longer than they worked."""
        return self._waits >= _STEPS_TO_BELIEVE

    def begin(self) -> None:
        """A step begins."""
        self._began, self._began_work = time.perf_counter(), time.thread_time()

    def end(self) -> None:
        """A step has ended."""
        worked = time.thread_time() - self._began_work
        has_waited = time.perf_counter() - self._began > 2.0 * worked
        self._waits = self._waits + 1 if has_waited else 0
