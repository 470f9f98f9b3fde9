"""Waiting with a deadline, on a future of the waiter's own.

The deadline fails that one future with `AcquireTimeout`. No task is cancelled for it, so it composes with
`asyncio.timeout`, anyio scopes and task groups, and a cancellation stays what it is.
"""

from __future__ import annotations

import asyncio
import math
import sys
from typing import TypeVar, final

from aiokv.errors import AcquireTimeout, UsageError
from aiokv.model.numbers import is_number

__all__ = ["Deadline"]

T = TypeVar("T")


@final
class Deadline:
    """`timeout` seconds from now, in one loop; `None` means never. Several waits may share one deadline."""

    __slots__ = ("_at", "_loop", "_request_id", "_timeout")

    def __init__(self, loop: asyncio.AbstractEventLoop, *, request_id: str, timeout: float | None) -> None:
        if timeout is not None and not (is_number(timeout) and timeout >= 0):
            raise UsageError(f"timeout must be a number of seconds, zero or more, not {timeout!r}")
        self._loop = loop
        self._request_id = request_id
        self._timeout = math.inf if timeout is None or timeout > sys.float_info.max else float(timeout)
        self._at = loop.time() + self._timeout

    async def wait(self, future: asyncio.Future[T]) -> T:
        """The future's result, or `AcquireTimeout` at the deadline."""
        if self._timeout == math.inf:
            return await future
        timer = self._loop.call_at(self._at, self._expire, future)
        try:
            return await future
        finally:
            timer.cancel()

    def _expire(self, future: asyncio.Future[T]) -> None:
        if not future.done():
            future.set_exception(AcquireTimeout(self._request_id, timeout=self._timeout))
