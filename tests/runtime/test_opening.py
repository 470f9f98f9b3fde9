"""Opening a backend takes a thread and a while; whoever is cancelled meanwhile leaves none open behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, final

import pytest

from aiokv import KVRuntime, UsageError
from aiokv.backends.base import BackendLayout
from aiokv.testing import FakeBackend
from tests.runtime.support import config_of, prompt, turns, until


@final
class SlowToOpen:
    """A fake backend whose `open` stands still, in its worker thread, until it is let go."""

    def __init__(self) -> None:
        self.fake = FakeBackend()
        self.reached = threading.Event()
        self.let_go = threading.Event()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever else a backend does
        return getattr(self.fake, name)

    def open(self, layout: BackendLayout) -> None:
        self.reached.set()
        self.let_go.wait(10.0)
        self.fake.open(layout)


@pytest.mark.parametrize("turns_before", range(3))
async def test_a_backend_that_opens_after_its_caller_was_cancelled_is_closed_by_its_thread(turns_before: int) -> None:
    """Its arena and its thread would stay for as long as the process lives."""
    backend = SlowToOpen()
    kv = KVRuntime(config_of(backend=backend))
    opening = asyncio.create_task(kv.open())
    await until(backend.reached.is_set)
    opening.cancel()
    await turns(turns_before)
    backend.let_go.set()
    await asyncio.wait([opening])
    assert opening.cancelled()
    await until(lambda: backend.fake.closed)
    await kv.aclose()
    with pytest.raises(UsageError):
        kv.try_acquire("late", prompt(1))
