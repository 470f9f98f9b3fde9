"""Subscriptions to cache events: bounded, from the moment they start, never slowing the cache down.

A subscriber that falls behind loses the newest events and finds one `EventsDropped` in their place.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, final

from aiokv.model.events import CacheEvent, EventsDropped

__all__ = ["DEFAULT_BACKLOG", "Publisher", "Subscription"]

DEFAULT_BACKLOG: Final = 10_000
"""Events kept for one subscriber."""


@final
class Subscription:
    """What one subscriber has not read yet. `on_change` is called after every change, from the publisher's thread."""

    __slots__ = ("__weakref__", "_backlog", "_dropped", "_limit", "_on_change", "has_ended")

    def __init__(self, *, on_change: Callable[[], None], backlog: int = DEFAULT_BACKLOG) -> None:
        self._backlog: deque[CacheEvent] = deque()
        self._limit = backlog
        self._dropped = 0
        self._on_change = on_change
        self.has_ended = False

    def __len__(self) -> int:
        """Events that can be taken, a gap marker included."""
        return len(self._backlog) + bool(self._dropped)

    def put(self, event: CacheEvent) -> bool:
        """Keep an event; False if there is no room, which is remembered."""
        has_room = len(self._backlog) < self._limit
        if has_room:
            self._keep_gap()
            self._backlog.append(event)
        else:
            self._dropped += 1
        self._on_change()
        return has_room

    def take(self) -> CacheEvent:
        """The oldest event, or the marker of what was lost; `IndexError` when there is none."""
        if not self._backlog:
            self._keep_gap()
        return self._backlog.popleft()

    def end(self) -> None:
        """No more events will come; what is kept can still be taken."""
        self.has_ended = True
        self._on_change()

    def _keep_gap(self) -> None:
        """What was lost comes before what follows."""
        if self._dropped:
            self._backlog.append(EventsDropped(count=self._dropped))
            self._dropped = 0


@final
class Publisher:
    """Hands events to every open subscription; an abandoned one is forgotten. Used from the loop's thread only, save
    where it says otherwise."""

    __slots__ = ("_is_closed", "_references", "_subscriptions")

    def __init__(self) -> None:
        self._is_closed = False
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()
        self._references: tuple[weakref.ref[Subscription], ...] = ()
        """The same for other threads: replaced, never changed."""

    @property
    def has_subscribers(self) -> bool:
        """Whether anybody listens."""
        return len(self._subscriptions) > 0

    def publish(self, events: Iterable[CacheEvent]) -> int:
        """Put events into every open subscription; never waits. Returns how many did not find room."""
        subscriptions = tuple(self._subscriptions)
        return sum(not subscription.put(event) for event in events for subscription in subscriptions)

    def add(self, subscription: Subscription) -> None:
        """Deliver to it from now on; after `close` there is nothing to deliver, and it ends."""
        if self._is_closed:
            subscription.end()
        else:
            self._subscriptions.add(subscription)
            self._note_change()

    def remove(self, subscription: Subscription) -> None:
        """Deliver no more to it. Idempotent."""
        self._subscriptions.discard(subscription)
        self._note_change()

    def close(self) -> None:
        """End every subscription after what it still holds."""
        self._is_closed = True
        for subscription in tuple(self._subscriptions):
            subscription.end()
        self._subscriptions.clear()
        self._note_change()

    def longest_backlog(self) -> int:
        """Events that the slowest subscriber has not taken; any thread may ask."""
        listening = (reference() for reference in self._references)
        return max((len(subscription) for subscription in listening if subscription is not None), default=0)

    def _note_change(self) -> None:
        self._references = tuple(map(weakref.ref, self._subscriptions))
