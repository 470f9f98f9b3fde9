"""Opening a backend in a worker thread, for a caller that may be cancelled meanwhile, and what then drives it.

The thread cannot be stopped. So whoever comes second, the thread with an open backend or the cancelled caller, closes
it: nobody would ever use that backend, and its arena and threads would stay.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Final, final

import anyio.to_thread

from aiokv.backends.arena import Layout
from aiokv.backends.base import Backend
from aiokv.core.cache import CacheState
from aiokv.observe.stats import Stats
from aiokv.runtime.config import RuntimeConfig
from aiokv.runtime.fencing import Fencing
from aiokv.runtime.offload import Offloader
from aiokv.runtime.rank_outlet import RankOutlet
from aiokv.runtime.tracer_guard import TracerGuard
from aiokv.runtime.tracing import Tracing

__all__ = ["Opening", "make_offloader"]

_CLOSE_GRACE_S: Final = 5.0


def make_offloader(
    config: RuntimeConfig, *, core: CacheState, backend: Backend, fencing: Fencing, tracer: TracerGuard | None
) -> Offloader:
    """What drives an open backend from the running loop."""
    return Offloader(
        core,
        backend=backend,
        loop=asyncio.get_running_loop(),
        outlet=RankOutlet(world_size=config.world_size, remote_ranks=config.remote_ranks),
        stats=Stats(),
        fencing=fencing,
        tracing=None if tracer is None else Tracing(tracer),
        lease_age_limit_s=config.lease_age_limit_s,
    )


@final
class Opening:
    """One attempt to open one backend."""

    __slots__ = ("_backend", "_layout", "_lock", "_was_decided")

    def __init__(self, backend: Backend, layout: Layout) -> None:
        self._backend = backend
        self._layout = layout
        self._lock = threading.Lock()
        self._was_decided = False

    async def run(self) -> None:
        """Open, or raise what `Backend.open` raises."""
        try:
            await anyio.to_thread.run_sync(self._open)
        except BaseException:
            if self._comes_second():
                threading.Thread(target=self._close, name="aiokv-close", daemon=True).start()
            raise

    def _open(self) -> None:
        self._backend.open(self._layout)
        if self._comes_second():
            self._close()

    def _comes_second(self) -> bool:
        with self._lock:
            was_decided, self._was_decided = self._was_decided, True
            return was_decided

    def _close(self) -> None:
        self._backend.close(deadline_s=_CLOSE_GRACE_S)
