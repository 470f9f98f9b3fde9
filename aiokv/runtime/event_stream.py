"""`EventStream`: cache events as an async iterator."""

from __future__ import annotations

from typing import Self, final

from aiokv.model.events import CacheEvent
from aiokv.observe.publisher import Subscription
from aiokv.runtime.arguments import check_whole
from aiokv.runtime.offload import Offloader
from aiokv.runtime.wakeup import Wakeup

__all__ = ["EventStream"]


@final
class EventStream:
    """One subscription, as an async context manager and an async iterator, for one reader.

    `async with` subscribes on entry and ends on exit; plain iteration subscribes at once and ends with the iterator. A
    reader that is too slow gets an `EventsDropped` where events are missing; nobody ever waits for it.
    """

    __slots__ = ("_offloader", "_subscription", "_wakeup")

    def __init__(self, offloader: Offloader, *, backlog: int) -> None:
        check_whole("backlog", backlog, at_least=1)
        self._offloader = offloader
        self._wakeup = Wakeup("an event stream has one reader")
        self._subscription = Subscription(on_change=self._wakeup.wake, backlog=backlog)

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
        self._offloader.enter()
        events = []
        while self._subscription:
            events.append(self._subscription.take())
        return events

    async def __anext__(self) -> CacheEvent:
        self._offloader.enter()
        while not self._subscription:
            if self._subscription.has_ended:
                raise StopAsyncIteration
            await self._wakeup.wait()
        return self._subscription.take()
