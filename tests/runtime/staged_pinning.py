"""A CPU arena that is pinned when a test says so: no thread, no device."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from aiokv.backends.base import Backend
from aiokv.model.pinning import PinState, PinStatus
from aiokv.testing.passing_backend import PassingBackend

TOTAL = 4096


@final
class StagedPinning:
    """PINNING, in the midst of a call into the driver, until told otherwise."""

    def __init__(self) -> None:
        self.status = PinStatus(state=PinState.PINNING, total_bytes=TOTAL)
        self.is_calling = True
        self.pauses = 0
        self.waiting: list[Callable[[], None]] = []
        self._when_quiet: list[Callable[[], None]] = []

    def when_settled(self, callback: Callable[[], None]) -> None:
        if self.status.is_settled:
            callback()
        else:
            self.waiting.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        if callback in self.waiting:
            self.waiting.remove(callback)

    def pause(self, when_quiet: Callable[[], None]) -> None:
        self.pauses += 1
        if self.is_calling:
            self._when_quiet.append(when_quiet)
        else:
            when_quiet()

    def resume(self) -> None:
        self.pauses -= 1

    def end_call(self) -> None:
        """The registration in progress has ended."""
        self.is_calling = False
        quiet, self._when_quiet = self._when_quiet, []
        for ring in quiet:
            ring()

    def settle(self, status: PinStatus) -> None:
        """From now on it is that."""
        self.status = status
        waiting, self.waiting = self.waiting, []
        for ring in waiting:
            ring()

    def pin(self) -> None:
        """All of it is registered."""
        self.end_call()
        self.settle(PinStatus(state=PinState.PINNED, registered_bytes=TOTAL, total_bytes=TOTAL))

    def give_up(self) -> None:
        """It stays unpinned."""
        self.end_call()
        self.settle(PinStatus(state=PinState.UNPINNED, total_bytes=TOTAL, reason="chunk 1 of 1: out of memory"))


@final
class PinningBackend(PassingBackend):
    """Another backend, whose CPU arena is pinned as `pinning` says; closed, it is not used any more."""

    __slots__ = ("_staged",)

    def __init__(self, inner: Backend, pinning: StagedPinning) -> None:
        super().__init__(inner)
        self._staged = pinning

    @property
    def pinning(self) -> StagedPinning:
        return self._staged

    def close(self, *, deadline_s: float) -> bool:
        self._staged.settle(PinStatus(state=PinState.CLOSED, total_bytes=TOTAL))
        return super().close(deadline_s=deadline_s)
