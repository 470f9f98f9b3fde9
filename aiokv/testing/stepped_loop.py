"""An event loop that turns when told, and lets somebody look at the world after every single callback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack, final

__all__ = ["SteppedLoop"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@final
class SteppedLoop(asyncio.SelectorEventLoop):
    """No turn is taken unasked, so that a test decides what happens in between. What callbacks raise, `turn` raises."""

    def __init__(self) -> None:
        super().__init__()
        self._look: Callable[[], None] | None = None
        self._fault: BaseException | None = None
        self.set_exception_handler(_keep_fault)

    def watch(self, look: Callable[[], None] | None) -> None:
        """From now on call `look` after every callback; None for nobody."""
        self._look = look

    def turn(self) -> None:
        """Run what is ready now, once."""
        self.call_soon(self.stop)
        self.run_forever()
        self._raise_fault()

    def finish(self, work: Awaitable[T]) -> T:
        """Turn until this is done."""
        result = self.run_until_complete(work)
        self._raise_fault()
        return result

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """See `asyncio.AbstractEventLoop`."""
        return super().call_soon(self._run, callback, *args, context=context)

    def keep(self, fault: BaseException) -> None:
        """Raise this at the end of the turn, unless there is something to raise already."""
        self._fault = self._fault or fault

    def _run(self, callback: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
        callback(*args)
        if self._look is not None:
            self._look()

    def _raise_fault(self) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault


def _keep_fault(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if isinstance(loop, SteppedLoop):
        loop.keep(context.get("exception") or RuntimeError(str(context.get("message"))))
