"""How what nobody released comes back: the finaliser of a lease or hint leaves word here, the loop picks it up.

A finaliser may run in any thread at any moment, even while the core is in the middle of a step. So it only appends to a
deque and writes to an eventfd; everything else happens in a turn of the loop.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections import deque
from collections.abc import Callable
from typing import TypeVar, final

from aiokv.core.hint_table import HintRecord

__all__ = ["LeakBox", "warn_later"]

T = TypeVar("T")


@final
class LeakBox:
    """Ids of leases, and hints, that were garbage collected while they still held something."""

    __slots__ = ("_loop", "_reader", "_writer", "hints", "leases")

    def __init__(self, loop: asyncio.AbstractEventLoop, *, on_leak: Callable[[], None]) -> None:
        self.leases: deque[int] = deque()
        """Ids of leases that are to be given back; `take` them."""
        self.hints: deque[HintRecord] = deque()
        self._loop = loop
        if hasattr(os, "eventfd"):
            self._reader = self._writer = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._reader, False)
            os.set_blocking(self._writer, False)
        loop.add_reader(self._reader, self._on_ready, on_leak)

    def put(self, lease_id: int) -> None:
        """Called by finalisers only: no lock, no log, no call into anything."""
        self.leases.append(lease_id)
        self._ring()

    def put_hint(self, record: HintRecord) -> None:
        """Like `put`, of a residence hint."""
        self.hints.append(record)
        self._ring()

    def take(self) -> list[int]:
        """All ids of leases left so far; each is taken once."""
        return _take_all(self.leases)

    def take_hints(self) -> list[HintRecord]:
        """All hints left so far; each is taken once."""
        return _take_all(self.hints)

    def close(self) -> None:
        """Nothing is looked at any more. Works on a closed loop."""
        if self._reader < 0:
            return
        reader, writer = self._reader, self._writer
        if not self._loop.is_closed():
            self._loop.remove_reader(reader)
        self._reader = self._writer = -1
        os.close(reader)
        if writer != reader:
            os.close(writer)

    def _ring(self) -> None:
        if self._writer >= 0:
            os.write(self._writer, b"\1\0\0\0\0\0\0\0")

    def _on_ready(self, on_leak: Callable[[], None]) -> None:
        try:
            os.read(self._reader, 4096)
        except BlockingIOError:
            return
        on_leak()


def _take_all(left: deque[T]) -> list[T]:
    """One by one: a finaliser may append meanwhile."""
    taken = []
    while left:
        taken.append(left.popleft())
    return taken


def warn_later(loop: asyncio.AbstractEventLoop, name: str) -> None:
    """Warn of a leak in a turn of its own: a warning that is made an error must break nobody else's step."""

    def warn() -> None:
        warnings.warn(f"{name} was garbage collected without release()", ResourceWarning, stacklevel=2)

    if not loop.is_closed():
        loop.call_soon(warn)
