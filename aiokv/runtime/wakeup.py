"""`Wakeup`: where one task waits until there is something to read, as streams need it.

Whoever wakes holds this object and nothing of the reader, so that an abandoned reader can be collected.
"""

from __future__ import annotations

import asyncio
from typing import final

from aiokv.errors import UsageError

__all__ = ["Wakeup"]


@final
class Wakeup:
    """Lets one task at a time wait for the next `wake`; `rule` says in words why it is one only."""

    __slots__ = ("_rule", "_waiter")

    def __init__(self, rule: str) -> None:
        self._rule = rule
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Until somebody calls `wake`. `UsageError` if another task waits already: only one of them could be told."""
        if self._waiter is not None and not self._waiter.done():
            raise UsageError(f"{self._rule}: another task is waiting for the next one")
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            if self._waiter is waiter:  # else somebody waits in the place of this task, which was cancelled
                self._waiter = None

    def wake(self) -> None:
        """Let the task look again, if one waits. Works on a closed loop."""
        waiter = self._waiter
        if waiter is not None and not waiter.done() and not waiter.get_loop().is_closed():
            waiter.set_result(None)
