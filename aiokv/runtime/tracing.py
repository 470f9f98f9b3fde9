"""Spans of OpenTelemetry around admissions and copies, where the host asks for them: `RuntimeConfig(tracer_provider=)`.

`aiokv.acquire` is below the caller's span and lasts until the loads have ended; for `admit`, until the request is let
in. `aiokv.load` and `aiokv.store` are one transfer each, from submission to the last report: below the admission that
they are made for, and linked to those of the other requests that wait for it.

Rules
- Every span is ended once: by the end of what it is around, else by `close`.
- A coroutine that is closed, by the collector perhaps, calls no tracer: it leaves word, and the loop ends its span with
  the next one (law 4).
- Spans hold ids of requests, counts and outcomes; no tokens, no hashes, no salts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Self, final

from aiokv.core.inflight import Transfer, TransferState
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.errors import AcquireTimeout
from aiokv.model.ids import Direction
from aiokv.model.plan import Deferred
from aiokv.runtime.tracer_guard import TracerGuard

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

__all__ = ["NOT_TRACED", "RequestSpan", "Tracing"]

_REMEMBERED: Final = 4096
"""Leases whose place later transfers still find: a store may begin after its lease has ended."""
_MOST_LINKS: Final = 32
_OUTCOMES: Final = {TransferState.DONE: "ok", TransferState.FAILED: "error", TransferState.QUARANTINED: "lost"}


@final
class Tracing:
    """Makes the spans of one runtime, in its loop's thread."""

    __slots__ = ("_attempting", "_left", "_places", "_requests", "_tracer", "_transfers")

    def __init__(self, tracer: TracerGuard) -> None:
        self._tracer = tracer
        self._requests: set[RequestSpan] = set()
        self._transfers: dict[int, Span] = {}
        self._places: dict[int, Context] = {}
        """By lease, where its transfers belong; the newest ones."""
        self._attempting: Context | None = None
        """The same for the request that is being admitted, whose lease nobody knows yet."""
        self._left: deque[tuple[RequestSpan, int]] = deque()

    def begin(self, request_id: str) -> RequestSpan:
        """A span for one request on its way in."""
        self._end_left()
        span = self._tracer.start("aiokv.acquire", {"aiokv.request_id": request_id})
        request = RequestSpan(self, self._tracer, span=span)
        self._requests.add(request)
        return request

    def attempt(
        self, attempt: Callable[[], LeaseRecord | Deferred], *, request: RequestSpan | None
    ) -> LeaseRecord | Deferred:
        """Make one attempt at admission; what it submits belongs to the request, or to the caller's own span.

        Without a request there is a span of the attempt itself if it succeeds: who polls is not traced at each look.
        """
        since_ns = time.time_ns()
        if request is not None and not request.is_open:  # who polls now has awaited before
            request = None
        place = request.place if request is not None else self._tracer.find_current()
        self._attempting = place
        try:
            result = attempt()
        finally:
            self._attempting = None
        if isinstance(result, Deferred):
            if request is not None:
                request.deferred(result)
            return result
        if request is not None:
            request.granted(result)
        else:
            place = self._note_grant(result, place=place, since_ns=since_ns)
        self._remember(result, place)
        return result

    def submitted(self, transfer: Transfer, *, num_bytes: int, queued_s: float) -> None:
        """The backend is about to take a transfer."""
        self._end_left()
        place = self._places.get(transfer.owner)
        if place is None and transfer.direction is Direction.LOAD:
            place = self._attempting
        name = f"aiokv.{transfer.direction.value}"
        attributes = {"aiokv.blocks": len(transfer), "aiokv.bytes": num_bytes, "aiokv.queued_s": queued_s}
        span = self._tracer.start(name, attributes, place=self._tracer.nowhere if place is None else place)
        if span is not None:
            self._transfers[transfer.transfer_id] = span

    def ended(self, transfer: Transfer) -> None:
        """A transfer has ended; one that has no span is no matter."""
        span = self._transfers.pop(transfer.transfer_id, None)
        if span is None:
            return
        others = sorted(transfer.waiters - {transfer.owner})
        for place in filter(None, map(self._places.get, others[:_MOST_LINKS])):
            self._tracer.link(span, place)
        self._end_transfer(span, outcome=_OUTCOMES.get(transfer.state, transfer.state.value))

    def leave(self, request: RequestSpan) -> None:
        """Its coroutine is being closed: it is ended later, as of now."""
        self._left.append((request, time.time_ns()))

    def forget(self, request: RequestSpan) -> None:
        """It has been ended."""
        self._requests.discard(request)

    def close(self) -> None:
        """The runtime has ended, and so have all spans: those of stuck copies and of dead coroutines as well."""
        self._end_left()
        for request in tuple(self._requests):
            request.end("closed")
        while self._transfers:
            self._end_transfer(self._transfers.popitem()[1], outcome="lost")
        self._places.clear()

    def _note_grant(self, record: LeaseRecord, *, place: Context, since_ns: int) -> Context:
        """The span of an attempt that nobody awaits; returns where transfers belong from now on."""
        attributes = {"aiokv.request_id": record.request.request_id, "aiokv.outcome": "granted", **_describe(record)}
        span = self._tracer.start("aiokv.acquire", attributes, place=place, since_ns=since_ns)
        self._tracer.end(span)
        return place if span is None else self._tracer.find_place(span)

    def _remember(self, record: LeaseRecord, place: Context) -> None:
        self._places[record.lease_id] = place
        if len(self._places) > _REMEMBERED:
            del self._places[next(iter(self._places))]

    def _end_transfer(self, span: Span, *, outcome: str) -> None:
        self._tracer.describe(span, {"aiokv.outcome": outcome})
        if outcome != "ok":
            self._tracer.fail(span)
        self._tracer.end(span)

    def _end_left(self) -> None:
        while self._left:
            request, at_ns = self._left.popleft()
            request.end("closed", at_ns=at_ns)


@final
class RequestSpan:
    """The span of one request, from its call to its answer: a context manager around both."""

    __slots__ = ("_reason", "_record", "_span", "_tracer", "_tracing", "is_open", "place")

    def __init__(self, tracing: Tracing, tracer: TracerGuard, *, span: Span | None) -> None:
        self._tracing = tracing
        self._tracer = tracer
        self._span = span
        self._reason: str | None = None
        self._record: LeaseRecord | None = None
        self.place = tracer.find_place(span)
        self.is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        _, error, _ = exc_info
        if isinstance(error, GeneratorExit):
            self._tracing.leave(self)
        elif isinstance(error, BaseException):
            self.end(_name_outcome(error), error=error)
        else:
            is_ready = self._record is not None and self._record.state is LeaseState.READY
            self.end("ready" if is_ready else "granted")

    def waits(self, deferred: Deferred, *, prompt_tokens: int) -> None:
        """It could not be let in at once, and stands in line from now on."""
        self._tracer.describe(self._span, {"aiokv.prompt_tokens": prompt_tokens})
        self.deferred(deferred)

    def deferred(self, deferred: Deferred) -> None:
        """There is no room for it yet; noted again only for another reason."""
        reason = deferred.reason.value
        if reason != self._reason:
            self._reason = reason
            self._tracer.note(self._span, "deferred", reason=reason)

    def granted(self, record: LeaseRecord) -> None:
        """It is let in; its loads go on."""
        self._record = record
        self._tracer.note(self._span, "granted", cpu_tokens=record.hit.cpu_tokens)

    def end(self, outcome: str, *, error: BaseException | None = None, at_ns: int | None = None) -> None:
        """End it, as of some time before perhaps. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        self._tracing.forget(self)
        attributes = {"aiokv.outcome": outcome, **(_describe(self._record) if self._record is not None else {})}
        if error is not None:
            attributes["error.type"] = type(error).__name__
        self._tracer.describe(self._span, attributes)
        if outcome in ("timeout", "error"):
            self._tracer.fail(self._span)
        self._tracer.end(self._span, at_ns=at_ns)


@final
class _NotTraced:
    """Stands for the span of a request that has none."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc_info: object) -> None:
        return None


NOT_TRACED: Final = _NotTraced()


def _name_outcome(error: BaseException) -> str:
    if isinstance(error, AcquireTimeout):
        return "timeout"
    return "error" if isinstance(error, Exception) else "cancelled"


def _describe(record: LeaseRecord) -> dict[str, str | int | float]:
    """Where the tokens of an admitted prompt come from: as delivered where that is known, else as promised."""
    hit = record.delivered if record.state is LeaseState.READY else record.hit
    return {
        "aiokv.prompt_tokens": hit.prompt_tokens,
        "aiokv.gpu_tokens": hit.gpu_tokens,
        "aiokv.cpu_tokens": hit.cpu_tokens,
        "aiokv.compute_tokens": hit.compute_tokens,
    }
