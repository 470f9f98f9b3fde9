"""`StreamQueue`: what the driver has of one stream, and how much more it should be given.

Copies enter it as *pieces*: those of one call, between two timed events.

Rules
- One thread at a time enqueues; any thread may ask whether a piece is over.
- The lock is held for short calls only, never while copies are enqueued.
- Whoever asks whether a piece is over, or whether there is room, has what is over noted and forgotten; nothing else.
- `CudaError` from `put`: nothing of the piece was started; `PartlyCopied`: something may have been.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final, final

from aiokv.backends.cuda_batch import Copier, PartlyCopied
from aiokv.backends.cuda_copies import Copies
from aiokv.backends.cuda_driver import CudaDriver, CudaError
from aiokv.backends.cuda_events import EventPool, Health

__all__ = ["Piece", "StreamQueue"]

_MOST_OPS: Final = 512
"""Entries of the stream's queue at most: at about a thousand a driver makes who submits wait."""
_OPS_WHEN_REFILLED: Final = 256
"""Who has found it full comes back when so many are left: then there is room for many batches, and those who wait for
the ends of others are disturbed once for all of them.
"""
_EVENT_OPS: Final = 2
_FEWEST_COPIES: Final = 256
"""So many go in one call however long it takes, and tell how long more would."""
_FIRST_COST_S: Final = 0.4e-3
"""Of a call with the most copies, before there was one."""
_EWMA_WEIGHT: Final = 0.25


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
class StreamQueue:
    """A stream of its own, until `destroy`."""

    __slots__ = (
        "_bandwidth",
        "_copier",
        "_cost_s",
        "_driver",
        "_events",
        "_health",
        "_lock",
        "_ops",
        "_pieces",
        "handle",
    )

    def __init__(self, driver: CudaDriver, *, copier: Copier, health: Health) -> None:
        self._driver = driver
        self._copier = copier
        self._health = health
        self._events = EventPool(driver.create_timed_event)
        self._lock = threading.Lock()
        self._pieces: deque[Piece] = deque()
        self._ops = 0
        self._bandwidth = 0.0
        self._cost_s = _FIRST_COST_S / copier.most
        with driver.current():
            self.handle = driver.create_stream()

    @property
    def bandwidth(self) -> float:
        """Bytes per second of recent copies by the device's clock; 0.0 before the first."""
        return self._bandwidth

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

    def hold_back(self, stream: int, *, behind: Piece) -> None:
        """Let another stream wait, on the device, for the end of a piece; call it with the context current."""
        with self._lock:
            if not behind.is_over:
                self._driver.wait_event(stream, behind.end)

    # What who enqueues asks and does.

    def most_copies(self, *, seconds: float) -> int:
        """So many take no longer in one call, as far as the last calls tell."""
        return min(self._copier.most, max(int(seconds / self._cost_s), _FEWEST_COPIES))

    def has_room(self, copies: int, *, fences: int = 0) -> bool:
        """Whether so many copies of one call, and waits, fit in. An empty queue takes whatever comes."""
        return self._has_room(copies, fences=fences, most=_MOST_OPS)

    def is_drained(self, copies: int, *, fences: int = 0) -> bool:
        """Whether they fit in, and many more with them."""
        return self._has_room(copies, fences=fences, most=_OPS_WHEN_REFILLED)

    def is_empty(self) -> bool:
        """Whether all pieces are over."""
        self._reap()
        return not self._pieces

    def put(self, copies: Copies, *, fences: int = 0) -> Piece:
        """Enqueue copies, behind so many waits for fences that were enqueued; call it with the context current."""
        count = len(copies.sizes)
        begin = self._record()
        try:
            began = time.perf_counter()
            self._copier.enqueue(copies, stream=self.handle)
            self._note_cost(time.perf_counter() - began, copies=count)
            end = self._record_end()
        except CudaError:
            self._events.give(begin)  # nobody will ask how long it took
            raise
        ops = self._copier.ops(count) + _EVENT_OPS + fences
        return self._add(Piece(begin=begin, end=end, num_bytes=int(copies.sizes.sum()), ops=ops))

    def mark(self, *, fences: int = 0) -> Piece:
        """A piece without copies: it is over when all before it is."""
        event = self._record()
        return self._add(Piece(begin=event, end=event, num_bytes=0, ops=1 + fences))

    def destroy(self) -> None:
        """Free the stream and its events. Only once it is empty; call it with the context current."""
        with self._lock:
            for event in self._events.drain():
                self._driver.destroy_event(event)
            self._driver.destroy_stream(self.handle)

    # Helpers.

    def _has_room(self, copies: int, *, fences: int, most: int) -> bool:
        ops = self._copier.ops(copies) + _EVENT_OPS + fences
        if self._ops and self._ops + ops > most:
            self._reap()
        return not self._ops or self._ops + ops <= most

    def _record(self) -> int:
        """An event at the end of what is enqueued."""
        event = self._events.take()
        try:
            self._driver.record_event(event, self.handle)
        except CudaError:
            self._events.give(event)
            raise
        return event

    def _record_end(self) -> int:
        """The same, behind copies that were just enqueued."""
        try:
            return self._record()
        except CudaError as error:
            raise PartlyCopied(error.code, error.api, name=error.name) from error

    def _add(self, piece: Piece) -> Piece:
        self._ops += piece.ops
        self._pieces.append(piece)
        return piece

    def _reap(self) -> None:
        while self._pieces and self.is_over(self._pieces[0]):
            self._ops -= self._pieces.popleft().ops

    def _note_cost(self, seconds: float, *, copies: int) -> None:
        """A small piece says more of the call than of its copies."""
        if copies >= _FEWEST_COPIES:
            self._cost_s += _EWMA_WEIGHT * (seconds / copies - self._cost_s)

    def _end(self, piece: Piece) -> None:
        """A piece is over: how fast it was, and its events are free."""
        seconds = self._find_seconds(piece) if piece.num_bytes else 0.0
        if seconds > 0.0:
            latest = piece.num_bytes / seconds
            self._bandwidth += _EWMA_WEIGHT * (latest - self._bandwidth) if self._bandwidth else latest
        piece.is_over = True
        for event in {piece.begin, piece.end}:
            self._events.give(event)

    def _find_seconds(self, piece: Piece) -> float:
        """By the device's clock; 0.0 if the driver does not say, which costs an estimate and no copy."""
        try:
            return self._driver.seconds_between(piece.begin, piece.end)
        except CudaError:
            return 0.0
