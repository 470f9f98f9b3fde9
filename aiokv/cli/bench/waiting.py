"""Waiting for copies: whoever sleeps between two looks takes nothing from the thread that makes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from aiokv.backends.base import DeviceEvent, EventStatus

__all__ = ["wait_for_copy", "wait_until"]

_PATIENCE_S: Final = 60.0
_LOOK_S: Final = 100e-6


def wait_until(condition: Callable[[], bool], *, look_s: float = _LOOK_S) -> None:
    """Ask every `look_s` seconds, for a minute at most."""
    give_up, pause = time.monotonic() + _PATIENCE_S, threading.Event()
    while not condition() and time.monotonic() < give_up:
        pause.wait(look_s)


def wait_for_copy(event: DeviceEvent, *, look_s: float) -> None:
    """Until it has been made; `RuntimeError` if it failed, or takes longer than a minute."""
    wait_until(lambda: event.query() is not EventStatus.PENDING, look_s=look_s)
    status = event.query()
    if status is not EventStatus.DONE:
        raise RuntimeError(f"a copy has not been made: {status.value} {event.detail()}")
