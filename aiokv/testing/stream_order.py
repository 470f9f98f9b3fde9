"""An oracle for law 5: which uses of a slot are ordered by streams, fences and the host, and which are not.

A model of happens-before, by vector clocks. Each *operation* stands at a place of one stream and is ordered behind what
came before it there, behind the points its stream was made to wait for, and behind all that the host had seen to be
over when it issued it. Two operations that use one slot, one of them writing, and that are not so ordered, may overlap
on a device: that is a violation, whether or not they would have on a good day.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import NamedTuple, final

__all__ = ["Point", "SlotUse", "StreamOrder"]

Clock = dict[Hashable, int]
"""Per stream, how many of its operations are over."""


class SlotUse(NamedTuple):
    """A slot that is read or written: any name of it."""

    space: str
    slot: int


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A place of a stream, and all that is over once the stream has passed it."""

    stream: Hashable
    clock: Clock

    @property
    def position(self) -> int:
        """How many operations of its own stream are before it."""
        return self.clock.get(self.stream, 0)


class _Operation(NamedTuple):
    stream: Hashable
    position: int
    name: str

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.position


@final
class StreamOrder:
    """Streams come to be when they are named first."""

    __slots__ = ("_host", "_readers", "_streams", "_writer", "violations")

    def __init__(self) -> None:
        self._streams: dict[Hashable, Clock] = {}
        self._host: Clock = {}
        self._writer: dict[SlotUse, _Operation] = {}
        self._readers: dict[SlotUse, dict[Hashable, _Operation]] = {}
        self.violations: list[str] = []
        """In words, each pair of operations that may overlap and must not."""

    def run(
        self, stream: Hashable, name: str, *, reads: Collection[SlotUse] = (), writes: Collection[SlotUse] = ()
    ) -> Point:
        """Queue an operation on a stream; the point behind it."""
        clock = self._streams.setdefault(stream, {})
        _merge(clock, self._host)
        operation = _Operation(stream, clock.get(stream, 0) + 1, name)
        for use in reads:
            self._check(operation, use, clock=clock, others=self._writers_of(use))
            self._readers.setdefault(use, {})[stream] = operation
        for use in writes:
            others = [*self._writers_of(use), *self._readers.pop(use, {}).values()]
            self._check(operation, use, clock=clock, others=others)
            self._writer[use] = operation
        clock[stream] = operation.position
        return self.point(stream)

    def point(self, stream: Hashable) -> Point:
        """The point behind all that was queued on a stream so far."""
        return Point(stream, dict(self._streams.get(stream, {})))

    def wait(self, stream: Hashable, point: Point) -> None:
        """What is queued on `stream` from now on runs behind `point`."""
        _merge(self._streams.setdefault(stream, {}), point.clock)

    def see(self, point: Point) -> None:
        """The host has seen that a point was passed: what it issues from now on comes after."""
        _merge(self._host, point.clock)

    def has_seen(self, point: Point) -> bool:
        """Whether the host knows that."""
        return self._host.get(point.stream, 0) >= point.position

    def _writers_of(self, use: SlotUse) -> list[_Operation]:
        return [self._writer[use]] if use in self._writer else []

    def _check(self, operation: _Operation, use: SlotUse, *, clock: Clock, others: Collection[_Operation]) -> None:
        for other in others:
            if not other.is_before(clock) and other != operation:
                self.violations.append(f"{operation.name} uses {use} while {other.name} may still use it")


def _merge(clock: Clock, other: Clock) -> None:
    for stream, position in other.items():
        if clock.get(stream, 0) < position:
            clock[stream] = position
