"""`CopyStream`: one direction's stream, and what is on its way through it.

A batch becomes *pieces*: copies of one call, between two timed events. A batch of one piece is handed to the driver at
once, by who submits it. A longer one, or one that finds others waiting or the stream's queue nearly full, is handed
over by the stream's own thread, piece by piece, so that the loop is not held and no call waits for room in the queue.

Rules
- Pieces are handed over in the order of `submit`. While the thread has something to hand over nobody else does.
- How many copies are a piece, and how many are handed over at once, is learnt from how long the last calls took.
- The lock is held for short calls only, never while copies are handed over.
- `CudaError` from `submit`: nothing of the batch was started. What fails later, the batch's event tells once all that
  was started has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final, final

from aiokv.backends.base import Pinning
from aiokv.backends.cuda_batch import Copier, PartlyCopied
from aiokv.backends.cuda_copies import BatchCopies, Copies
from aiokv.backends.cuda_driver import CudaDriver, CudaError
from aiokv.backends.cuda_events import CudaFence, EventPool, Health
from aiokv.model.pinning import PinState

__all__ = ["CopyJob", "CopyStream", "Piece"]

_log = logging.getLogger(__name__)

_MOST_OPS: Final = 512
"""Entries of the stream's queue at most: at about a thousand a driver makes who submits wait."""
_PIECE_S: Final = 0.4e-3
"""How long a call may take that hands over a piece."""
_AT_ONCE_S: Final = 0.2e-3
_MOST_AT_ONCE: Final = 4096
"""What takes longer, or is more, costs the loop less when the thread hands it over."""
_FEWEST_COPIES: Final = 256
"""So many go in one call however long it takes, and tell how long more would."""
_EVENT_OPS: Final = 2
_PAUSE_S: Final = 200e-6
_LONG_PAUSE_S: Final = 2e-3
"""How long the thread lets the device work before it looks for room again, at first and after a while."""
_STOP_PAUSE_S: Final = 0.1
"""How soon it notices that it is to end, while it waits for the CPU arena."""
_EWMA_WEIGHT: Final = 0.25
_QUICK: Final = (PinState.PINNED, PinState.NOT_NEEDED)


@final
class Piece:
    """Copies of one call. `begin` and `end` are timed events, and not its own any more once it `is_over`."""

    __slots__ = ("begin", "end", "is_over", "num_bytes", "ops")

    def __init__(self, *, begin: int, end: int, num_bytes: int, ops: int) -> None:
        self.begin = begin
        self.end = end
        self.num_bytes = num_bytes
        self.ops = ops
        self.is_over = False


@final
class CopyJob:
    """One batch on its way. It is handed over once `last` is set, or `refused`."""

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
        """Set when all have been."""


@final
class CopyStream:
    """Starts its thread at construction; `close` ends it."""

    __slots__ = (
        "_bandwidth",
        "_copier",
        "_cost_s",
        "_driver",
        "_events",
        "_health",
        "_in_flight",
        "_inbox",
        "_jobs",
        "_lock",
        "_ops",
        "_pinning",
        "_settled",
        "_stop",
        "_thread",
        "handle",
    )

    def __init__(self, driver: CudaDriver, *, name: str, copier: Copier, health: Health, pinning: Pinning) -> None:
        self._driver = driver
        self._copier = copier
        self._health = health
        self._pinning = pinning
        self._settled = threading.Event()
        pinning.when_settled(self._settled.set)
        self._events = EventPool(driver.create_timed_event)
        self._lock = threading.Lock()
        self._jobs: deque[CopyJob] = deque()
        self._inbox: SimpleQueue[CopyJob | None] = SimpleQueue()
        self._in_flight: deque[Piece] = deque()
        self._ops = 0
        self._bandwidth = 0.0
        self._cost_s = _PIECE_S / copier.most
        self._stop = threading.Event()
        with driver.current():
            self.handle = driver.create_stream()
        # A daemon: a driver that does not come back from a call cannot keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._feed, name=f"aiokv-cuda-{name}", daemon=True)
        self._thread.start()

    @property
    def bandwidth(self) -> float:
        """Bytes per second of recent copies by the device's clock; 0.0 before the first."""
        return self._bandwidth

    @property
    def is_quiet(self) -> bool:
        """Whether all that was submitted has ended."""
        if self._jobs:
            return False
        self._reap()
        return not self._in_flight

    def submit(self, job: CopyJob) -> None:
        """Hand a batch over, or let the thread do so. `CudaError`: nothing of it was started."""
        if self._is_short(job) and not self._jobs and self._has_room(len(job.copies), fences=len(job.fences)):
            with self._driver.submitting():
                self._hand_over(job, await_room=_go_on)
        else:
            self._jobs.append(job)
            self._inbox.put(job)

    def is_over(self, piece: Piece) -> bool:
        """Whether the device has done with a piece. An error of the context is noted in its `Health`."""
        self._driver.require_own_process()  # before the lock: in a forked child it may be held for ever
        with self._lock:
            if piece.is_over or self._health.lost:
                return piece.is_over
            try:
                with self._driver.current():
                    if self._driver.query_event(piece.end):
                        self._end(piece)
            except CudaError as error:
                self._health.lose(str(error))
            return piece.is_over

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
            with self._lock:
                if not behind.last.is_over:
                    self._driver.wait_event(stream, behind.last.end)
        return True

    def stop(self) -> None:
        """Let the thread end after what it has to hand over."""
        self._inbox.put(None)

    def abandon(self) -> None:
        """Let the thread end with what is left in its hands."""
        self._stop.set()

    def destroy(self) -> None:
        """Free the stream and its events. Only once it is quiet; call it with the context current."""
        with self._lock:
            for event in self._events.drain():
                self._driver.destroy_event(event)
            self._driver.destroy_stream(self.handle)

    # Handing over, in the thread of who submits or in the stream's own.

    def _is_short(self, job: CopyJob) -> bool:
        """Whether to hand it over takes no longer than a piece: the driver copies memory that is not pinned itself."""
        if self._pinning.status.state not in _QUICK:
            return False
        return len(job.copies) <= min(_MOST_AT_ONCE, self._most_copies(seconds=_AT_ONCE_S))

    def _most_copies(self, *, seconds: float = _PIECE_S) -> int:
        """So many take no longer in one call, as far as the last calls tell."""
        return min(self._copier.most, max(int(seconds / self._cost_s), _FEWEST_COPIES))

    def _has_room(self, copies: int, *, fences: int = 0) -> bool:
        """An empty queue has room for whatever is the next piece."""
        ops = self._copier.ops(copies) + _EVENT_OPS + fences
        if self._ops and self._ops + ops > _MOST_OPS:
            self._reap()
        return not self._ops or self._ops + ops <= _MOST_OPS

    def _reap(self) -> None:
        while self._in_flight and self.is_over(self._in_flight[0]):
            self._ops -= self._in_flight.popleft().ops

    def _hand_over(self, job: CopyJob, *, await_room: Callable[[int], bool]) -> None:
        """All of a batch; `CudaError` if nothing of it was started. `await_room` says whether to go on with so many."""
        last = None
        try:
            for fence in job.fences:
                self._driver.wait_event(self.handle, fence.event)
            for copies in job.copies.pieces(most=self._most_copies()):
                if last is not None and not await_room(len(copies.sizes)):
                    return
                last = self._put(copies, fences=len(job.fences) if last is None else 0)
                job.handed += 1
            job.last = last or self._mark()
        except CudaError as error:
            was_started = last is not None or isinstance(error, PartlyCopied)
            self._note_error(error)
            if not was_started:
                raise
            self._end_early(job, failure=str(error))

    def _put(self, copies: Copies, *, fences: int) -> Piece:
        """Enqueue one piece, behind so many waits for fences."""
        count = len(copies.sizes)
        begin = self._events.take()
        self._driver.record_event(begin, self.handle)
        began = time.perf_counter()
        self._copier.enqueue(copies, stream=self.handle)
        self._note_cost(time.perf_counter() - began, copies=count)
        try:
            end = self._events.take()
            self._driver.record_event(end, self.handle)
        except CudaError as error:
            raise PartlyCopied(error.code, error.api, name=error.name) from error
        ops = self._copier.ops(count) + _EVENT_OPS + fences
        return self._watch(Piece(begin=begin, end=end, num_bytes=int(copies.sizes.sum()), ops=ops))

    def _note_cost(self, seconds: float, *, copies: int) -> None:
        """A small piece says more of the call than of its copies."""
        if copies >= _FEWEST_COPIES:
            self._cost_s += _EWMA_WEIGHT * (seconds / copies - self._cost_s)

    def _mark(self) -> Piece:
        """A piece without copies: it is over when all before it is."""
        event = self._events.take()
        self._driver.record_event(event, self.handle)
        return self._watch(Piece(begin=event, end=event, num_bytes=0, ops=1))

    def _watch(self, piece: Piece) -> Piece:
        self._ops += piece.ops
        self._in_flight.append(piece)
        return piece

    def _end_early(self, job: CopyJob, *, failure: str) -> None:
        """Some of a batch was started: it has failed, but not ended before that has."""
        job.failure = failure
        try:
            job.last = self._mark()
        except CudaError as error:
            self._health.lose(f"{failure}; then {error}")

    def _note_error(self, error: CudaError) -> None:
        """A call was refused: is it that call, or does the context answer no more?"""
        try:
            with self._driver.current():
                self._driver.is_idle(self.handle)
        except CudaError as sticky:
            self._health.lose(f"{error}; then {sticky}")

    def _end(self, piece: Piece) -> None:
        """A piece is over: how fast it was, and its events are free."""
        seconds = self._driver.seconds_between(piece.begin, piece.end) if piece.num_bytes else 0.0
        if seconds > 0.0:
            latest = piece.num_bytes / seconds
            self._bandwidth += _EWMA_WEIGHT * (latest - self._bandwidth) if self._bandwidth else latest
        piece.is_over = True
        for event in {piece.begin, piece.end}:
            self._events.give(event)

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
        first = min(len(job.copies), self._most_copies())
        if not self._wait_for_room(first, fences=len(job.fences)):
            job.is_refused = True
            return
        try:
            with self._driver.submitting():
                self._hand_over(job, await_room=self._wait_for_room)
        except CudaError as error:
            job.failure = str(error)
            job.is_refused = True

    def _wait_for_room(self, copies: int, *, fences: int = 0) -> bool:
        """Whether there is room now; not so once the thread is to end or the context is lost."""
        pause_s = _PAUSE_S
        while not self._is_over_with():
            if self._has_room(copies, fences=fences):
                return True
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, _LONG_PAUSE_S)
        return False

    def _is_over_with(self) -> bool:
        return self._stop.is_set() or bool(self._health.lost)


def _go_on(copies: int) -> bool:
    """Room was looked for beforehand."""
    return True
