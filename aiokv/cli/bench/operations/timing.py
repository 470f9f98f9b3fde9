"""One round of an operation: prepare, time, put back. Only the middle is measured, in CPU time of its thread."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Protocol, final

from aiokv.cli.bench.cases import Collector

__all__ = ["Bench", "Rounds", "TimedOperation", "Times", "VoidRoundError", "now_ns"]

now_ns: Final = time.thread_time_ns
"""CPU time of this thread: what others run on the same core meanwhile does not count."""


_MOST_VOID_ROUNDS: Final = 16


class VoidRoundError(RuntimeError):
    """Something else was timed than the case says: not all blocks were where they were to be, or went there.

    It happens while an eviction queue is full of dead entries, of which one step looks at a bounded number: a store
    finds fewer slots than there are then, and skips some blocks. The round does not count and is done again.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What one round took, in nanoseconds by part: those that make up the operation, and what was done beside it."""

    counted: Mapping[str, int]
    beside: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_ns(self) -> int:
        """The operation."""
        return sum(self.counted.values())


class Bench(Protocol):
    """One case, ready to be measured again and again."""

    @property
    def times(self) -> Times:
        """Of the last round, by part."""
        ...

    def run_round(self) -> int:
        """Prepare with fresh keys, do the operation once, put everything back; its nanoseconds."""
        ...


class TimedOperation(Protocol):
    """The three steps of a round."""

    def prepare(self) -> None:
        """Have everything as the case says, with keys that nobody has seen."""
        ...

    def run(self) -> Times:
        """Do it once."""
        ...

    def restore(self) -> None:
        """Leave nothing held. `VoidRoundError` if the operation was not what the case says."""
        ...


@final
class Rounds:
    """Rounds of one operation."""

    __slots__ = ("_collector", "_operation", "times")

    def __init__(self, operation: TimedOperation, *, collector: Collector) -> None:
        self._operation = operation
        self._collector = collector
        self.times = Times(counted={})

    def run_round(self) -> int:
        """See `Bench`."""
        for _ in range(_MOST_VOID_ROUNDS):
            with suppress(VoidRoundError):
                return self._run_round()
        return self._run_round()

    def _run_round(self) -> int:
        self._operation.prepare()
        with _collecting(self._collector):
            self.times = self._operation.run()
        self._operation.restore()
        return self.times.total_ns


@contextmanager
def _collecting(collector: Collector) -> Iterator[None]:
    """The collector as it is asked for, then as it was before."""
    was_on = gc.isenabled()
    (gc.enable if collector is Collector.ON else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if was_on else gc.disable)()
