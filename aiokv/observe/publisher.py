"""Subscriptions to cache events: bounded, from the moment they start, never slowing the cache down.

A subscriber that falls behind loses the newest events and gets one `EventsDropped` in their place.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Final, Self, final

from aiokv.model.events import CacheEvent, EventsDropped

__all__ = ["DEFAULT_BACKLOG", "EventStream", "Publisher"]

DEFAULT_BACKLOG: Final = 10_000
"""Events kept for one subscriber."""


@final
class Publisher:
    """Hands events to every open stream; one that was abandoned is forgotten. Used from the loop's thread only."""

    __slots__ = ("_streams", "dropped", "published")

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[EventStream] = weakref.WeakSet()
        self.published = 0
        self.dropped = 0

    def __bool__(self) -> bool:
        """Whether anybody listens."""
        return bool(self._streams)

    def publish(self, events: Iterable[CacheEvent]) -> None:
        """Put events into every open stream; never waits."""
        for event in events:
            self.published += 1
            for stream in self._streams:
                self.dropped += not stream.put(event)

    def subscribe(self, stream: EventStream) -> None:
        """Deliver to `stream` from now on."""
        self._streams.add(stream)

    def unsubscribe(self, stream: EventStream) -> None:
        """Deliver no more to `stream`. Idempotent."""
        self._streams.discard(stream)

    def close(self) -> None:
        """End every stream after what it still holds."""
        for stream in tuple(self._streams):
            stream.end()


@final
class EventStream:
    """An async iterator over cache events, and an async context manager that starts and ends the subscription.

    Iterating without the context manager subscribes at the first step and ends with the iterator.
    """

    __slots__ = ("__weakref__", "_backlog", "_dropped", "_has_ended", "_is_subscribed", "_limit", "_publisher", "_waiter")

    def __init__(self, publisher: Publisher, *, backlog: int = DEFAULT_BACKLOG) -> None:
        self._publisher = publisher
        self._backlog: deque[CacheEvent] = deque()
        self._limit = backlog
        self._dropped = 0
        self._has_ended = False
        self._is_subscribed = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: CacheEvent) -> bool:
        """Keep an event for the subscriber; False if there is no room."""
        has_room = len(self._backlog) < self._limit
        if not has_room:
            self._dropped += 1
        else:
            self._keep_gap()
            self._backlog.append(event)
        self._wake()
        return has_room

    def end(self) -> None:
        """No more events; what is kept can still be read."""
        self._has_ended = True
        self._publisher.unsubscribe(self)
        self._wake()

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.end()

    def __aiter__(self) -> Self:
        self._start()
        return self

    async def __anext__(self) -> CacheEvent:
        while True:
            if self._backlog:
                return self._backlog.popleft()
            if self._dropped:
                self._keep_gap()
            elif self._has_ended:
                raise StopAsyncIteration
            else:
                await self._next_put()

    def _start(self) -> None:
        if not self._is_subscribed and not self._has_ended:
            self._is_subscribed = True
            self._publisher.subscribe(self)

    def _keep_gap(self) -> None:
        """What was lost comes before what follows."""
        if self._dropped:
            self._backlog.append(EventsDropped(count=self._dropped))
            self._dropped = 0

    async def _next_put(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
