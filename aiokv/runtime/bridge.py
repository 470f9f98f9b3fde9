"""The bridge between device events and the event loop: one poller, heads of streams only.

Copies of one stream end in order, so only the oldest event of each stream is ever asked: ten thousand copies in
flight cost what two do. The first look comes when the head is expected to be done, then every 0.1 ms for a
millisecond, then at doubling intervals up to 2 ms. With nothing in flight no timer is set. A backend that rings the
doorbell is not polled.

A head begins when the one before it has ended, not when that was seen: otherwise each look of a busy stream would come
later than the one before, by all that the loop does in between. How long it should take is asked when it begins: what
was known when it was submitted, behind hundreds of others, may be nothing.

Rules: a tick ends one event, and more as long as they are at most `TICK_COMPLETIONS` and of `TICK_BLOCKS` blocks
together, then lets the loop turn; it never waits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from aiokv.backends.base import DeviceEvent, EventStatus, WakeMode
from aiokv.core.slices import SLICE_BLOCKS
from aiokv.model.ids import Direction
from aiokv.observe.stats import Polls, Stats
from aiokv.runtime.timers import make_timer

__all__ = ["TICK_BLOCKS", "TICK_COMPLETIONS", "Bridge", "Watched"]

TICK_COMPLETIONS: Final = 4
"""The end of one transfer takes 0.1 to 0.3 ms of the loop's thread, however small it is: its slots change hands."""
TICK_BLOCKS: Final = SLICE_BLOCKS
"""And that of many blocks as long as a slice: what is larger goes on in slices by itself."""
_STEP_S: Final = 100e-6
_FAST_STEPS: Final = 10
_LONGEST_STEP_S: Final = 2e-3
_MOST_DOUBLINGS: Final = 5
"""More of them reach no longer step, and after a thousand no float: a copy may be stuck for hours."""
_SHORTEST_ETA_S: Final = 20e-6
_LONGEST_ETA_S: Final = 50e-3
"""However long a copy should take, its event is asked that often: an estimate may be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Watched:
    """One submitted batch: its event, how long it should take once it is the head, and who is told of its end."""

    event: DeviceEvent
    expected_s: Callable[[], float]
    on_end: Callable[[EventStatus, str], None]
    num_blocks: int = 1


class _Look(NamedTuple):
    """How many events have ended, and whether the tick was full before all heads were asked."""

    ended: int
    is_full: bool


@final
class Bridge:
    """Watches device events for one loop."""

    __slots__ = (
        "_alarm_at",
        "_begun_at",
        "_expected_s",
        "_is_closed",
        "_is_paused",
        "_loop",
        "_misses",
        "_pending_ring",
        "_rung_at",
        "_running_at",
        "_stats",
        "_streams",
        "_timer",
        "ended_at",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, *, wake_mode: WakeMode, stats: Stats) -> None:
        self._loop = loop
        self._stats = stats
        self._streams: dict[Direction, deque[Watched]] = {direction: deque() for direction in Direction}
        self._timer = make_timer(loop, self._alarm) if wake_mode is WakeMode.POLL else None
        self._pending_ring: asyncio.Handle | None = None
        self._alarm_at = math.inf
        """When the timer goes off, by the monotonic clock."""
        self._begun_at = dict.fromkeys(Direction, -math.inf)
        """When the head of each stream began, as far as is known."""
        self._expected_s = dict.fromkeys(Direction, 0.0)
        """How long it should take."""
        self._running_at = dict.fromkeys(Direction, -math.inf)
        """When it was last seen to be running."""
        self._rung_at = -math.inf
        """When the doorbell rang, for what the next look finds."""
        self.ended_at = -math.inf
        """When the event ended whose end is being told, as far as is known: the doorbell rang, or when a head that is
        asked now and then must have ended. Read it, never write."""
        self._misses = 0
        self._is_paused = False
        self._is_closed = False

    @property
    def in_flight(self) -> int:
        """Events that have not been seen to end."""
        return sum(map(len, self._streams.values()))

    def depth(self, direction: Direction) -> int:
        """Events in flight on one stream."""
        return len(self._streams[direction])

    def watch(self, direction: Direction, watched: Watched) -> None:
        """Tell `watched.on_end` once, in a later turn, when its event has ended."""
        stream = self._streams[direction]
        stream.append(watched)
        if len(stream) == 1:
            self._misses = 0
            self._begun_at[direction] = time.monotonic()
            self._expected_s[direction] = _estimate(watched)
            self._arm(_clamped(self._expected_s[direction]))

    def ring(self) -> None:
        """Something may have ended: look in the loop's next turn."""
        if self._pending_ring is None:
            self._rung_at = time.monotonic()
            self._look_soon()

    def pause(self) -> None:
        """Ask no event until `resume`."""
        self._is_paused = True
        self._disarm()

    def resume(self) -> None:
        """Look again, at once."""
        self._is_paused = False
        if self.in_flight:
            self.ring()

    def poll(self) -> bool:
        """Ask the heads now, without the loop; True if anything ended. For closing after the loop has gone."""
        self._rung_at = time.monotonic()
        return self._end_heads(budget=math.inf).ended > 0

    def close(self) -> None:
        """Stop looking, whoever rings. Events still in flight stay where they are."""
        self._is_closed = True
        self._disarm()
        if self._timer is not None:
            self._timer.close()
            self._timer = None

    def _look_soon(self) -> None:
        is_deaf = self._is_paused or self._is_closed or self._loop.is_closed()
        if self._pending_ring is None and not is_deaf:
            self._pending_ring = self._loop.call_soon(self._tick)

    def _alarm(self) -> None:
        """The timer went off. One that nobody waits for any more, as all was asked before, is no lag."""
        if self._alarm_at < math.inf:
            self._stats.loop_lag_seconds.observe(time.monotonic() - self._alarm_at)
        self._tick()

    def _tick(self) -> None:
        self._pending_ring = None
        self._alarm_at = math.inf
        if self._is_paused:
            return
        ended, is_full = self._end_heads(budget=TICK_BLOCKS)
        self._stats.polls[Polls.PROGRESS if ended else Polls.EMPTY] += 1
        if not self.in_flight or self._is_paused:
            return
        if is_full:
            self._look_soon()
        elif ended:
            self._misses = 0
            self._arm(self._first_delay())
        else:
            self._misses += 1
            self._arm(self._next_delay())

    def _end_heads(self, *, budget: float) -> _Look:
        """End heads until the next one would cost more blocks than are left. The first that did not end well is the
        last: those who wait for it plan again, which takes as long as many ends.
        """
        ended = 0
        for direction, stream in self._streams.items():
            while stream:
                cost = _cost_of(stream[0])
                if ended and cost > budget:
                    return _Look(ended, is_full=True)
                status, detail = _ask(stream[0].event)
                if status is EventStatus.PENDING:
                    self._running_at[direction] = time.monotonic()
                    break
                watched = stream.popleft()
                ended += 1
                budget = budget - cost if status is EventStatus.DONE else 0.0
                self._begun_at[direction] = self._find_end(direction)
                if stream:
                    self._expected_s[direction] = _estimate(stream[0])
                self.ended_at = self._rung_at if self._timer is None else self._begun_at[direction]
                watched.on_end(status, detail)
        return _Look(ended, is_full=False)

    def _find_end(self, direction: Direction) -> float:
        """When a head has ended that is seen to have: as expected, but after it was last seen to be running."""
        expected = self._begun_at[direction] + self._expected_s[direction]
        return min(max(expected, self._running_at[direction]), time.monotonic())

    def _first_delay(self) -> float:
        """Until one of the heads is expected to be done."""
        at = min(
            self._begun_at[direction] + self._expected_s[direction]
            for direction, stream in self._streams.items()
            if stream
        )
        return _clamped(at - time.monotonic())

    def _next_delay(self) -> float:
        """After so many looks in vain."""
        if self._misses <= _FAST_STEPS:
            return _STEP_S
        doublings = min(self._misses - _FAST_STEPS, _MOST_DOUBLINGS)
        return float(min(_STEP_S * 2.0**doublings, _LONGEST_STEP_S))

    def _arm(self, delay_s: float) -> None:
        """Look again in `delay_s` at the latest: an earlier alarm, for the other stream, stays."""
        at = time.monotonic() + delay_s
        if self._timer is not None and not self._is_paused and at < self._alarm_at:
            self._alarm_at = at
            self._timer.set(delay_s)

    def _disarm(self) -> None:
        self._alarm_at = math.inf
        if self._timer is not None:
            self._timer.cancel()
        if self._pending_ring is not None:
            self._pending_ring.cancel()
            self._pending_ring = None


def _ask(event: DeviceEvent) -> tuple[EventStatus, str]:
    """What an event says now. One that raises or says nothing known cannot tell any more what was copied: it would be
    asked for ever, and nothing behind it in its stream.
    """
    try:
        told: object = event.query()
        status = told if isinstance(told, EventStatus) else EventStatus(told)
        return status, "" if status is EventStatus.PENDING else event.detail()
    except Exception as error:
        return EventStatus.LOST, f"its event could not be asked: {error!r}"


def _estimate(watched: Watched) -> float:
    """What a batch should take; no time where nobody can tell: it is looked for soon, and then seldom."""
    try:
        return watched.expected_s()
    except Exception:
        return 0.0


def _cost_of(watched: Watched) -> int:
    """In blocks, what the end of a batch takes of a tick."""
    return min(watched.num_blocks + TICK_BLOCKS // TICK_COMPLETIONS - 1, TICK_BLOCKS)


def _clamped(expected_s: float) -> float:
    return min(max(expected_s, _SHORTEST_ETA_S), _LONGEST_ETA_S)
