"""Who may come in: the bound on waiting prompts, and the end of intake.

Rules
- A place in the queue is taken before anything of a prompt is tokenised or reserved, and all prompts of one request get
  one or none does.
- A seat is given back exactly once, by a plain call, whatever became of the task that sat on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import final

from aiokv_engine.server.errors import ApiError

__all__ = ["Gate", "Seat"]


class _Place(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    LEFT = "left"


@final
class Gate:
    """Counts prompts that wait and that run, and requests that are not answered yet. Belongs to one event loop."""

    __slots__ = ("_cutters", "_idle", "_is_open", "_max_queue", "_refusers", "_unanswered", "queued", "running")

    def __init__(self, *, max_queue: int) -> None:
        self._max_queue = max_queue
        self._is_open = True
        self._unanswered = 0
        self._idle: list[asyncio.Future[None]] = []
        self._cutters: dict[object, Callable[[], None]] = {}
        self._refusers: dict[object, Callable[[], None]] = {}
        self.queued = 0
        """Prompts that are tokenised, wait for room or for their blocks."""
        self.running = 0
        """Prompts that have their blocks."""

    @property
    def max_queue(self) -> int:
        """How many prompts may wait."""
        return self._max_queue

    @property
    def is_idle(self) -> bool:
        """Whether every request has been answered and every prompt has left."""
        return not (self._unanswered or self.queued or self.running)

    @property
    def being_answered(self) -> int:
        """Requests that have come in and are not answered yet."""
        return len(self._cutters)

    def check_room(self, *, prompts: int = 1) -> None:
        """Raises `ApiError` if so many prompts could not come in now; changes nothing."""
        if not self._is_open:
            raise ApiError.draining()
        if self.queued + prompts > self._max_queue:
            raise ApiError.queue_full()

    def take_seats(self, prompts: int) -> tuple[Seat, ...]:
        """Takes a place for each of `prompts`; raises `ApiError`, and has taken none, if they have no room."""
        self.check_room(prompts=prompts)
        self.queued += prompts
        return tuple(Seat(self) for _ in range(prompts))

    def reading(self, refuse: Callable[[], None]) -> AbstractContextManager[None]:
        """A request is still coming inside; `refuse` is what ends that when the gate closes."""
        return self._unanswered_in(self._refusers, end=refuse)

    def answering(self, cut_off: Callable[[], None]) -> AbstractContextManager[None]:
        """A request is being answered inside; `cut_off` is what ends it early."""
        return self._unanswered_in(self._cutters, end=cut_off)

    @contextmanager
    def _unanswered_in(self, enders: dict[object, Callable[[], None]], *, end: Callable[[], None]) -> Iterator[None]:
        key = object()
        self._unanswered += 1
        enders[key] = end
        try:
            yield
        finally:
            del enders[key]
            self._unanswered -= 1
            self.note_change()

    def close(self) -> None:
        """Nobody comes in from now on, who is still being read neither; who is in stays."""
        self._is_open = False
        for refuse in list(self._refusers.values()):
            refuse()

    def cut_off(self) -> int:
        """Ends every request that is being answered; returns how many there were."""
        cutters = list(self._cutters.values())
        for cut_off in cutters:
            cut_off()
        return len(cutters)

    async def wait_idle(self) -> None:
        """Waits until nothing is left."""
        while not self.is_idle:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(waiter)
            await waiter

    def note_change(self) -> None:
        """Wakes who waits for an idle gate, if it is."""
        if self.is_idle:
            waiters, self._idle = self._idle, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


@final
class Seat:
    """One prompt's place: queued, then running, then left."""

    __slots__ = ("_gate", "_place")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._place = _Place.QUEUED

    def start(self) -> None:
        """The prompt has its blocks."""
        if self._place is _Place.QUEUED:
            self._place = _Place.RUNNING
            self._gate.queued -= 1
            self._gate.running += 1

    def leave(self) -> None:
        """The prompt needs its place no more. Idempotent."""
        if self._place is _Place.QUEUED:
            self._gate.queued -= 1
        elif self._place is _Place.RUNNING:
            self._gate.running -= 1
        self._place = _Place.LEFT
        self._gate.note_change()
