"""`EventStream`: cache events as an async iterator."""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from typing import Self, final

from aiokv.errors import UsageError
from aiokv.model.events import CacheEvent
from aiokv.observe.publisher import Subscription
from aiokv.runtime.offload import Offloader

__all__ = ["EventStream"]


@final
class EventStream:
    """One subscription, as an async context manager and an async iterator, for one reader.

    `async with` subscribes on entry and ends on exit; plain iteration subscribes at once and ends with the iterator. A
    reader that is too slow gets an `EventsDropped` where events are missing; nobody ever waits for it.
    """

    __slots__ = ("__weakref__", "_offloader", "_subscription", "_waiter")

    def __init__(self, offloader: Offloader, *, backlog: int) -> None:
        if not isinstance(backlog, int) or isinstance(backlog, bool) or backlog < 1:
            raise UsageError(f"backlog must be a whole number of at least 1, not {backlog!r}")
        self._offloader = offloader
        self._waiter: asyncio.Future[None] | None = None
        self._subscription = Subscription(on_change=partial(_wake, weakref.ref(self)), backlog=backlog)

    async def __aenter__(self) -> Self:
        return self.__aiter__()

    async def __aexit__(self, *exc_info: object) -> None:
        self._offloader.publisher.remove(self._subscription)
        self._subscription.end()

    def __aiter__(self) -> Self:
        if not self._subscription.has_ended:
            self._offloader.subscribe(self._subscription)
        return self

    def take(self) -> list[CacheEvent]:
        """All events that are there, for readers that poll; does not wait."""
        events = []
        while self._subscription:
            events.append(self._subscription.take())
        return events

    async def __anext__(self) -> CacheEvent:
        while not self._subscription:
            if self._subscription.has_ended:
                raise StopAsyncIteration
            await self._next_change()
        return self._subscription.take()

    async def _next_change(self) -> None:
        if self._waiter is not None:
            raise UsageError("a stream of events has one reader: another task is waiting for them")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Let the reader look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _wake(stream: weakref.ref[EventStream]) -> None:
    """The subscription does not keep its reader alive."""
    reader = stream()
    if reader is not None:
        reader.wake()
