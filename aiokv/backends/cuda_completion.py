"""The end of one batch: `CudaEvent`, and `CheckThread`, which reads what has been copied where checksums are wanted.

The device copies and cannot check. So the copies of a batch being over is not its end yet: a store then has its
checksums taken and a load its sources compared, in the CPU arena, by one thread. A stream that was made to wait for a
load goes on before that: `lease.wait_on` sees no checksum.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import final

from aiokv.backends.base import EventStatus
from aiokv.backends.checksums import BlockChecksums
from aiokv.backends.cuda_events import Health
from aiokv.backends.cuda_stream import CopyJob, CopyStream
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch

__all__ = ["Check", "CheckThread", "CudaEvent"]

_log = logging.getLogger(__name__)


@final
class Check:
    """The checksums of one batch. It is begun when its copies are over; the thread alone ends it."""

    __slots__ = ("_is_begun", "batch", "corrupt", "failure", "is_done", "num_bytes", "thread")

    def __init__(self, batch: CopyBatch, *, num_bytes: int, thread: CheckThread) -> None:
        self.batch = batch
        self.num_bytes = num_bytes
        """Of one block of its group."""
        self.thread = thread
        self._is_begun = False
        self.corrupt: list[int] = []
        """Copies of a load whose source is not as it was stored; known once it is done."""
        self.failure = ""
        self.is_done = False

    def begin(self) -> None:
        """Let the thread read the blocks, once however often it is asked for."""
        if not self._is_begun:
            self._is_begun = True
            self.thread.put(self)


@final
class CheckThread:
    """Starts at construction. `put` and `stop` never block."""

    __slots__ = ("_checksums", "_inbox", "_thread")

    def __init__(self, checksums: BlockChecksums) -> None:
        self._checksums = checksums
        self._inbox: SimpleQueue[Check | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aiokv-cuda-check", daemon=True)
        self._thread.start()

    def prepare(self, batch: CopyBatch, *, num_bytes: int) -> Check:
        """The check of a batch that is about to be submitted, whose blocks have `num_bytes`.

        What a store is about to write has no checksums until then. No check names it now: slots have one writer.
        """
        if batch.direction is Direction.STORE:
            self._checksums.forget(batch.target_blocks)
        return Check(batch, num_bytes=num_bytes, thread=self)

    def put(self, check: Check) -> None:
        """Take or compare the checksums of a batch, after those that are queued."""
        self._inbox.put(check)

    def stop(self) -> None:
        """Let the thread end after what is queued."""
        self._inbox.put(None)

    def is_over(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (check := self._inbox.get()) is not None:
            try:
                self._make(check)
            except Exception as error:  # this batch's failure, not the thread's
                check.failure = f"its checksums: {type(error).__name__}: {error}"
                _log.exception("checksums of %d blocks could not be read", len(check.batch))
            check.is_done = True

    def _make(self, check: Check) -> None:
        batch, num_bytes = check.batch, check.num_bytes
        if batch.direction is Direction.STORE:
            steps = self._checksums.record(batch.target_blocks, num_bytes=num_bytes)
        else:
            steps = self._checksums.compare(batch.source_blocks, num_bytes=num_bytes, corrupt=check.corrupt)
        for _ in steps:
            pass


@final
class CudaEvent:
    """The device event of one batch, asked by one thread: the loop's, or the one that closes."""

    __slots__ = ("_check", "_detail", "_health", "_status", "job", "stream")

    def __init__(self, job: CopyJob, *, stream: CopyStream, health: Health, check: Check | None) -> None:
        """`check` is to be done, once the copies are over, before the event ends."""
        self.job = job
        self.stream = stream
        self._health = health
        self._check = check
        self._status = EventStatus.PENDING
        self._detail = ""

    def query(self) -> EventStatus:
        """See `DeviceEvent`."""
        if self._status is EventStatus.PENDING:
            self._status = self._look()
        return self._status

    def detail(self) -> str:
        """See `DeviceEvent`."""
        if self._status is EventStatus.LOST:
            return self._health.lost or "the backend was closed before its checksums were read"
        return self._detail

    def corrupt_copies(self) -> Sequence[int]:
        """See `DeviceEvent`."""
        return self._check.corrupt if self._check is not None and self._status is EventStatus.CORRUPT else ()

    def _look(self) -> EventStatus:
        job = self.job
        if job.is_refused and job.failure:
            return self._fail(job.failure)
        if job.last is None or not self.stream.is_over(job.last):
            return EventStatus.LOST if self._health.lost else EventStatus.PENDING
        if job.failure:
            return self._fail(job.failure)
        return self._look_at_check()

    def _look_at_check(self) -> EventStatus:
        check = self._check
        if check is None:
            return EventStatus.DONE
        check.begin()
        has_ended = check.thread.is_over()  # asked first: it may be done before it ends
        if not check.is_done:
            return EventStatus.LOST if has_ended else EventStatus.PENDING
        if check.failure:
            return self._fail(check.failure)
        if check.corrupt:
            self._detail = f"{len(check.corrupt)} of {len(check.batch)} blocks are not as they were stored"
            return EventStatus.CORRUPT
        return EventStatus.DONE

    def _fail(self, why: str) -> EventStatus:
        self._detail = why
        return EventStatus.FAILED
