"""Registering memory with a device in the background: a thread of its own, a chunk at a time, all of it or nothing.

A registration takes 0.1 s per GiB and more, so it never runs on the loop's thread, and it can be put off while a CUDA
graph is captured. Whatever happens, who waits is told: by a call from this thread.

Rules
- Memory that is registered is kept mapped, whoever lets go of it: it is unregistered first, or kept for ever.
- A failed chunk takes back those before it: the arena is PINNED or it is not. So no copy may use it until that is said.
- The registrar is called by one thread at a time: this one, then the one that closes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Final, Protocol, final

from aiokv.backends.mapping import Bytes, address_of, touch
from aiokv.backends.numa import run_on_node
from aiokv.errors import UsageError
from aiokv.model.pinning import NOT_NEEDED, PinState, PinStatus

__all__ = ["NOTHING_TO_PIN", "NothingToPin", "PinThread", "Registrar"]

_log = logging.getLogger(__name__)

_kept: Final[dict[int, Bytes]] = {}
"""What is registered or may still be copied to, by address: it stays mapped, should nobody hold it any more."""


class Registrar(Protocol):
    """What registers memory with a device. Either call may take seconds; what it raises is not touched further."""

    def register_host(self, address: int, num_bytes: int) -> None:
        """From now on the device may use `[address, address + num_bytes)`."""
        ...

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`. No copy may use the memory any more."""
        ...


class _Order(Enum):
    """What the thread is to do."""

    PIN = "pin"
    TAKE_BACK = "take back"
    """Unregister what is registered, and end."""
    LEAVE = "leave"
    """End: a copy may still use what is registered."""


@final
class NothingToPin:
    """The answer of a backend whose arena no device copies from."""

    __slots__ = ()

    status = NOT_NEEDED

    def when_settled(self, callback: Callable[[], None]) -> None:
        """There is nothing to wait for."""
        callback()

    def forget(self, callback: Callable[[], None]) -> None:
        """It was called back at once."""

    def pause(self, when_quiet: Callable[[], None]) -> None:
        """No call is in progress."""
        when_quiet()

    def resume(self) -> None:
        """Nothing goes on."""


NOTHING_TO_PIN: Final = NothingToPin()


@final
class PinThread:
    """Touches and registers `chunks`, adjacent views of one memory, in their order. Begins at once."""

    __slots__ = (
        "_changed",
        "_chunks",
        "_is_busy",
        "_node",
        "_order",
        "_pauses",
        "_pid",
        "_registered",
        "_registrar",
        "_root",
        "_settled",
        "_status",
        "_stuck",
        "_thread",
        "_when_quiet",
    )

    def __init__(
        self, chunks: Sequence[Bytes], *, registrar: Registrar, node: int | None = None, root: Path = Path("/")
    ) -> None:
        self._chunks = tuple(chunks)
        self._registrar = registrar
        self._node = node
        self._root = root
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._order = _Order.PIN
        self._pauses = 0
        self._is_busy = False
        self._registered: list[Bytes] = []
        self._stuck = 0
        self._settled: list[Callable[[], None]] = []
        self._when_quiet: list[Callable[[], None]] = []
        self._status = PinStatus(state=PinState.PINNING, total_bytes=sum(len(chunk) for chunk in chunks))
        # A daemon: a registration that hangs cannot keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name="aiokv-pin", daemon=True)
        self._thread.start()

    @property
    def status(self) -> PinStatus:
        """See `Pinning`."""
        return self._status

    def when_settled(self, callback: Callable[[], None]) -> None:
        """See `Pinning`."""
        with self._changed:
            if not self._status.is_settled:
                self._settled.append(callback)
                return
        callback()

    def forget(self, callback: Callable[[], None]) -> None:
        """See `Pinning`."""
        with self._changed:
            if callback in self._settled:
                self._settled.remove(callback)

    def pause(self, when_quiet: Callable[[], None]) -> None:
        """See `Pinning`."""
        with self._changed:
            self._pauses += 1
            if self._is_busy:
                self._when_quiet.append(when_quiet)
                return
        when_quiet()

    def resume(self) -> None:
        """See `Pinning`."""
        with self._changed:
            self._pauses = max(self._pauses - 1, 0)
            self._changed.notify_all()

    def close(self, *, deadline_s: float) -> bool:
        """Stop where it is and unregister everything, last chunk first. Only once no copy uses the memory.

        False: the device did not let go of it in time, or not at all, and it is kept mapped; a call that was late is
        undone by this thread when it ends. Idempotent.
        """
        if os.getpid() != self._pid:
            raise UsageError(f"this arena belongs to process {self._pid}; a forked child cannot close it")
        self._tell(_Order.TAKE_BACK)
        self._thread.join(max(0.0, min(deadline_s, threading.TIMEOUT_MAX)))
        is_late = self._thread.is_alive()
        if is_late:
            _log.error("the device is still registering the CPU arena; its memory is kept until that has ended")
        elif self._order is _Order.TAKE_BACK:
            self._take_back()
        self._settle(PinStatus(state=PinState.CLOSED, total_bytes=self._status.total_bytes))
        return not is_late and not self._stuck and self._order is _Order.TAKE_BACK

    def leave(self) -> None:
        """A copy may use the memory for ever: register no more, unregister nothing, keep all of it mapped."""
        _kept.update((address_of(chunk), chunk) for chunk in self._chunks)
        self._tell(_Order.LEAVE)

    # What runs in the thread.

    def _run(self) -> None:
        began = time.monotonic()
        try:
            run_on_node(self._node, root=self._root)
            reason = self._pin()
        except BaseException as error:  # whatever it is, those who wait must hear of it
            reason = f"{type(error).__name__}: {error}"
        try:
            if reason:
                self._fail(reason)
            elif self._order is _Order.PIN:
                self._succeed(seconds=time.monotonic() - began)
        finally:
            if self._order is _Order.TAKE_BACK:
                self._take_back()

    def _pin(self) -> str:
        """Why it cannot be pinned; empty if it is, or if the thread is to end.

        Memory that stays unpinned is touched to its end as well: whoever copied there first would have to wait for it.
        """
        reason = ""
        for number, chunk in enumerate(self._chunks, start=1):
            if not self._touch(chunk):
                break
            if not reason and (failure := self._register(chunk)):
                reason = f"chunk {number} of {len(self._chunks)}, {len(chunk)} bytes: {failure}"
        return reason

    def _touch(self, chunk: Bytes) -> bool:
        """Whether all of it was touched; not so once the thread is to end."""
        steps = touch(chunk)
        while self._begin_step():
            try:
                if next(steps, StopIteration) is StopIteration:
                    return True
            finally:
                self._end_step()
        return False

    def _register(self, chunk: Bytes) -> str:
        """Why it could not be registered; empty if it is, or if the thread is to end."""
        if not self._begin_step():
            return ""
        try:
            self._registrar.register_host(address_of(chunk), len(chunk))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        else:
            _kept[address_of(chunk)] = chunk
            self._registered.append(chunk)
            self._note(registered_bytes=self._status.registered_bytes + len(chunk))
            return ""
        finally:
            self._end_step()

    def _roll_back(self) -> None:
        """Not within a pause either; if the thread is to end, that is done as it was told."""
        if not self._begin_step():
            return
        try:
            self._take_back()
        finally:
            self._end_step()

    def _begin_step(self) -> bool:
        """Wait while it is paused; whether to go on. Then something is in progress until `_end_step`."""
        with self._changed:
            self._changed.wait_for(lambda: self._order is not _Order.PIN or not self._pauses)
            self._is_busy = self._order is _Order.PIN
            return self._is_busy

    def _end_step(self) -> None:
        with self._changed:
            self._is_busy = False
            waiting, self._when_quiet = self._when_quiet, []
        _call(waiting)

    def _note(self, *, registered_bytes: int) -> None:
        with self._changed:
            if self._order is _Order.PIN:
                self._status = replace(self._status, registered_bytes=registered_bytes)

    def _succeed(self, *, seconds: float) -> None:
        total = self._status.total_bytes
        _log.info("the CPU arena is pinned: %d bytes in %d chunks, %.3g s", total, len(self._chunks), seconds)
        self._settle(replace(self._status, state=PinState.PINNED))

    def _fail(self, reason: str) -> None:
        self._roll_back()
        if self._order is _Order.PIN:
            _log.warning("the CPU arena stays unpinned, so that its copies are slower: %s", reason)
            self._settle(PinStatus(state=PinState.UNPINNED, total_bytes=self._status.total_bytes, reason=reason))

    # In this thread, or in the one that closes when this has ended.

    def _take_back(self) -> None:
        """Unregister in reverse. What the device does not let go of stays mapped."""
        while self._registered:
            chunk = self._registered.pop()
            try:
                self._registrar.unregister_host(address_of(chunk))
            except Exception:
                _log.exception("%d bytes of the CPU arena could not be unregistered and are kept", len(chunk))
                self._stuck += 1
            else:
                _kept.pop(address_of(chunk), None)

    def _settle(self, status: PinStatus) -> None:
        with self._changed:
            if self._status.state is not PinState.CLOSED:
                self._status = status
            waiting, self._settled = self._settled, []
        _call(waiting)

    def _tell(self, order: _Order) -> None:
        with self._changed:
            if self._order is not _Order.LEAVE:  # which is for ever
                self._order = order
            self._changed.notify_all()


def _call(callbacks: Sequence[Callable[[], None]]) -> None:
    """A callback that fails must not stop the others, nor this thread."""
    for callback in callbacks:
        try:
            callback()
        except Exception:
            _log.exception("somebody who waited for the CPU arena could not be told")
