"""Who waits for capacity: first in, first out within a priority, and nobody overtakes.

Only the head of the queue is ever tried, so a large request cannot be starved by small ones behind it. Requests for
more room of a running lease go before all admissions: what runs must be able to end.

A waiter that was granted and cancelled in the same turn finds the grant in its future and gives it back (law 4).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar, final

from aiokv.errors import LeaseReleased
from aiokv.model.plan import Deferred
from aiokv.runtime.deadline import Deadline

__all__ = ["Rank", "WaitQueue", "Waiter", "refuse", "resolve", "stand_in_line"]

T = TypeVar("T")


class Rank(IntEnum):
    """Running leases are served before new ones."""

    EXTENSION = 0
    ADMISSION = 1


@final
class Waiter:
    """One entry: how to try, and the future that gets the result. Ordered by rank, priority and arrival."""

    __slots__ = ("attempt", "future", "order")

    def __init__(
        self, *, order: tuple[int, int, int], attempt: Callable[[], object], future: asyncio.Future[Any]
    ) -> None:
        self.order = order
        self.attempt = attempt
        self.future = future

    def __lt__(self, other: Waiter) -> bool:
        return self.order < other.order


@final
class WaitQueue:
    """Waiters in the order in which they are served."""

    __slots__ = ("_arrivals", "_gone", "_heap")

    def __init__(self) -> None:
        self._heap: list[Waiter] = []
        self._arrivals = itertools.count()
        self._gone = 0
        """Waiters that left since the heap was last cleared of them."""

    def __len__(self) -> int:
        return sum(not waiter.future.done() for waiter in self._heap)

    @property
    def is_empty(self) -> bool:
        """Whether certainly nobody waits: whoever has left may still be counted."""
        return not self._heap

    def blocks(self, *, rank: Rank, priority: int = 0) -> bool:
        """Whether someone waits who must be served before a newcomer of this rank and priority."""
        self._forget_gone()
        return bool(self._heap) and self._heap[0].order[:2] <= (rank, priority)

    def add(self, attempt: Callable[[], object], *, future: asyncio.Future[Any], rank: Rank, priority: int = 0) -> None:
        """Wait in line. `attempt` answers a grant or `Deferred`; what it raises is raised to the waiter."""
        order = (int(rank), priority, next(self._arrivals))
        heapq.heappush(self._heap, Waiter(order=order, attempt=attempt, future=future))

    def remove(self, future: asyncio.Future[Any]) -> None:
        """Whoever waits for this future has gone without a word: its coroutine was closed."""
        self._keep([waiter for waiter in self._heap if waiter.future is not future])

    def note_gone(self) -> None:
        """A waiter's future has ended otherwise. Those behind the head are cleared away once they are the majority."""
        self._gone += 1
        if 2 * self._gone > len(self._heap):
            self._keep([waiter for waiter in self._heap if not waiter.future.done()])

    def serve_head(self) -> bool:
        """Try the head once; True if it is served and another one may be tried."""
        self._forget_gone()
        if not self._heap:
            return False
        waiter = self._heap[0]
        try:
            result = waiter.attempt()
        except Exception as error:  # it belongs to the waiter
            heapq.heappop(self._heap)
            waiter.future.set_exception(error)
            return True
        if isinstance(result, Deferred):
            return False
        heapq.heappop(self._heap)
        waiter.future.set_result(result)
        return True

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """Nobody will be served any more."""
        heap, self._heap = self._heap, []
        for waiter in heap:
            if not waiter.future.done():
                waiter.future.set_exception(make_error())

    def _keep(self, waiters: list[Waiter]) -> None:
        heapq.heapify(waiters)
        self._heap = waiters
        self._gone = 0

    def _forget_gone(self) -> None:
        while self._heap and self._heap[0].future.done():
            heapq.heappop(self._heap)


async def stand_in_line(
    queue: WaitQueue,
    attempt: Callable[[], T | Deferred],
    *,
    future: asyncio.Future[T],
    deadline: Deadline,
    rank: Rank,
    priority: int = 0,
    give_back: Callable[[T], None],
    on_leave: Callable[[], None],
) -> T:
    """Wait on `future`, the waiter's own, until `attempt` is granted.

    Whoever leaves instead gives back a grant that came in the same turn, then calls `on_leave` for the next in line.
    """
    queue.add(attempt, future=future, rank=rank, priority=priority)
    try:
        return await deadline.wait(future)
    except GeneratorExit:
        queue.remove(future)
        on_leave()
        raise
    except BaseException:
        if future.done() and not future.cancelled() and future.exception() is None:
            give_back(future.result())
        queue.note_gone()
        on_leave()
        raise


def resolve(future: asyncio.Future[None]) -> None:
    """What it waits for has come, unless it waits no more."""
    if not future.done():
        future.set_result(None)


def refuse(future: asyncio.Future[int], *, request_id: str) -> None:
    """The lease of whoever waits is gone, unless it waits no more."""
    if not future.done():
        future.set_exception(LeaseReleased(request_id))
