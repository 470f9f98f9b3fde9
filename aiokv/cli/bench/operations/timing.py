"""One round of an operation: prepare, lead in, time, put back. Only the third is measured, in CPU time of its thread.

What leads in is the same operation once more, with a short prompt of its own: else the first of a few hundred
microseconds would tell how fast the processor forgets what arranging has left in its caches.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar, final

from aiokv.cli.bench.cases import Collector

__all__ = ["Bench", "Prepared", "Rounds", "TimedOperation", "Times", "VoidRoundError", "now_ns"]

now_ns: Final = time.thread_time_ns
"""CPU time of this thread: what others run on the same core meanwhile does not count."""

_MOST_VOID_ROUNDS: Final = 16


class VoidRoundError(RuntimeError):
    """Something else was timed than the case says: not all blocks were where they were to be, or went there.

    Whatever has driven a block out of a tier meanwhile may not do so again: the round does not count and is done anew.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What one request of a round took, in nanoseconds by part: those that make up the operation, and what was done
    beside it."""

    counted: Mapping[str, int]
    beside: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_ns(self) -> int:
        """The operation."""
        return sum(self.counted.values())

    @property
    def whole_ns(self) -> int:
        """The operation, and what was done beside it."""
        return self.total_ns + sum(self.beside.values())

    def shared_by(self, requests: int) -> Times:
        """What so many requests have taken together, for one of them."""
        return Times(
            counted={part: took // requests for part, took in self.counted.items()},
            beside={part: took // requests for part, took in self.beside.items()},
        )


class Bench(Protocol):
    """One case, ready to be measured again and again."""

    @property
    def times(self) -> Times:
        """Of one request of the last round, by part."""
        ...

    def run_round(self) -> int:
        """Prepare with fresh keys, do the operation, put everything back; the nanoseconds of one request."""
        ...


B = TypeVar("B")
"""The requests that go through an operation together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Generic[B]):
    """Who goes through the operation untimed, and who does so right after, timed."""

    lead_in: B
    measured: B

    @property
    def batches(self) -> tuple[B, B]:
        """Both, in the order in which they go."""
        return self.lead_in, self.measured


class TimedOperation(Protocol[B]):
    """The steps of a round."""

    def prepare(self) -> Prepared[B]:
        """Have everything as the case says, with keys that nobody has seen."""
        ...

    def run(self, batch: B) -> Times:
        """Do it for these requests, one right after the other; what they have taken together."""
        ...

    def restore(self, prepared: Prepared[B]) -> None:
        """Leave nothing held. `VoidRoundError` if the operation was not what the case says."""
        ...


@final
class Rounds(Generic[B]):
    """Rounds of one operation, each of so many requests."""

    __slots__ = ("_collector", "_operation", "_requests", "times")

    def __init__(self, operation: TimedOperation[B], *, requests: int, collector: Collector) -> None:
        self._operation = operation
        self._requests = requests
        self._collector = collector
        self.times = Times(counted={})

    def run_round(self) -> int:
        """See `Bench`."""
        for _ in range(_MOST_VOID_ROUNDS):
            with suppress(VoidRoundError):
                return self._run_round()
        return self._run_round()

    def _run_round(self) -> int:
        prepared = self._operation.prepare()
        with _collecting(self._collector):
            self._operation.run(prepared.lead_in)
            taken = self._operation.run(prepared.measured)
        self.times = taken.shared_by(self._requests)
        self._operation.restore(prepared)
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
