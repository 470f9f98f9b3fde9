"""How the workers of either side are started: each in its own interpreter, both on the same core."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

from aiokv.cli.bench.compare.process import Worker, started
from aiokv.cli.bench.compare.settings import CompareSettings

__all__ = ["our_worker", "peer_memory_worker", "peer_worker"]

_OUR_WORKER: Final = "aiokv.cli.bench.compare.worker"


def our_worker(settings: CompareSettings, *, core: int | None) -> AbstractAsyncContextManager[Worker]:
    """Answers everything."""
    return started(
        [sys.executable, "-m", _OUR_WORKER, *_core_argument(core)],
        side="aiokv",
        environment=os.environ,
        timeout_s=settings.timeout_s,
    )


def peer_worker(settings: CompareSettings, *, core: int | None) -> AbstractAsyncContextManager[Worker]:
    """Times operations."""
    return _peer(settings, script=settings.peer_script, core=core)


def peer_memory_worker(settings: CompareSettings, *, core: int | None) -> AbstractAsyncContextManager[Worker]:
    """Tells what a slot costs."""
    return _peer(settings, script=settings.peer_memory_script, core=core)


def _peer(settings: CompareSettings, *, script: Path, core: int | None) -> AbstractAsyncContextManager[Worker]:
    return started(
        [str(settings.peer_python), str(script), *_core_argument(core)],
        side="the peer",
        environment=settings.peer_environment,
        timeout_s=settings.timeout_s,
    )


def _core_argument(core: int | None) -> list[str]:
    return [] if core is None else [str(core)]
