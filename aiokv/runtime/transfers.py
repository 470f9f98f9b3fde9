"""Carries out the core's transfers: hands them to the backend, watches their end, reports it back.

Rules
- A transfer belongs to the core from plan to completion; this module never gives pins back itself (law 4).
- At most `STREAM_DEPTH` batches are unfinished per direction; the others wait here, and one that the core dropped
  meanwhile is never submitted.
- The backend copies for every local rank; remote ranks are told after it has taken the batch, and report by themselves.
- A backend that raises what no backend may has lost its copies: nobody knows whether they were started.
- Once a rank or the backend is lost nothing is submitted any more, and after `stop` the backend is not called any more:
  what waits here, or comes later, fails or is dropped, and what no remote rank has heard of is withdrawn.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Final, final

from aiokv.backends.base import Backend, DeviceEvent, EventStatus
from aiokv.core.cache import CacheState
from aiokv.core.inflight import Transfer, TransferState
from aiokv.errors import AiokvError, BackendLost, CopyFailed, UsageError
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch, Outcome, RankTransfer
from aiokv.observe.stats import Stats
from aiokv.runtime.bridge import Bridge, Watched
from aiokv.runtime.fencing import RETRY_S, Fencing
from aiokv.runtime.rank_outlet import RankOutlet
from aiokv.runtime.timers import Timer
from aiokv.runtime.tracing import Tracing

__all__ = ["STREAM_DEPTH", "TransferRunner"]

_log = logging.getLogger(__name__)

STREAM_DEPTH: Final = 512
"""Below the depth at which a driver's queue makes submission block."""

_REPORT_INTERVAL_S: Final = 60.0

_OUTCOMES: Final = {
    EventStatus.DONE: Outcome.OK,
    EventStatus.CORRUPT: Outcome.CORRUPT,
    EventStatus.FAILED: Outcome.FAILED,
    EventStatus.LOST: Outcome.LOST,
}


@final
class _FailureReport:
    """Says in the log that copies fail, at most once in `_REPORT_INTERVAL_S`, and that the backend is lost, once."""

    __slots__ = ("_is_lost", "_next_at", "_unreported")

    def __init__(self) -> None:
        self._next_at = 0.0
        self._unreported = 0
        self._is_lost = False

    def failed(self, transfer: Transfer, detail: str, *, outcome: Outcome) -> None:
        """One transfer did not end well; where it is LOST, the backend is."""
        self._unreported += 1
        now = time.monotonic()
        if outcome is Outcome.LOST:
            self.lost(detail)
        elif now >= self._next_at:
            self._next_at = now + _REPORT_INTERVAL_S
            count, self._unreported = self._unreported, 0
            _log.warning("%d transfers failed, the last a %s: %s", count, transfer.direction.value, detail)

    def lost(self, detail: str) -> None:
        """No copy can be made any more."""
        if not self._is_lost:
            self._is_lost = True
            _log.error("the backend is lost, blocks are no longer copied between the tiers: %s", detail)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Running:
    """A transfer that the backend has taken and some rank has not reported."""

    transfer: Transfer
    event: DeviceEvent
    num_bytes: int
    started: float


@final
class TransferRunner:
    """Submits transfers and reports their completion to the core."""

    __slots__ = (
        "_backend", "_bridge", "_core", "_depths", "_fencing", "_is_paused", "_is_stopped", "_on_progress", "_outlet",
        "_queues", "_report", "_retry", "_running", "_schedule", "_stats", "_tracing",
    )  # fmt: skip

    def __init__(
        self,
        core: CacheState,
        *,
        backend: Backend,
        bridge: Bridge,
        outlet: RankOutlet,
        stats: Stats,
        fencing: Fencing,
        tracing: Tracing | None,
        make_timer: Callable[[Callable[[], None]], Timer],
        schedule: Callable[[Callable[[], object]], bool],
        on_progress: Callable[[], None],
    ) -> None:
        self._core = core
        self._backend = backend
        self._bridge = bridge
        self._outlet = outlet
        self._stats = stats
        self._on_progress = on_progress
        self._schedule = schedule
        self._fencing = fencing
        self._tracing = tracing
        self._retry = make_timer(self._carry_on)
        self._queues: dict[Direction, deque[tuple[Transfer, float]]] = {direction: deque() for direction in Direction}
        self._running: dict[int, _Running] = {}
        self._depths = dict.fromkeys(Direction, 0)
        self._is_stopped = self._is_paused = False
        self._report = _FailureReport()

    def enqueue(self, transfer: Transfer) -> None:
        """Submit now, or as soon as the stream has room."""
        transfer.since = time.monotonic()
        self._queues[transfer.direction].append((transfer, transfer.since))
        self._stats.queued_blocks[transfer.direction] += len(transfer)
        self._submit_queued(transfer.direction)

    def report(self, transfer_id: int, *, rank: int, outcome: Outcome, corrupt: Collection[int] = ()) -> None:
        """A remote rank's copies have ended. `UsageError` where `CacheState.report` says so, and for a local rank."""
        if rank in self._outlet.local_ranks:
            raise UsageError(f"rank {rank} is local: its copies are reported by the backend")
        running = self._running.get(transfer_id)
        if running is not None:
            running.transfer.ended = time.monotonic()
        self._core.report(transfer_id, rank, outcome, corrupt=corrupt)
        if running is not None and outcome is not Outcome.OK:
            self._report.failed(running.transfer, f"rank {rank}: {outcome.value}", outcome=outcome)
        if running is not None:
            self._end_if_reported(running)
        self._carry_on()

    def lose_rank(self, rank: int) -> None:
        """A remote rank is gone. `UsageError` for a local one, and for one that does not exist."""
        if rank in self._outlet.local_ranks:
            raise UsageError(f"rank {rank} is local: the backend says when it is lost")
        self._withdraw()
        self._core.lose_rank(rank)
        self._report.lost(f"rank {rank} is gone")
        for running in tuple(self._running.values()):
            self._end_if_reported(running)
        self._carry_on()

    def submit_now(self, transfer_ids: Collection[int]) -> bool:
        """Submit those of these loads that wait for room in their stream, before all others; whether there were any.

        The few that a stream so has more than its depth are no matter: they are one lease's.
        """
        queue = self._queues[Direction.LOAD]
        wanted = [entry for entry in queue if entry[0].transfer_id in transfer_ids]
        if not wanted or not self.settle_fences():
            return False
        for entry in wanted:
            queue.remove(entry)
            self._take(*entry)
        return True

    def find_event(self, transfer_id: int) -> DeviceEvent | None:
        """The event of the copies that the backend has taken of a transfer; None once they have ended."""
        running = self._running.get(transfer_id)
        return None if running is None else running.event

    def settle_fences(self) -> bool:
        """Have promised fences recorded, so that what is submitted is ordered behind them; True also where nothing will
        be submitted any more. Where a capture prevents it, it is tried again by itself.
        """
        if self._is_paused or self._is_stopped:
            return self._is_stopped
        is_settled = self._fencing.settle()
        if not is_settled:
            self._retry.set(RETRY_S)
        return is_settled

    def pause(self) -> None:
        """Submit nothing until `resume`."""
        self._is_paused = True

    def resume(self) -> None:
        """Go on."""
        self._is_paused = False
        self.settle_fences()
        for direction in Direction:
            self._submit_queued(direction)

    def stop(self) -> None:
        """Submit nothing any more; what is in flight stays so."""
        self._retry.close()
        self._is_stopped = True
        self._outlet.end()
        self._withdraw()
        for direction in Direction:
            self._submit_queued(direction)

    def _carry_on(self) -> None:
        """Some rank has said something: there may be room for what waits, or no use in waiting."""
        for direction in Direction:
            self._submit_queued(direction)
        self._on_progress()

    def _submit_queued(self, direction: Direction) -> None:
        queue = self._queues[direction]
        while queue and self._has_room(direction) and self.settle_fences():
            self._take(*queue.popleft())

    def _take(self, transfer: Transfer, queued_at: float) -> None:
        """One that has left its queue: submit it, or end it."""
        self._stats.queued_blocks[transfer.direction] -= len(transfer)
        if transfer.state is not TransferState.QUEUED:
            return
        if self._is_stopped:
            self._core.complete(transfer.transfer_id, Outcome.DROPPED)
        elif self._core.is_backend_lost:
            self._core.mark_submitted(transfer)
            self._core.complete(transfer.transfer_id, Outcome.FAILED)
        else:
            self._submit(transfer, queued_at=queued_at)

    def _has_room(self, direction: Direction) -> bool:
        """Whether the next batch need not wait for room in its stream."""
        return self._is_stopped or self._core.is_backend_lost or self._depths[direction] < STREAM_DEPTH

    def _submit(self, transfer: Transfer, *, queued_at: float) -> None:
        group = self._core.geometry.groups[transfer.group].name
        batch = CopyBatch(
            direction=transfer.direction,
            group=group,
            source_blocks=transfer.sources,
            target_blocks=transfer.bound_targets,
            after=self._fencing.find_waits(transfer),
        )
        self._core.mark_submitted(transfer)
        started = time.monotonic()
        self._stats.queue_wait_seconds[transfer.direction].observe(started - queued_at)
        try:
            num_bytes = len(batch) * self._backend.block_bytes(group)
            if self._tracing is not None:
                self._tracing.submitted(transfer, num_bytes=num_bytes, queued_s=started - queued_at)
            event = self._backend.submit(batch)
        except Exception as error:
            self._end_refused(transfer, error)
            if isinstance(error, AiokvError) and not isinstance(error, CopyFailed | BackendLost):
                raise  # the runtime's own fault
            return
        running = _Running(transfer=transfer, event=event, num_bytes=num_bytes, started=started)
        self._running[transfer.transfer_id] = running
        self._depths[transfer.direction] += 1

        def on_end(status: EventStatus, detail: str) -> None:
            self._end_locally(running, status=status, detail=detail)

        expected_s = partial(self._backend.eta_seconds, transfer.direction, num_bytes)
        watched = Watched(event=event, expected_s=expected_s, on_end=on_end, num_blocks=len(transfer))
        self._bridge.watch(transfer.direction, watched)
        if self._outlet.remote_ranks:
            self._outlet.put(RankTransfer(transfer_id=transfer.transfer_id, batch=batch))

    def _end_refused(self, transfer: Transfer, error: Exception) -> None:
        """The backend has not taken a batch. Where it says so in its own words nothing was started on any rank and the
        slots are as they were; a lost backend is not tried again.
        """
        is_known = isinstance(error, CopyFailed | BackendLost)
        if isinstance(error, BackendLost):
            self._core.lose_backend()
        detail = str(error) if is_known else f"it raised {error!r} at a submission"
        outcome = Outcome.FAILED if isinstance(error, CopyFailed) else Outcome.LOST
        self._report.failed(transfer, detail, outcome=outcome)
        self._core.complete(transfer.transfer_id, Outcome.FAILED if is_known else Outcome.LOST)
        if self._tracing is not None:
            self._tracing.ended(transfer)

    def _end_locally(self, running: _Running, *, status: EventStatus, detail: str) -> None:
        """The backend's copies have ended, for all local ranks alike."""
        transfer, outcome = running.transfer, _OUTCOMES[status]
        transfer.ended = self._bridge.ended_at
        self._core.meters.note_time(time.monotonic())
        copies = _corrupt_copies(transfer, running.event) if status is EventStatus.CORRUPT else frozenset()
        if outcome is Outcome.CORRUPT and not copies:
            outcome = Outcome.FAILED  # a backend that names no block of it: the transfer has to end all the same
        if status is not EventStatus.DONE:
            self._report.failed(transfer, detail, outcome=outcome)
        for rank in self._outlet.local_ranks:
            self._core.report(transfer.transfer_id, rank, outcome, corrupt=copies)
        self._end_if_reported(running)
        self._on_progress()
        # Whoever waits for these copies goes on first: to submit others may take as long as to end many.
        if self._queues[transfer.direction] and not self._schedule(self._carry_on):
            self._submit_queued(transfer.direction)

    def _end_if_reported(self, running: _Running) -> None:
        """Let go of a transfer, and make room in its stream, once the last rank has reported it."""
        transfer = running.transfer
        if transfer.state is TransferState.SUBMITTED:
            return
        del self._running[transfer.transfer_id]
        self._depths[transfer.direction] -= 1
        self._stats.transfer_seconds[transfer.direction].observe(time.monotonic() - running.started)
        if transfer.state is TransferState.DONE:
            self._stats.transfer_bytes[transfer.direction] += running.num_bytes
        if self._tracing is not None:
            self._tracing.ended(transfer)

    def _withdraw(self) -> None:
        """What nobody has taken is started on no remote rank: there it has failed, and nothing was written."""
        for transfer_id in [withdrawn.transfer_id for withdrawn in self._outlet.take_all()]:
            running = self._running.get(transfer_id)
            if running is not None:
                for rank in self._outlet.remote_ranks.intersection(self._core.missing_ranks(running.transfer)):
                    self._core.report(transfer_id, rank, Outcome.FAILED)
                self._end_if_reported(running)


def _corrupt_copies(transfer: Transfer, event: DeviceEvent) -> frozenset[int]:
    """What a backend says of the sources of a load, as far as they are some of it; a store has none to check."""
    places = range(len(transfer)) if transfer.direction is Direction.LOAD else ()
    try:
        return frozenset(copy for copy in event.corrupt_copies() if copy in places)
    except Exception:  # then it has named none
        return frozenset()
