"""The backend of machines with a CUDA device: the engine's tensors on it, the CPU tier pinned, batched DMA in between.

Only the driver's own API is used, and of tensors only address and shape. Each direction has a stream of its own, of the
lowest priority. What the engine's streams still do with a block is waited for on the device (law 5): see `fence`.

Rules
- No call but `open` and `close` waits for the device.
- The tensors are held until `close`, and for ever if a copy is stuck: so is the CPU arena then, and both are told.
- A call that the driver refuses is one copy that failed; a context that does not answer any more is a backend that is
  lost, with all that is in flight.
- The engine's writes to the tensors must have ended before `open`, which zeroes the null block.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, final

from aiokv.backends.arena import ByteRows, Layout
from aiokv.backends.base import BackendLayout, Pinning, WakeMode
from aiokv.backends.cuda_completion import CudaEvent
from aiokv.backends.cuda_driver import CudaDriver, CudaError
from aiokv.backends.cuda_events import CudaFence, stream_handle
from aiokv.backends.cuda_session import CudaSession, released_on_error
from aiokv.backends.pinning import NOTHING_TO_PIN
from aiokv.errors import BackendLost, ConfigError, CopyFailed, StreamCaptured, UsageError
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch

__all__ = ["CudaBackend"]

_log = logging.getLogger(__name__)

_leaked: Final[list[object]] = []
"""What a stuck copy may still touch: kept for as long as the process lives."""
_open: Final[set[CudaSession]] = set()
"""What was opened and not closed: the device may be copying, whoever has let go of the backend."""
_LOOK_S: Final = 1e-3
"""How often `open` and `close` look whether the device has done what it was given."""
_FIRST_WORK_S: Final = 30.0
"""How long zeroing the null block may take."""
_GIVE_BACK_S: Final = 5.0
"""How long giving everything back may take after that has failed."""


@final
class CudaBackend:
    """Copies between one CUDA device and pinned memory."""

    __slots__ = ("_closed_cleanly", "_pid", "_pinning", "_session", "_submitted")

    name = "cuda"
    wake_mode = WakeMode.POLL
    needs_fences = True

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._session: CudaSession | None = None
        self._closed_cleanly: bool | None = None
        self._pinning: Pinning = NOTHING_TO_PIN
        self._submitted = 0

    @property
    def pinning(self) -> Pinning:
        """See `Backend`: copies that are submitted before it is settled wait for it."""
        return self._pinning

    def open(self, layout: BackendLayout) -> None:
        """Find the device, begin to pin the CPU arena, zero the null block. `ConfigError` says what is missing."""
        self._require_own_process()
        if self._session is not None or self._closed_cleanly is not None:
            raise UsageError("a CUDA backend is opened once")
        checked = Layout.of(layout)
        with _translated_at_open():
            session = CudaSession(checked, driver=_load_driver(checked))
        _open.add(session)
        try:
            with _translated_at_open():
                session.zero_null_block()
                _await_quiet(session, deadline_s=_FIRST_WORK_S)
        except BaseException:
            self._end(session, deadline_s=_GIVE_BACK_S)
            raise
        self._pinning = session.arena.pinning
        self._session = session

    def attach_doorbell(self, ring: Callable[[], None]) -> None:
        """Nothing to attach: the bridge polls."""

    def submit(self, batch: CopyBatch) -> CudaEvent:
        """Hand a batch over on the stream of its direction, behind the fences in `after`; a long one in the background.

        `UsageError` for slots that do not exist and for foreign fences.
        """
        session = self._require_open()
        if session.health.lost:
            raise BackendLost(self.name, detail=session.health.lost)
        session.layout.require_places(batch)
        fences = _fences_of(batch.after, session=session)
        self._submitted += 1
        try:
            return session.submit(batch, fences=fences)
        except CudaError as error:
            if session.health.lost:
                raise BackendLost(self.name, detail=session.health.lost) from error
            raise CopyFailed(self._submitted - 1, detail=str(error)) from error

    def block_bytes(self, group: str) -> int:
        """Bytes of one block of `group`, over all its tensors."""
        return self._require_open().layout.block_bytes(group)

    def eta_seconds(self, direction: Direction, num_bytes: int) -> float:
        """From the bandwidth of recent copies in that direction, by the device's clock; 0.0 before the first."""
        bandwidth = self._require_open().streams[direction].bandwidth
        return num_bytes / bandwidth if bandwidth else 0.0

    # The engine's streams.

    def fence(self, stream: object) -> CudaFence:
        """A point of `stream`: a handle, a torch stream, or an object with `__cuda_stream__`.

        `UsageError` for anything else, `StreamCaptured` for one that is being captured into a graph.
        """
        session = self._require_open()
        handle = stream_handle(stream)
        with self._translated(session), session.driver.current():
            _require_not_capturing(session, handle)
            return session.new_fence(handle)

    def fence_done(self, fence: object) -> bool:
        """Whether its stream has passed a fence; not so, ever, once the context is lost."""
        session = self._require_open()
        known = _require_fence(fence, session=session)
        if session.health.lost:
            return False
        try:
            with session.driver.current():
                return session.driver.query_event(known.event)
        except CudaError as error:
            session.health.lose(str(error))
            return False

    def wait(self, stream: object, fence_or_event: object) -> None:
        """Let `stream` go on only behind a fence, or behind the copies of what `submit` has answered.

        A batch that is still being handed over holds the caller until that is done. `UsageError` as for `fence`, and
        for a batch that cannot be handed over now: the CPU arena is still being pinned, or the queue is full.
        """
        session = self._require_open()
        handle = stream_handle(stream)
        with self._translated(session), session.driver.current():
            _require_not_capturing(session, handle)
            if not isinstance(fence_or_event, CudaEvent):
                session.driver.wait_event(handle, _require_fence(fence_or_event, session=session).event)
            elif not fence_or_event.stream.hold_back(handle, behind=fence_or_event.job):
                raise UsageError("these copies have not begun yet: wait for their end on the host")

    # The end.

    def close(self, *, deadline_s: float) -> bool:
        """Finish what was submitted, then free. False: a copy did not end in time; both arenas are kept for ever."""
        self._require_own_process()
        if self._closed_cleanly is None:
            session, self._session = self._session, None
            self._closed_cleanly = session is None or self._end(session, deadline_s=deadline_s)
        return self._closed_cleanly

    def cpu_slot(self, slot: int) -> ByteRows:
        """The bytes of one CPU slot, shape `[cpu_block_bytes]`, as they are now; writing to it writes the slot."""
        session = self._require_open()
        if not 0 <= slot < session.layout.cpu_blocks:
            raise UsageError(f"the CPU pool has no slot {slot}, only {session.layout.cpu_blocks}")
        row: ByteRows = session.arena.rows[slot]
        return row

    def stream_of(self, direction: Direction) -> int:
        """The handle of the stream that copies in this direction, for tools that watch or steer streams."""
        return self._require_open().streams[direction].handle

    # Helpers.

    def _end(self, session: CudaSession, *, deadline_s: float) -> bool:
        """Whether all has ended and been freed; else it is leaked, and that is told."""
        give_up = time.monotonic() + deadline_s
        session.stop()
        try:
            is_quiet = _await_quiet(session, deadline_s=deadline_s)
            is_free = is_quiet and session.free(deadline_s=give_up - time.monotonic())
        except CudaError as error:
            session.health.lose(str(error))
            is_free = False
        if not is_free:
            session.abandon("it was closed while a copy was stuck")
            _leaked.append(session)
            _log.error(
                "CUDA copies did not end within %.3g s (%s): "
                "%d bytes of CPU arena and the tensors behind it are leaked on purpose",
                deadline_s,
                session.health.lost,
                session.arena.num_bytes,
            )
        _open.discard(session)
        return is_free

    def _require_open(self) -> CudaSession:
        self._require_own_process()
        if self._session is None:
            raise UsageError("the CUDA backend is not open")
        return self._session

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(f"the CUDA backend belongs to process {self._pid}; a forked child cannot use it")

    @contextmanager
    def _translated(self, session: CudaSession) -> Iterator[None]:
        """What the driver refuses is the caller's fault, unless the context answers nothing any more."""
        try:
            yield
        except CudaError as error:
            if session.is_dead():
                raise BackendLost(self.name, detail=session.health.lost) from error
            raise UsageError(f"the driver refuses this stream: {error}") from error


def _load_driver(layout: Layout) -> CudaDriver:
    """The driver, on the device of the tensors. What it lacks is said first."""
    kind, _, ordinal = layout.device.partition(":")
    driver = CudaDriver.load(ordinal=int(ordinal or 0))
    if not layout.fragments:
        raise ConfigError("the CUDA backend needs arenas: the KV tensors of every group")
    if kind != "cuda":
        raise ConfigError(f"the CUDA backend copies device memory, but the tensors are on {layout.device}")
    if ordinal:
        return driver
    with released_on_error(driver):
        found = driver.device_of(next(iter(layout.fragments.values()))[0].address)
    if found == driver.ordinal:
        return driver
    driver.release()
    return CudaDriver.load(ordinal=found)


@contextmanager
def _translated_at_open() -> Iterator[None]:
    try:
        yield
    except CudaError as error:
        raise ConfigError(f"CUDA cannot be used: {error}") from error


def _await_quiet(session: CudaSession, *, deadline_s: float) -> bool:
    """Look until all that was submitted has ended, or the deadline has come, or the context is lost."""
    give_up = time.monotonic() + deadline_s
    pause = threading.Event()
    while not session.is_quiet():
        if session.health.lost or time.monotonic() >= give_up:
            return False
        pause.wait(_LOOK_S)
    return not session.health.lost


def _require_not_capturing(session: CudaSession, stream: int) -> None:
    if session.driver.is_capturing(stream):
        raise StreamCaptured(stream)


def _fences_of(after: object, *, session: CudaSession) -> tuple[CudaFence, ...]:
    """One fence or several, each once."""
    named = after if isinstance(after, (tuple, list)) else (after,)
    return tuple(dict.fromkeys(_require_fence(fence, session=session) for fence in named if fence is not None))


def _require_fence(fence: object, *, session: CudaSession) -> CudaFence:
    if not isinstance(fence, CudaFence) or not session.has_made(fence):
        raise UsageError(f"{fence!r} is no fence of this backend")
    return fence
