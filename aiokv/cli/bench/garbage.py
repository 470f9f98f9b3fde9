"""Garbage collection while something is measured: the library never touches it, the command is the host and may.

What exists when a measurement begins is frozen, as a server does after its start; then collections run as usual, and
once more at each audit, so that memory shows what is kept and not what nobody has collected yet. They interrupt whoever
allocates: their time is told by itself and is no part of the step they fell into.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, final

from aiokv.cli.bench.hold import HoldMeter

__all__ = ["GarbagePauses", "collections_off", "frozen", "frozen_garbage"]

_START: Final = "start"


@final
class GarbagePauses:
    """How long collections have taken, in CPU seconds of the thread they ran in."""

    __slots__ = ("_meter", "_started", "count", "longest_s")

    def __init__(self, meter: HoldMeter) -> None:
        self._meter = meter
        self._started = 0.0
        self.count = 0
        self.longest_s = 0.0

    def collect(self) -> None:
        """Collect everything now."""
        gc.collect()

    def note(self, phase: str, _info: dict[str, int]) -> None:  # the interpreter calls it
        """One collection begins or ends."""
        if phase == _START:
            self._started = time.thread_time()
            return
        took = time.thread_time() - self._started
        self._meter.exclude_s(took)
        self.count += 1
        self.longest_s = max(self.longest_s, took)


@contextmanager
def frozen_garbage(meter: HoldMeter) -> Iterator[GarbagePauses]:
    """Freezes what exists now, tells the meter of every collection until the end, then thaws."""
    pauses = GarbagePauses(meter)
    with frozen():
        gc.callbacks.append(pauses.note)
        try:
            yield pauses
        finally:
            gc.callbacks.remove(pauses.note)


@contextmanager
def frozen() -> Iterator[None]:
    """Freezes what exists now: no collection looks at it until the end."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def collections_off() -> Iterator[None]:
    """Collects what there is, and nothing more until the end: for what is timed in one go."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
