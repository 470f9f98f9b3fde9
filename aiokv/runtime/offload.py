"""The shell around the core: after every call it carries out what the core wants done.

Duty: submit transfers, wake who waits, run sliced work one slice a turn, serve the admission queue one attempt a turn.

Rules
- Nothing here awaits: plain calls from the loop's thread. Waiting is done by coroutines on futures of their own.
- The core is entered from one thread of one process only; anyone else gets a `UsageError`.
- Once the runtime is closed, what is left to do is done inline. A loop that died before is not touched: `detach`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import final

from aiokv.backends.base import Backend, WakeMode
from aiokv.core.cache import CacheState
from aiokv.core.counters import Closing, HintClosing
from aiokv.core.hint_table import HintState
from aiokv.core.lease_table import AcquireRequest, LeaseRecord, LeaseState
from aiokv.errors import UsageError
from aiokv.model.plan import Deferred
from aiokv.observe.checks import check_invariants
from aiokv.observe.publisher import Publisher, Subscription
from aiokv.observe.stats import EVENT_KINDS, Stats
from aiokv.runtime.bridge import Bridge
from aiokv.runtime.cleanups import Cleanups
from aiokv.runtime.fencing import Fencing
from aiokv.runtime.leaks import LeakBox, warn_later
from aiokv.runtime.lease_clock import LeaseClock
from aiokv.runtime.notices import Notices
from aiokv.runtime.ownership import Owner
from aiokv.runtime.rank_outlet import RankOutlet
from aiokv.runtime.timers import LoopTimer
from aiokv.runtime.tracing import Tracing
from aiokv.runtime.transfers import TransferRunner
from aiokv.runtime.waiting import WaitQueue

__all__ = ["Offloader"]

_log = logging.getLogger(__name__)


@final
class Offloader:
    """Drives one `CacheState` from one event loop."""

    __slots__ = (
        "_cleanups", "_drained", "_events", "_fences", "_is_detached", "_is_open", "_meters", "_outbox", "_owner",
        "_quiet", "_scheduled", "_seen_generation", "backend", "bridge", "clock", "core", "fencing", "leaks", "loop",
        "notices", "outlet", "publisher", "queue", "stats", "tracing", "transfers",
    )  # fmt: skip

    def __init__(
        self,
        core: CacheState,
        *,
        backend: Backend,
        loop: asyncio.AbstractEventLoop,
        outlet: RankOutlet,
        stats: Stats,
        fencing: Fencing,
        tracing: Tracing | None = None,
        lease_age_limit_s: float | None = None,
    ) -> None:
        self.core = core
        self.backend = backend
        self.loop = loop
        self.outlet = outlet
        self.stats = stats
        self.tracing = tracing
        self.clock = LeaseClock(core, stats=stats, age_limit_s=lease_age_limit_s, make_timer=partial(LoopTimer, loop))
        self.queue = WaitQueue()
        self.publisher = Publisher()
        self.bridge = Bridge(loop, wake_mode=backend.wake_mode, stats=stats)
        self.fencing = fencing
        self.notices = Notices(loop)
        self.transfers = self._make_runner()
        self.leaks = LeakBox(loop, on_leak=self.collect_leaks)
        self._owner = Owner(loop)
        self._events = core.events
        self._meters = core.meters
        self._cleanups = Cleanups(core.meters, histogram=stats.cleanup_seconds)
        self._outbox = core.outbox
        self._fences = core.fences
        self._is_open = True
        self._quiet = 0
        self._is_detached = False
        self._scheduled: dict[Callable[[], object], asyncio.Handle] = {}
        self._seen_generation = core.capacity_generation
        self._drained: list[asyncio.Future[None]] = []
        if backend.wake_mode is WakeMode.DOORBELL:
            backend.attach_doorbell(self.bridge.ring)

    def _make_runner(self) -> TransferRunner:
        return TransferRunner(
            self.core,
            backend=self.backend,
            bridge=self.bridge,
            outlet=self.outlet,
            stats=self.stats,
            fencing=self.fencing,
            tracing=self.tracing,
            make_timer=partial(LoopTimer, self.loop),
            schedule=self.schedule,
            on_progress=self.progress,
        )

    # Who may call.

    def enter(self) -> None:
        """Every public call starts here: right process, right thread, right loop, and leaks are given back first."""
        self._owner.check()
        if self.leaks.leases or self.leaks.hints:
            self.collect_leaks()

    def enter_for_intake(self) -> None:
        """Like `enter`, for calls that let requests in."""
        self.enter()
        if not self._is_open:
            raise UsageError("this aiokv runtime is closed or closing")

    def enter_to_close(self) -> None:
        """Like `enter`, for `close`: any thread of the process may, once the loop does not run there any more."""
        self._owner.take_over_to_close()

    @property
    def is_accepting(self) -> bool:
        """Whether requests are let in. Any thread may ask."""
        return self._is_open

    @property
    def is_in_loop(self) -> bool:
        """Whether the caller runs in this loop."""
        return self._owner.is_in_loop

    # Leases.

    def try_admit(self, request: AcquireRequest) -> LeaseRecord | Deferred:
        """One attempt at admitting a request."""
        return self.try_admission(partial(self.core.try_acquire, request))

    def try_admission(self, attempt: Callable[[], LeaseRecord | Deferred]) -> LeaseRecord | Deferred:
        """Make one attempt, which is timed, and carry out what follows from it."""
        self._meters.note_time(time.monotonic())
        started = time.perf_counter()
        result = attempt()
        self.stats.lookup_seconds.observe(time.perf_counter() - started)
        if isinstance(result, LeaseRecord):
            self.clock.opened(result)
        self.progress()
        return result

    def close_lease(self, record: LeaseRecord, *, how: Closing, after: object = None) -> None:
        """Give a lease back behind a fence, by the way it ended; whoever waits for it is told."""
        fence = self.fencing.promise_end(record, after)
        self.clock.closed(record)
        now = time.monotonic()
        self._meters.note_time(now)
        if how in (Closing.FINISHED, Closing.PREEMPTED):
            self.core.finish(record, how=how, after=fence)
        else:
            copies = record.waiting | record.storing
            self.core.release(record, how=how, after=fence)
            if how is Closing.CANCELLED:
                self._cleanups.begin(copies, since=now)
        self.notices.closed(record.lease_id)
        self.progress()

    def note_wake(self, record: LeaseRecord) -> None:
        """A coroutine goes on that has awaited the loads of this lease."""
        if record.loaded_at is not None and record.state is LeaseState.READY:
            self.stats.wake_seconds.observe(time.monotonic() - record.loaded_at)

    def collect_leaks(self) -> None:
        """Give back what garbage collected leases and hints held, and say so in a turn of its own."""
        for lease_id in self.leaks.take():
            record = self.core.find_lease(lease_id)
            if record is not None:
                self.close_lease(record, how=Closing.FINALIZER)
                _log.warning("a lease was garbage collected without release(); its blocks were taken back")
                warn_later(self.loop, f"the lease of request {record.request.request_id!r}")
        for hint in self.leaks.take_hints():
            if hint.state is HintState.HELD:
                _log.warning("a residence hint was garbage collected without release(); its blocks were taken back")
                warn_later(self.loop, f"a residence hint of tenant {hint.tenant!r}")
            self.core.hints.release(hint, how=HintClosing.FINALIZER)
            self.progress()

    # Waiting.

    def when_drained(self) -> asyncio.Future[None]:
        """A future of the caller's own that is done when nothing is queued, sliced or running."""
        future = self.loop.create_future()
        self._drained = [*(waiting for waiting in self._drained if not waiting.done()), future]  # who gave up is gone
        self.progress()
        return future

    @property
    def is_quiet(self) -> bool:
        """No polling, no pinning, no submission: a CUDA graph is being captured."""
        return self._quiet > 0

    @property
    def is_idle(self) -> bool:
        """Nothing queued, sliced or running."""
        return not self.core.unfinished_transfers and not self.core.has_work

    # Carrying out.

    def progress(self) -> None:
        """Carry out what the core wants done; what is long goes on in later turns."""
        core = self.core
        if self._fences.promised:
            self.schedule(self.transfers.settle_fences)
        self._empty_outbox()
        if self._events.is_on:
            self._publish()
        if core.has_work:
            self._go_on()
        self._settle_for_meters()
        if core.capacity_generation != self._seen_generation:
            self._note_capacity()
        if self.stats.check_due:
            check_invariants(self.core, self.stats)
        if self._drained and self.is_idle:
            waiting, self._drained = self._drained, []
            for future in waiting:
                if not future.done() and not self.loop.is_closed():
                    future.set_result(None)

    def _settle_for_meters(self) -> None:
        if self._meters.pins_wait and not self.schedule(self._meters.drop_pins):
            self._meters.drop_pins()
        if self._meters.have_returned:
            self._cleanups.end_copies()

    def _go_on(self) -> None:
        """There is sliced work: in the next turn, or now where no turn comes."""
        self.schedule(self._work)
        while self._is_detached and self.core.has_work:
            self.core.run_slices()
            self._empty_outbox()

    def _note_capacity(self) -> None:
        """Capacity was given back: whoever waits for some is tried in the next turn."""
        if self.queue.is_empty and not self.core.has_replans:
            self._seen_generation = self.core.capacity_generation
        else:
            self.schedule(self._serve)

    def schedule(self, step: Callable[[], object]) -> bool:
        """Run `step` in the loop's next turn, once however often it is asked for; False in a loop that has ended."""
        is_turning = not self._is_detached and not self.loop.is_closed()
        if is_turning and step not in self._scheduled:
            self._scheduled[step] = self.loop.call_soon(self._run_scheduled, step, time.monotonic())
        return is_turning

    def serve_soon(self) -> None:
        """Somebody left the queue: its new head may be served."""
        self.schedule(self._serve)

    def subscribe(self, subscription: Subscription) -> None:
        """Publish every event from this moment on to one more subscriber."""
        self.enter()
        self.progress()
        self.publisher.add(subscription)
        self.core.events.is_on = True

    def quiet(self) -> None:
        """Ask no event, admit nobody until `wake` was called as often. `UsageError` once closing: copies must end."""
        self.enter_for_intake()
        self._quiet += 1
        self.bridge.pause()
        self.transfers.pause()

    def wake(self) -> None:
        """Go on where `quiet` stopped."""
        self._quiet = max(self._quiet - 1, 0)  # `stop_intake` may have ended it before
        if not self._quiet:
            self.transfers.resume()
            self.bridge.resume()
            self.schedule(self._serve)
            self.progress()

    # Ending.

    def stop_intake(self) -> None:
        """From now on nobody is let in; whoever waits is told."""
        self._is_open = False
        self._quiet = 0  # a drain inside `quiesce` must see copies end
        self.transfers.resume()
        self.bridge.resume()
        if not self.loop.is_closed():
            self.queue.fail_all(lambda: UsageError("this aiokv runtime is closing"))

    def detach(self) -> None:
        """The loop will not turn any more: stop timers and readers, do what is left inline."""
        self._is_detached = True
        while self._scheduled:
            self._scheduled.popitem()[1].cancel()
        self.clock.stop()
        self.bridge.close()
        self.leaks.close()
        self.publisher.close()
        while self.bridge.poll():
            pass
        self.progress()

    def _empty_outbox(self) -> None:
        outbox = self._outbox
        while outbox.settled or (outbox.submissions and not self._quiet):
            for lease_id in outbox.take_settled():
                self.notices.settled(lease_id)
            if not self._quiet:
                for transfer in outbox.take_submissions():
                    self.transfers.enqueue(transfer)

    def _publish(self) -> None:
        """Hand on the events of this step; record more of them only while somebody listens."""
        events = self.core.events.take()
        for event in events:
            self.stats.events_published[EVENT_KINDS[type(event)]] += 1
        self.stats.events_dropped += self.publisher.publish(events)
        self.core.events.is_on = self.publisher.has_subscribers

    def _run_scheduled(self, step: Callable[[], object], asked_at: float) -> None:
        self._scheduled.pop(step, None)
        self.stats.loop_lag_seconds.observe(time.monotonic() - asked_at)
        step()

    def _work(self) -> None:
        """One slice of pending work."""
        if not self.is_quiet:
            self.core.run_slice()
            self.progress()

    def _serve(self) -> None:
        """One attempt for whoever is first in line; the next one in a later turn."""
        if self.is_quiet:
            return
        self._seen_generation = self.core.capacity_generation
        self.core.retry_replans()
        if self.queue.serve_head():
            self.schedule(self._serve)
        self.progress()
