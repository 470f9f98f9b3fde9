"""The one thread that copies for `HostBackend`, its two streams, and what a test can make go wrong in it.

Copies of one direction run in the order of `put`; a step of about 1 ms of each direction in turn, so neither waits for
the other's queue. The thread never touches an event loop, so a dead loop does not matter to it, and it keeps all memory
it works on alive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from queue import SimpleQueue
from typing import Final, final

import numpy as np

from aiokv.backends.base import EventStatus
from aiokv.backends.checksums import BlockChecksums
from aiokv.backends.copy_map import CopyMap
from aiokv.backends.gil_watch import GilWatch
from aiokv.backends.host_copy import BOUNCE_BYTES, Lane, copy_steps
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch

__all__ = ["CopyJob", "CopyThread", "HostEvent", "HostFaults", "Stall"]

_log = logging.getLogger(__name__)

_SLICE_SECONDS: Final = 0.001
"""A stream gives way to the other after the step that passes this."""
_EWMA_WEIGHT: Final = 0.25
"""Weight of the latest copy in the estimate of a direction's bandwidth."""


@final
class Stall:
    """Holds a copy, and with it the thread: `reached` is set when it stands, `release` lets it go on."""

    __slots__ = ("reached", "release")

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.release = threading.Event()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFaults:
    """What goes wrong, for tests. Copies are counted from 0 in the order of `submit`, both directions together."""

    fail: frozenset[int] = frozenset()
    """These end with an error after their first step: the target is torn."""
    corrupt: frozenset[int] = frozenset()
    """These end well, but the first byte of the first target block is wrong afterwards."""
    kill: frozenset[int] = frozenset()
    """At the start of these the copy thread dies."""
    stall: Mapping[int, Stall] = field(default_factory=dict)
    """These stand still after their first step."""


@final
class HostEvent:
    """The device event of one copy. The copy thread alone ends it, once; any thread may ask."""

    __slots__ = ("_corrupt", "_detail", "_status", "_thread")

    def __init__(self, thread: CopyThread) -> None:
        self._thread = thread
        self._status = EventStatus.PENDING
        self._detail = ""
        self._corrupt: Sequence[int] = ()

    def query(self) -> EventStatus:
        """See `DeviceEvent`."""
        # In this order: nothing ends once `lost` is set, so a status read afterwards is final.
        lost = self._thread.lost
        status = self._status
        return EventStatus.LOST if lost and status is EventStatus.PENDING else status

    def detail(self) -> str:
        """See `DeviceEvent`."""
        return self._thread.lost if self.query() is EventStatus.LOST else self._detail

    def corrupt_copies(self) -> Sequence[int]:
        """See `DeviceEvent`."""
        return self._corrupt

    def end(self, status: EventStatus, *, detail: str, corrupt: Sequence[int] = ()) -> None:
        """Set the final status. The copy thread's alone to call."""
        self._detail = detail
        self._corrupt = corrupt
        self._status = status


@final
class CopyJob:
    """One batch on its way through the thread, in which it was the `number`-th to be submitted."""

    __slots__ = ("batch", "block_bytes", "corrupt", "event", "lanes", "num_bytes", "number", "seconds", "steps")

    def __init__(self, batch: CopyBatch, *, number: int, lanes: Sequence[Lane], event: HostEvent) -> None:
        self.batch = batch
        self.number = number
        self.lanes = lanes
        self.event = event
        self.block_bytes: int = sum(lane.gpu.rows.shape[1] for lane in lanes)
        self.num_bytes = len(batch) * self.block_bytes
        self.seconds = 0.0
        """Time spent in its steps so far."""
        self.steps: Iterator[None] | None = None
        """What is left of it; `None` before its first step."""
        self.corrupt: list[int] = []
        """Copies of a load whose source is not as it was stored; known after the last step."""


@final
class CopyThread:
    """Starts at construction. `put` and `stop` never block; `lost` is final once it is not empty.

    With `checksums` a store ends when those of its targets are taken, a load when those of its sources are compared.
    """

    __slots__ = (
        "_bandwidth",
        "_bounce",
        "_checksums",
        "_faults",
        "_gil",
        "_inbox",
        "_lock",
        "_streams",
        "_thread",
        "lost",
    )

    def __init__(self, *, faults: HostFaults, checksums: BlockChecksums | None = None) -> None:
        self.lost = ""
        """Why nothing is copied any more; empty while the thread is well."""
        self._lock = threading.Lock()  # an event ends either before `lost` is set or never
        self._faults = faults
        self._checksums = checksums
        self._bounce = np.zeros(BOUNCE_BYTES, dtype=np.uint8)
        self._gil = GilWatch()
        self._bandwidth = dict.fromkeys(Direction, 0.0)
        self._streams: dict[Direction, deque[CopyJob]] = {direction: deque() for direction in Direction}
        self._inbox: SimpleQueue[CopyJob | None] = SimpleQueue()
        # A daemon, so that a backend nobody closed cannot keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name="aiokv-host-copy", daemon=True)
        self._thread.start()

    def put(self, job: CopyJob) -> None:
        """Queue a job on the stream of its direction."""
        self._inbox.put(job)

    def stop(self) -> None:
        """Let the thread end after what is queued. Takes no lock: a finaliser may call it."""
        self._inbox.put(None)

    def join(self, *, deadline_s: float) -> bool:
        """Wait for the end of the thread; whether it has ended."""
        self._thread.join(max(0.0, deadline_s))
        return not self._thread.is_alive()

    def abandon(self, why: str) -> None:
        """Give up on everything unfinished: its events are LOST, and the thread ends after the step it is in."""
        with self._lock:
            self.lost = self.lost or why

    def bandwidth(self, direction: Direction) -> float:
        """Bytes per second of recent copies; 0.0 before the first."""
        return self._bandwidth[direction]

    # What runs in the thread.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # whatever it is, those who wait must hear of it
            self.abandon(f"the copy thread died of {error!r}")
            _log.critical("%s; no block is copied between the tiers any more", self.lost)

    def _serve(self) -> None:
        stopping = False
        while not self.lost:
            busy = any(self._streams.values())
            if stopping and not busy:
                return
            if not busy or not self._inbox.empty():
                job = self._inbox.get()
                if job is None:
                    stopping = True
                else:
                    self._streams[job.batch.direction].append(job)
                continue
            for stream in filter(None, self._streams.values()):
                self._work_on(stream)

    def _work_on(self, stream: deque[CopyJob]) -> None:
        """Advance the head of one stream by a slice of time; take it off when it has ended."""
        job = stream[0]
        try:
            if not self._advance(job):
                return
        except Exception as error:  # this copy's failure, not the thread's
            self._end(job, EventStatus.FAILED, detail=f"{type(error).__name__}: {error}")
        else:
            self._note_speed(job)
            self._end_well(job)
        stream.popleft()

    def _advance(self, job: CopyJob) -> bool:
        """Whether the copy is complete. `seconds` leaves out the turns of the other stream."""
        began = time.perf_counter()
        if job.steps is None:
            job.steps = self._steps(job)
        for _ in job.steps:
            if (elapsed := time.perf_counter() - began) >= _SLICE_SECONDS:
                job.seconds += elapsed
                return False
        job.seconds += time.perf_counter() - began
        return True

    def _steps(self, job: CopyJob) -> Iterator[None]:
        if job.number in self._faults.kill:
            raise _KilledError
        is_load = job.batch.direction is Direction.LOAD
        if self._checksums is not None and not is_load:
            self._checksums.forget(job.batch.target_blocks)
        pairs = [(lane.cpu, lane.gpu) if is_load else (lane.gpu, lane.cpu) for lane in job.lanes]
        blocks = CopyMap(job.batch.source_blocks, job.batch.target_blocks)
        steps = chain.from_iterable(
            copy_steps(blocks, source=source, target=target, bounce=self._bounce, gil=self._gil)
            for source, target in pairs
        )
        yield from islice(steps, 1)
        if stall := self._faults.stall.get(job.number):
            stall.reached.set()
            stall.release.wait()
        if job.number in self._faults.fail:
            raise _InjectedError("a test wanted this copy to fail")
        yield from steps
        if self._checksums is not None:
            yield from self._check(job, self._checksums)
        if job.number in self._faults.corrupt and len(blocks):
            pairs[0][1].rows[job.batch.target_blocks[0], 0] ^= 0xFF

    def _check(self, job: CopyJob, checksums: BlockChecksums) -> Iterator[None]:
        if job.batch.direction is Direction.STORE:
            return checksums.record(job.batch.target_blocks, num_bytes=job.block_bytes)
        return checksums.compare(job.batch.source_blocks, num_bytes=job.block_bytes, corrupt=job.corrupt)

    def _note_speed(self, job: CopyJob) -> None:
        if job.num_bytes and job.seconds > 0.0:
            latest = job.num_bytes / job.seconds
            before = self._bandwidth[job.batch.direction] or latest
            self._bandwidth[job.batch.direction] = before + _EWMA_WEIGHT * (latest - before)

    def _end_well(self, job: CopyJob) -> None:
        if not job.corrupt:
            self._end(job, EventStatus.DONE)
            return
        found = f"{len(job.corrupt)} of {len(job.batch)} blocks are not as they were stored"
        self._end(job, EventStatus.CORRUPT, detail=found)

    def _end(self, job: CopyJob, status: EventStatus, *, detail: str = "") -> None:
        with self._lock:
            if not self.lost:
                job.event.end(status, detail=detail, corrupt=tuple(job.corrupt))


class _InjectedError(Exception):
    """A copy that a test wanted to fail."""


class _KilledError(BaseException):
    """The end of the thread, wanted by a test."""
