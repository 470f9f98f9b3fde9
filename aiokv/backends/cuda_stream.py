"""`CopyStream`: the batches of one direction, and how they come into the driver's queue.

A batch is cut into pieces (see `StreamQueue`). One that is a single short piece is handed over at once, by who submits
it. A longer one, or one that finds others waiting or the queue nearly full, is handed over by the stream's own thread,
piece by piece, so that the loop is not held and no call waits for room in the queue.

Rules
- Pieces are handed over in the order of `submit`. While the thread has something to hand over nobody else does.
- How many copies are a piece, and how many are handed over at once, is learnt from how long the last calls took.
- `CudaError` from `submit`: nothing of the batch was started. What fails later, the batch's event tells once all that
  was started has ended.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final, final

from aiokv.backends.base import Pinning
from aiokv.backends.cuda_batch import Copier, PartlyCopied
from aiokv.backends.cuda_copies import BatchCopies
from aiokv.backends.cuda_driver import CudaDriver, CudaError
from aiokv.backends.cuda_events import CudaFence, Health
from aiokv.backends.cuda_queue import Piece, StreamQueue
from aiokv.model.pinning import PinState

__all__ = ["CopyJob", "CopyStream"]

_log = logging.getLogger(__name__)

_PIECE_S: Final = 0.4e-3
"""How long a call may take that hands over a piece."""
_AT_ONCE_S: Final = 0.2e-3
_MOST_AT_ONCE: Final = 4096
"""What takes longer, or is more, costs the loop less when the thread hands it over."""
_PAUSE_S: Final = 200e-6
_LONG_PAUSE_S: Final = 2e-3
"""How long the thread lets the device work before it looks for room again, at first and after a while."""
_STOP_PAUSE_S: Final = 0.1
"""How soon it notices that it is to end, while it waits for the CPU arena."""
_QUICK: Final = (PinState.PINNED, PinState.NOT_NEEDED)


@final
class CopyJob:
    """One batch on its way. It is handed over once `last` is set, or `is_refused`."""

    __slots__ = ("copies", "failure", "fences", "handed", "is_refused", "last", "progress")

    def __init__(self, copies: BatchCopies, *, fences: Sequence[CudaFence]) -> None:
        self.copies = copies
        self.fences = fences
        """Points that the device waits for before the first copy."""
        self.last: Piece | None = None
        """Its last piece; `None` until all have been handed over."""
        self.failure = ""
        """What went wrong while they were."""
        self.is_refused = False
        """Whether nothing of it was started, nor will be."""
        self.handed = 0
        """Pieces that were handed over so far."""
        self.progress = threading.Event()
        """Set when the thread has done with it."""


@final
class CopyStream:
    """Starts its thread at construction; `stop` or `abandon` ends it."""

    __slots__ = ("_driver", "_health", "_inbox", "_jobs", "_pinning", "_queue", "_settled", "_stop", "_thread")

    def __init__(self, driver: CudaDriver, *, name: str, copier: Copier, health: Health, pinning: Pinning) -> None:
        self._driver = driver
        self._health = health
        self._pinning = pinning
        self._settled = threading.Event()
        self._jobs: deque[CopyJob] = deque()
        self._inbox: SimpleQueue[CopyJob | None] = SimpleQueue()
        self._stop = threading.Event()
        self._queue = StreamQueue(driver, copier=copier, health=health)
        pinning.when_settled(self._settled.set)
        # A daemon: a driver that does not come back from a call cannot keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._feed, name=f"aiokv-cuda-{name}", daemon=True)
        self._thread.start()

    @property
    def handle(self) -> int:
        """The driver's, of the stream."""
        return self._queue.handle

    @property
    def bandwidth(self) -> float:
        """Bytes per second of recent copies by the device's clock; 0.0 before the first."""
        return self._queue.bandwidth

    def is_quiet(self) -> bool:
        """Whether all that was submitted has ended."""
        return not self._jobs and self._queue.is_empty()

    def submit(self, job: CopyJob) -> None:
        """Hand a batch over, or let the thread do so. `CudaError`: nothing of it was started."""
        has_turn = self._is_short(job) and not self._jobs
        if has_turn and self._queue.has_room(len(job.copies), fences=len(job.fences)):
            with self._driver.submitting():
                self._hand_over(job, await_room=_go_on)
        else:
            self._jobs.append(job)
            self._inbox.put(job)

    def is_over(self, piece: Piece) -> bool:
        """Whether the device has done with a piece. An error of the context is noted in its `Health`."""
        return self._queue.is_over(piece)

    def hold_back(self, stream: int, *, behind: CopyJob) -> bool:
        """Let another stream wait, on the device, for the last copy of a batch. False: it has not been handed over.

        As long as the thread gets on with it, that is waited for.
        """
        seen = -1
        while behind.last is None and not behind.is_refused:
            if self._is_over_with() or behind.handed == seen:
                return False
            seen = behind.handed
            behind.progress.wait(_STOP_PAUSE_S)
        if behind.last is not None:
            self._queue.hold_back(stream, behind=behind.last)
        return True

    def stop(self) -> None:
        """Let the thread end after what it has to hand over."""
        self._inbox.put(None)

    def abandon(self) -> None:
        """Let the thread end with what is left in its hands."""
        self._stop.set()

    def destroy(self) -> None:
        """Free the stream. Only once it is quiet; call it with the context current."""
        self._queue.destroy()

    # Handing over, in the thread of who submits or in the stream's own.

    def _is_short(self, job: CopyJob) -> bool:
        """Whether handing it over takes little time. Memory that is not pinned the driver may copy meanwhile."""
        if self._pinning.status.state not in _QUICK:
            return False
        return len(job.copies) <= min(_MOST_AT_ONCE, self._queue.most_copies(seconds=_AT_ONCE_S))

    def _hand_over(self, job: CopyJob, *, await_room: Callable[[int], bool]) -> None:
        """All of a batch; `CudaError` if nothing of it was started. `await_room` says whether to go on with so many."""
        last, fences = None, len(job.fences)
        try:
            for fence in job.fences:
                self._driver.wait_event(self.handle, fence.event)
            for copies in job.copies.pieces(most=self._queue.most_copies(seconds=_PIECE_S)):
                if last is not None and not await_room(len(copies.sizes)):
                    return
                last = self._queue.put(copies, fences=fences if last is None else 0)
                job.handed += 1
            job.last = last or self._queue.mark(fences=fences)
        except CudaError as error:
            was_started = last is not None or isinstance(error, PartlyCopied)
            self._note_error(error)
            if not was_started:
                raise
            self._end_early(job, failure=str(error))

    def _end_early(self, job: CopyJob, *, failure: str) -> None:
        """Some of a batch was started: it has failed, but not ended before that has."""
        job.failure = failure
        try:
            job.last = self._queue.mark()
        except CudaError as error:
            self._health.lose(f"{failure}; then {error}")

    def _note_error(self, error: CudaError) -> None:
        """A call was refused: is it that call, or does the context answer no more?"""
        try:
            with self._driver.current():
                self._driver.is_idle(self.handle)
        except CudaError as sticky:
            self._health.lose(f"{error}; then {sticky}")

    # What runs in the thread.

    def _feed(self) -> None:
        try:
            while self._inbox.get() is not None:
                self._feed_one(self._jobs[0])
                self._jobs.popleft().progress.set()
        except BaseException as error:  # whatever it is, those who wait must hear of it
            self._health.lose(f"the thread that submits copies died of {error!r}")
            _log.critical("%s; no block is copied between the tiers any more", self._health.lost)

    def _feed_one(self, job: CopyJob) -> None:
        while not self._settled.wait(_STOP_PAUSE_S) and not self._is_over_with():
            pass
        first = min(len(job.copies), self._queue.most_copies(seconds=_PIECE_S))
        if not self._await_room(first, fences=len(job.fences)):
            job.is_refused = True
            return
        try:
            with self._driver.current():  # memory that is not pinned may be copied in the call
                self._hand_over(job, await_room=self._await_room)
        except CudaError as error:
            job.failure = str(error)
            job.is_refused = True

    def _await_room(self, copies: int, *, fences: int = 0) -> bool:
        """Whether there is room now; not so once the thread is to end or the context is lost."""
        pause_s, has_room = _PAUSE_S, self._queue.has_room
        while not self._is_over_with():
            if has_room(copies, fences=fences):
                return True
            has_room = self._queue.is_drained
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, _LONG_PAUSE_S)
        return False

    def _is_over_with(self) -> bool:
        return self._stop.is_set() or bool(self._health.lost)


def _go_on(copies: int) -> bool:
    """Room was looked for beforehand."""
    return True
