"""Who is to be told, once, when a lease has become ready or was closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import final

from aiokv.core.lease_table import LeaseRecord

__all__ = ["Notices"]


@final
class Notices:
    """Callbacks by lease; those of a loop that has closed are dropped."""

    __slots__ = ("_closed", "_loop", "_settled")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._settled: dict[int, list[Callable[[], None]]] = {}
        self._closed: dict[int, list[Callable[[], None]]] = {}

    def when_settled(self, record: LeaseRecord, callback: Callable[[], None]) -> None:
        """Call back once, when the lease has become ready or was closed."""
        self._settled.setdefault(record.lease_id, []).append(callback)

    def when_closed(self, record: LeaseRecord, callback: Callable[[], None]) -> None:
        """Call back once, when the lease was closed."""
        self._closed.setdefault(record.lease_id, []).append(callback)

    def forget(self, record: LeaseRecord, callback: Callable[[], None]) -> None:
        """Undo `when_settled` or `when_closed`, if it has not called back yet."""
        for callbacks in (self._settled.get(record.lease_id, []), self._closed.get(record.lease_id, [])):
            if callback in callbacks:
                callbacks.remove(callback)

    def settled(self, lease_id: int) -> None:
        """A lease has become ready, or was closed."""
        self._tell(self._settled, lease_id)

    def closed(self, lease_id: int) -> None:
        """A lease was closed."""
        self._tell(self._settled, lease_id)
        self._tell(self._closed, lease_id)

    def _tell(self, callbacks: dict[int, list[Callable[[], None]]], lease_id: int) -> None:
        for callback in callbacks.pop(lease_id, ()):
            if not self._loop.is_closed():
                callback()
