"""How a runtime ends: no intake, leases back, a drain under a deadline, then the backend.

What a stuck copy may still touch is never freed: the backend leaks it on purpose, and the report says so.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from functools import partial
from typing import Final, final

import anyio
import anyio.to_thread

from aiokv.backends.base import Backend
from aiokv.core.counters import Closing, HintClosing
from aiokv.core.lease_table import LeaseState
from aiokv.model.plan import Outcome
from aiokv.runtime.offload import Offloader

__all__ = ["Shutdown"]

_log = logging.getLogger(__name__)

_SYNC_GRACE_S: Final = 5.0


@final
class Shutdown:
    """The end of one runtime, at most once, however many ask for it."""

    __slots__ = ("_is_closed", "_offloader", "_task")

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    async def close(self, *, grace_s: float) -> None:
        """Start the drain, or find it running, and wait for its end. Cancelling the caller does not stop it."""
        self._offloader.enter()
        if self._is_closed:
            return
        loop = self._offloader.loop
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._drain(grace_s), name="aiokv drain")
        ended = loop.create_future()
        self._task.add_done_callback(partial(_tell, ended))
        await ended

    def close_now(self) -> None:
        """Finish without the loop: what still runs gets a short grace, then is reported and leaked."""
        self._offloader.enter_to_close()
        self._finish_now()

    async def _drain(self, grace_s: float) -> None:
        offloader = self._offloader
        deadline = time.monotonic() + grace_s
        try:
            self._take_back()
            with anyio.move_on_after(grace_s):
                await offloader.when_drained()
            offloader.transfers.stop()
            left = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
            is_clean = await anyio.to_thread.run_sync(partial(_close, offloader.backend, deadline_s=left))
            self._end(is_clean=is_clean)
        finally:
            self._finish_now()

    def _take_back(self) -> None:
        """Let nobody in any more, and give back what is still held: its holders find their leases released."""
        offloader = self._offloader
        offloader.stop_intake()
        held = offloader.core.live_leases
        for record in offloader.core.leases():
            if record.state is not LeaseState.RELEASED:
                offloader.close_lease(record, how=Closing.SHUTDOWN)
        for hint in offloader.core.hints.live():
            offloader.core.hints.release(hint, how=HintClosing.SHUTDOWN)
        if held:
            _log.warning("closed while %d leases were held; their blocks were taken back", held)

    def _finish_now(self) -> None:
        if not self._is_closed:
            offloader = self._offloader
            self._take_back()
            offloader.transfers.stop()
            self._end(is_clean=_close(offloader.backend, deadline_s=_SYNC_GRACE_S))

    def _end(self, *, is_clean: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        offloader = self._offloader
        offloader.detach()
        core = offloader.core
        stuck = core.transfers()
        missing = {rank for transfer in stuck for rank in core.missing_ranks(transfer)}
        silent = sorted(missing & offloader.outlet.remote_ranks)
        for transfer in stuck:
            core.complete(transfer.transfer_id, Outcome.LOST)
        offloader.progress()
        if offloader.tracing is not None:
            offloader.tracing.close()
        if not is_clean or (stuck and not silent):
            _log.error("closed with %d copies that never ended; their memory is kept on purpose", len(stuck))
        if silent:
            _log.error("closed with %d transfers that ranks %s never reported; they count as lost", len(stuck), silent)


def _close(backend: Backend, *, deadline_s: float) -> bool:
    """Whether all has ended and been freed. A backend that fails at it must not keep the runtime half open."""
    try:
        return backend.close(deadline_s=deadline_s)
    except Exception:
        _log.exception("the backend could not be closed; its memory is kept")
        return False


def _tell(ended: asyncio.Future[None], task: asyncio.Task[None]) -> None:
    if ended.done():
        return
    error = None if task.cancelled() else task.exception()
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)
