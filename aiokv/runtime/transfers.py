"""Carries out the core's transfers: hands them to the backend, watches their end, reports it back.

Rules
- A transfer belongs to the core from plan to completion; this module never gives pins back itself (law 4).
- At most `STREAM_DEPTH` batches are in flight per direction; the others wait here, and one that the core dropped
  meanwhile is never submitted.
- After `stop` the backend is not called any more: what waits here, or comes later, is dropped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final, final

from aiokv.backends.base import Backend, EventStatus
from aiokv.core.cache import CacheState
from aiokv.core.inflight import Transfer, TransferState
from aiokv.errors import BackendLost, CopyFailed
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch, Outcome
from aiokv.observe.stats import Stats
from aiokv.runtime.bridge import Bridge, Watched

__all__ = ["STREAM_DEPTH", "TransferRunner"]

_log = logging.getLogger(__name__)

STREAM_DEPTH: Final = 512
"""Below the depth at which a driver's queue makes submission block."""

_REPORT_INTERVAL_S: Final = 60.0

_OUTCOMES: Final = {
    EventStatus.DONE: Outcome.OK,
    EventStatus.FAILED: Outcome.FAILED,
    EventStatus.LOST: Outcome.LOST,
}


@final
class _FailureReport:
    """Says in the log that copies fail, at most once in `_REPORT_INTERVAL_S`, and that a backend is lost, once."""

    __slots__ = ("_is_lost", "_next_at", "_unreported")

    def __init__(self) -> None:
        self._next_at = 0.0
        self._unreported = 0
        self._is_lost = False

    def failed(self, transfer: Transfer, detail: str, *, is_lost: bool) -> None:
        """One transfer did not end well."""
        if is_lost and not self._is_lost:
            self._is_lost = True
            _log.error("the backend is lost, blocks are no longer copied between the tiers: %s", detail)
        self._unreported += 1
        now = time.monotonic()
        if not is_lost and now >= self._next_at:
            self._next_at = now + _REPORT_INTERVAL_S
            count, self._unreported = self._unreported, 0
            _log.warning("%d transfers failed, the last a %s: %s", count, transfer.direction.value, detail)


@final
class TransferRunner:
    """Submits transfers and reports their completion to the core."""

    __slots__ = ("_backend", "_bridge", "_core", "_is_stopped", "_on_progress", "_queues", "_report", "_stats")

    def __init__(
        self, core: CacheState, *, backend: Backend, bridge: Bridge, stats: Stats, on_progress: Callable[[], None]
    ) -> None:
        self._core = core
        self._backend = backend
        self._bridge = bridge
        self._stats = stats
        self._on_progress = on_progress
        self._queues: dict[Direction, deque[tuple[Transfer, float]]] = {direction: deque() for direction in Direction}
        self._is_stopped = False
        self._report = _FailureReport()

    def enqueue(self, transfer: Transfer) -> None:
        """Submit now, or as soon as the stream has room."""
        self._queues[transfer.direction].append((transfer, time.monotonic()))
        self._stats.queued_blocks[transfer.direction] += len(transfer)
        self._submit_queued(transfer.direction)

    def stop(self) -> None:
        """Submit nothing any more; what is in flight stays so."""
        self._is_stopped = True
        for direction in Direction:
            self._submit_queued(direction)

    def _submit_queued(self, direction: Direction) -> None:
        queue = self._queues[direction]
        while queue and (self._is_stopped or self._bridge.depth(direction) < STREAM_DEPTH):
            transfer, queued_at = queue.popleft()
            self._stats.queued_blocks[direction] -= len(transfer)
            if transfer.state is not TransferState.QUEUED:
                continue
            if self._is_stopped:
                self._core.complete(transfer.transfer_id, Outcome.DROPPED)
            else:
                self._submit(transfer, queued_at=queued_at)

    def _submit(self, transfer: Transfer, *, queued_at: float) -> None:
        group = self._core.geometry.groups[transfer.group].name
        batch = CopyBatch(
            direction=transfer.direction,
            group=group,
            source_blocks=transfer.sources,
            target_blocks=transfer.bound_targets,
            after=transfer.after,
        )
        self._core.mark_submitted(transfer)
        started = time.monotonic()
        self._stats.queue_wait_seconds[transfer.direction].observe(started - queued_at)
        try:
            event = self._backend.submit(batch)
        except (CopyFailed, BackendLost) as error:
            # Nothing was started, so the slots are as they were; a lost backend is not tried again.
            if isinstance(error, BackendLost):
                self._core.lose_backend()
            self._report.failed(transfer, str(error), is_lost=isinstance(error, BackendLost))
            self._core.complete(transfer.transfer_id, Outcome.FAILED)
            return
        num_bytes = len(batch) * self._backend.block_bytes(group)

        def on_end(status: EventStatus, detail: str) -> None:
            if status is not EventStatus.DONE:
                self._report.failed(transfer, detail, is_lost=status is EventStatus.LOST)
            self._end(transfer, outcome=_OUTCOMES[status], num_bytes=num_bytes, started=started)

        expected = self._backend.eta_seconds(transfer.direction, num_bytes)
        self._bridge.watch(transfer.direction, Watched(event=event, expected_s=expected, on_end=on_end))

    def _end(self, transfer: Transfer, *, outcome: Outcome, num_bytes: int, started: float) -> None:
        self._stats.transfer_seconds[transfer.direction].observe(time.monotonic() - started)
        if outcome is Outcome.OK:
            self._stats.transfer_bytes[transfer.direction] += num_bytes
        self._core.complete(transfer.transfer_id, outcome)
        self._submit_queued(transfer.direction)
        self._on_progress()
