"""Who may call a runtime: the process and thread that opened it, in its own loop or beside every loop."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import final

from aiokv.errors import UsageError

__all__ = ["Owner"]


@final
class Owner:
    """The process, thread and loop that a runtime belongs to."""

    __slots__ = ("_loop", "_process", "_thread")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._process = os.getpid()
        self._thread = threading.get_ident()

    @property
    def is_in_loop(self) -> bool:
        """Whether the caller runs in this loop."""
        return _running_loop() is self._loop

    def check(self) -> None:
        """`UsageError` for anyone else. Asked by every public call: within the loop only the thread is compared, as no
        loop runs in a process that has just been forked.
        """
        try:
            is_inside = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_inside = False
        if not is_inside or threading.get_ident() != self._thread:
            self._check_from_outside()

    def take_over_to_close(self) -> None:
        """Any thread of the process may close it, once the loop does not run there any more."""
        if self._process != os.getpid():
            raise UsageError("an aiokv runtime belongs to the process that opened it")
        if self._loop.is_running() and not self.is_in_loop:
            raise UsageError("the loop of this aiokv runtime is running: await aclose() in it")
        self._thread = threading.get_ident()

    def _check_from_outside(self) -> None:
        if (self._process, self._thread) != (os.getpid(), threading.get_ident()):
            raise UsageError("an aiokv runtime belongs to the process and thread that opened it")
        if _running_loop() not in (None, self._loop):
            raise UsageError("an aiokv runtime belongs to the event loop that opened it")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
