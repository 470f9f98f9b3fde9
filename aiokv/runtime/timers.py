"""Short timers for the bridge: a timerfd where the system has one, else the loop's own timers.

An asyncio loop rounds delays below a millisecond up to one, uvloop rounds them down to a busy loop; a timerfd read by
the loop has neither fault. The descriptor is closed only after its reader is gone.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from typing import Final, Protocol, final

__all__ = ["LoopTimer", "Timer", "TimerFd", "make_timer"]

_CLOCK_MONOTONIC: Final = 1
_TFD_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC
_SHORTEST_LOOP_DELAY: Final = 0.001
_NANOSECONDS: Final = 1_000_000_000


class Timer(Protocol):
    """One alarm at a time; setting it again replaces it."""

    def set(self, delay_s: float) -> None:
        """Call back once, `delay_s` seconds from now."""
        ...

    def cancel(self) -> None:
        """No call back until it is set again."""
        ...

    def close(self) -> None:
        """Release what the system holds for it. Works on a closed loop."""
        ...


def make_timer(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> Timer:
    """The best timer this system offers."""
    try:
        return TimerFd(loop, callback)
    except OSError:
        return LoopTimer(loop, callback)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


@final
class TimerFd:
    """A timer with nanosecond resolution. `OSError` where there is none."""

    __slots__ = ("_callback", "_fd", "_loop", "_settime", "_spec")

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "timerfd_create"):
            raise OSError("this C library has no timerfd")
        self._fd: int = libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._settime = libc.timerfd_settime
        self._spec = _TimerSpec()
        self._callback = callback
        self._loop = loop
        loop.add_reader(self._fd, self._on_ready)

    def set(self, delay_s: float) -> None:
        """See `Timer`. At least one nanosecond: zero would disarm."""
        self._arm(max(int(delay_s * _NANOSECONDS), 1))

    def cancel(self) -> None:
        """See `Timer`."""
        self._arm(0)

    def close(self) -> None:
        """See `Timer`."""
        if self._fd >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _arm(self, nanoseconds: int) -> None:
        value = self._spec.value
        value.seconds, value.nanoseconds = divmod(nanoseconds, _NANOSECONDS)
        if self._settime(self._fd, 0, ctypes.byref(self._spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def _on_ready(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # set again after it fired: the new alarm will come
        self._callback()


@final
class LoopTimer:
    """The loop's own timer, never shorter than a millisecond."""

    __slots__ = ("_callback", "_handle", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def set(self, delay_s: float) -> None:
        """See `Timer`."""
        self.cancel()
        self._handle = self._loop.call_later(max(delay_s, _SHORTEST_LOOP_DELAY), self._callback)

    def cancel(self) -> None:
        """See `Timer`."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def close(self) -> None:
        """See `Timer`."""
        self.cancel()
