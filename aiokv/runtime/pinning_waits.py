"""Waiting, on the loop, for the thread that pins the CPU arena: for its end, and for it to stand still."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import final

from aiokv.backends.base import Pinning
from aiokv.model.pinning import PinState
from aiokv.runtime.offload import Offloader

__all__ = ["quiesced", "store_once_pinned", "when_pinning_settled"]


@final
class _Bell:
    """Rung once, from any thread; one coroutine waits. A loop that has ended need not be told."""

    __slots__ = ("_future", "_is_rung", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()
        self._is_rung = False

    def ring(self) -> None:
        self._is_rung = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake)

    async def wait(self) -> bool:
        """Whether it had to be waited for."""
        if self._is_rung:
            return False
        await self._future
        return True

    def _wake(self) -> None:
        if not self._future.done():
            self._future.set_result(None)


async def when_pinning_settled(pinning: Pinning) -> bool:
    """Wait until the arena is pinned, known to stay unpinned, or closed; whether there was anything to wait for."""
    bell = _Bell()
    ring = bell.ring  # one object, so that it can be forgotten
    pinning.when_settled(ring)
    try:
        return await bell.wait()
    finally:
        pinning.forget(ring)


def store_once_pinned(offloader: Offloader) -> None:
    """Let nothing be stored before the arena may be used. From then on what is confirmed or hit is stored."""
    pinning = offloader.backend.pinning
    if pinning.status.is_settled:
        return
    offloader.core.store_gate.shut()
    loop = offloader.loop

    def open_gate() -> None:
        if pinning.status.state is not PinState.CLOSED:
            offloader.core.store_gate.open()

    def settled() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(open_gate)

    pinning.when_settled(settled)


@asynccontextmanager
async def quiesced(offloader: Offloader) -> AsyncIterator[None]:
    """Nobody lets in, polls, submits or pins inside; waits for the registration that is in progress."""
    offloader.quiet()
    try:
        bell = _Bell()
        offloader.backend.pinning.pause(bell.ring)
        try:
            await bell.wait()
            yield
        finally:
            offloader.backend.pinning.resume()
    finally:
        offloader.wake()
