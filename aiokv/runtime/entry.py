"""The way in: a request whose tokens are hashed waits in line, is granted, waits for its loads.

Rules
- Whatever ends the wait (a cancellation, a timeout, an error), everything is given back by a plain call before the
  exception goes on (law 4); a grant that came in the same turn is found in the future and given back too.
- A coroutine that is closed instead (by hand, or by the collector after its loop has died) gives nothing back itself:
  the finaliser of its lease leaves word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, final

from aiokv.core.counters import Closing
from aiokv.core.lease_table import AcquireRequest, LeaseRecord
from aiokv.errors import AcquireTimeout
from aiokv.model.plan import Deferred
from aiokv.observe.stats import CancelStage
from aiokv.runtime.deadline import Deadline
from aiokv.runtime.offload import Offloader
from aiokv.runtime.tracing import NOT_TRACED, RequestSpan
from aiokv.runtime.waiting import Rank, stand_in_line

if TYPE_CHECKING:
    from aiokv.runtime.lease import Lease

__all__ = ["AcquireCall", "Entry"]


@final
class Entry:
    """Lets requests into one runtime; `make_lease` is the class of what they get, which itself knows this module."""

    __slots__ = ("_make_lease", "_offloader", "_span")

    def __init__(self, offloader: Offloader, *, make_lease: Callable[[Offloader, LeaseRecord], Lease]) -> None:
        self._offloader = offloader
        self._make_lease = make_lease
        self._span: RequestSpan | None = None

    def traced(self, request_id: str) -> AbstractContextManager[object]:
        """Around all of an admission, its hashing included: its span, where there are spans."""
        tracing = self._offloader.tracing
        if tracing is None:
            return NOT_TRACED
        self._span = tracing.begin(request_id)
        return self._span

    def try_now(self, request: AcquireRequest) -> Lease | Deferred:
        """Admit at once, unless somebody waits who comes first."""
        return self.try_in_turn(request, partial(self._offloader.try_admit, request))

    def try_in_turn(self, request: AcquireRequest, attempt: Callable[[], LeaseRecord | Deferred]) -> Lease | Deferred:
        """Make this attempt at admitting `request`, unless somebody waits who comes first."""
        offloader = self._offloader
        offloader.core.check(request)
        if offloader.is_quiet or offloader.queue.blocks(rank=Rank.ADMISSION, priority=request.priority):
            return offloader.core.defer_queued()
        return self._wrapped(attempt)

    async def admit(self, request: AcquireRequest, *, deadline: Deadline) -> Lease:
        """Wait in line, be granted: the lease is pinned and reserved, its loads are running."""
        self._offloader.enter_for_intake()
        granted = self.try_now(request)
        if not isinstance(granted, Deferred):
            return granted
        if self._span is not None:
            self._span.waits(granted, prompt_tokens=request.prompt_tokens)
        try:
            return await stand_in_line(
                self._offloader.queue,
                partial(self._wrapped, partial(self._offloader.try_admit, request)),
                future=self._offloader.loop.create_future(),
                deadline=deadline,
                rank=Rank.ADMISSION,
                priority=request.priority,
                give_back=_cancel,
                on_leave=self._offloader.serve_soon,
            )
        except BaseException as error:
            self.count_cancellation(error, stage=CancelStage.QUEUED)
            raise

    async def acquire(self, request: AcquireRequest, *, deadline: Deadline) -> Lease:
        """`admit`, then wait until the loads have ended."""
        lease = await self.admit(request, deadline=deadline)
        try:
            await lease.wait_ready(deadline)
        except GeneratorExit:
            raise
        except BaseException as error:
            self.count_cancellation(error, stage=CancelStage.INFLIGHT)
            lease.close(Closing.CANCELLED)
            raise
        return lease

    def count_cancellation(self, error: BaseException, *, stage: CancelStage) -> None:
        """A wait has ended so; what is no cancellation and no timeout is not counted."""
        if isinstance(error, asyncio.CancelledError | AcquireTimeout):
            self._offloader.stats.cancellations[stage] += 1

    def _wrapped(self, attempt: Callable[[], LeaseRecord | Deferred]) -> Lease | Deferred:
        tracing = self._offloader.tracing
        result = attempt() if tracing is None else tracing.attempt(attempt, request=self._span)
        return result if isinstance(result, Deferred) else self._make_lease(self._offloader, result)


@final
class AcquireCall(Coroutine[Any, Any, "Lease"]):
    """What `acquire`, `admit` and `resume` return: a coroutine to be awaited or scheduled, and a context manager.

    As a context manager it finishes the lease on a clean exit and releases it on an exception.
    """

    __slots__ = ("_coroutine", "_lease")

    def __init__(self, coroutine: Coroutine[Any, Any, Lease]) -> None:
        self._coroutine = coroutine
        self._lease: Lease | None = None

    def send(self, value: object) -> object:
        """See `collections.abc.Coroutine`."""
        return self._coroutine.send(value)

    def throw(self, *args: Any) -> object:  # noqa: ANN401  # the three forms that coroutines take
        """See `collections.abc.Coroutine`."""
        return self._coroutine.throw(*args)

    def close(self) -> None:
        """See `collections.abc.Coroutine`."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Lease]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> Lease:
        self._lease = await self._coroutine
        return self._lease

    async def __aexit__(self, *exc_info: object) -> None:
        lease, self._lease = self._lease, None
        if lease is None:
            return
        _, error, _ = exc_info
        if error is None:
            lease.finish()
        elif isinstance(error, GeneratorExit):
            lease.abandon()
        else:
            lease.close(Closing.CANCELLED if isinstance(error, asyncio.CancelledError) else Closing.RELEASED)


def _cancel(lease: Lease) -> None:
    lease.close(Closing.CANCELLED)
