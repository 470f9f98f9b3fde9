"""A step that never ends: broken books may let the core spin, and then no timeout of the loop is noticed any more.

The clock is the CPU time of the process: a loop that waits, or a machine that is busy elsewhere, is not taken for one.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, final

__all__ = ["LoopHeldError", "spinning_interrupted"]

_BEAT_S: Final = 0.05
_LONGEST_HOLD_S: Final = 1.0


class LoopHeldError(Exception):
    """Raised within a step that has held the loop for seconds."""


@contextmanager
def spinning_interrupted(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Inside, a step that takes seconds of CPU fails with `LoopHeldError`. Does nothing where there are no such timers.

    Signals belong to the main thread: elsewhere it does nothing either.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    watch = _Watch(loop)
    watch.beat()
    before = signal.signal(signal.SIGVTALRM, watch.look)
    signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST_HOLD_S, _LONGEST_HOLD_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
        watch.end()


@final
class _Watch:
    """Whether the loop has turned since the last look."""

    __slots__ = ("_beats", "_handle", "_loop", "_seen")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._beats = 0
        self._seen = 0
        self._handle: asyncio.TimerHandle | None = None

    def beat(self) -> None:
        """The loop turns."""
        self._beats += 1
        self._handle = self._loop.call_later(_BEAT_S, self.beat)

    def look(self, _signal: int, _frame: FrameType | None) -> None:  # the interpreter calls it
        """So much CPU time has passed again."""
        if self._beats == self._seen:
            raise LoopHeldError(f"a step has held the loop for {_LONGEST_HOLD_S:g} s of CPU or more")
        self._seen = self._beats

    def end(self) -> None:
        """Beat no more."""
        if self._handle is not None:
            self._handle.cancel()
