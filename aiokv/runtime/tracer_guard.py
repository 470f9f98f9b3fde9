"""A tracer of the host, held at arm's length: every call of it is made here, and none of them raises.

Rules
- opentelemetry is imported when a runtime opens that was given a provider, in a worker thread, and nowhere else.
- Whatever a tracer, its spans or its exporters raise stays here: a span is missing then or incomplete, and the log says
  so, at most once in `_REPORT_INTERVAL_S` (law 7).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import anyio.to_thread

from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

__all__ = ["Attributes", "TracerGuard", "check_tracer_provider", "find_tracer"]

_log = logging.getLogger(__name__)

_GLOBAL: Final = "global"
"""Names the provider that the process has set, as it stands when a runtime opens."""
_REPORT_INTERVAL_S: Final = 60.0

Attributes = Mapping[str, str | int | float]
T = TypeVar("T")


def check_tracer_provider(provider: object) -> None:
    """`ConfigError` for what is neither a provider, nor the name of one, nor None."""
    is_name = isinstance(provider, str) and provider == _GLOBAL
    if provider is not None and not is_name and not callable(getattr(provider, "get_tracer", None)):
        raise ConfigError(f"tracer_provider must be a TracerProvider, {_GLOBAL!r} or None, not {provider!r}")


async def find_tracer(provider: object) -> TracerGuard | None:
    """A tracer of this provider; None where nobody wants spans. `ConfigError` if opentelemetry is missing."""
    return None if provider is None else await anyio.to_thread.run_sync(_find_tracer, provider)


def _find_tracer(provider: Any) -> TracerGuard | None:  # noqa: ANN401  # the host's, of whatever type
    from aiokv import __version__  # not known yet while the package is being imported

    try:
        from opentelemetry import context, trace
    except ImportError as error:
        raise ConfigError("tracer_provider needs opentelemetry: pip install 'aiokv[tracing]'") from error
    found = trace.get_tracer_provider() if isinstance(provider, str) else provider
    if isinstance(found, trace.ProxyTracerProvider):  # the process has set none
        return None
    try:
        tracer = found.get_tracer("aiokv", __version__)
    except Exception as error:
        raise ConfigError(f"tracer_provider gives no tracer: {error!r}") from error
    if isinstance(tracer, trace.NoOpTracer):
        return None
    return TracerGuard(tracer, trace=trace, nowhere=context.Context())


@final
class TracerGuard:
    """Begins, describes and ends spans. A span that could not be begun is None, and so is everything about it."""

    __slots__ = ("_next_report_at", "_trace", "_tracer", "_unreported", "nowhere")

    def __init__(self, tracer: Tracer, *, trace: ModuleType, nowhere: Context) -> None:
        self._tracer = tracer
        self._trace = trace
        self._next_report_at = 0.0
        self._unreported = 0
        self.nowhere = nowhere
        """The place of a span that is below no other."""

    def find_current(self) -> Context:
        """The place below the caller's current span."""
        return self.find_place(self._safely(self._trace.get_current_span))

    def find_place(self, span: Span | None) -> Context:
        """The place below a span, which is itself not kept alive."""
        place = None if span is None else self._safely(lambda: self._below(span))
        return self.nowhere if place is None else place

    def start(
        self, name: str, attributes: Attributes, *, place: Context | None = None, since_ns: int | None = None
    ) -> Span | None:
        """Begin a span, now or as of some time before. Without a place it is below the caller's current one."""
        said = dict(attributes)
        return self._safely(lambda: self._tracer.start_span(name, context=place, attributes=said, start_time=since_ns))

    def describe(self, span: Span | None, attributes: Attributes) -> None:
        """Say more of a span."""
        if span is not None:
            self._safely(lambda: span.set_attributes(dict(attributes)))

    def note(self, span: Span | None, event: str, **attributes: str | int | float) -> None:
        """Something happens within a span."""
        if span is not None:
            said = {f"aiokv.{name}": value for name, value in attributes.items()}
            self._safely(lambda: span.add_event(event, said))

    def link(self, span: Span | None, place: Context) -> None:
        """A span has to do with the one that this place is below."""
        if span is not None:
            self._safely(lambda: span.add_link(self._trace.get_current_span(place).get_span_context()))

    def fail(self, span: Span | None) -> None:
        """What a span is around has not gone well."""
        if span is not None:
            self._safely(lambda: span.set_status(self._trace.StatusCode.ERROR))

    def end(self, span: Span | None, *, at_ns: int | None = None) -> None:
        """End a span, now or as of some time before."""
        if span is not None:
            self._safely(lambda: span.end(end_time=at_ns))

    def _below(self, span: Span) -> Context:
        context = span.get_span_context()
        if not context.is_valid:
            return self.nowhere
        place: Context = self._trace.set_span_in_context(self._trace.NonRecordingSpan(context), self.nowhere)
        return place

    def _safely(self, call: Callable[[], T]) -> T | None:
        """What the tracer answers; None if it raises. `call` also looks its methods up: a proxy may raise at that."""
        try:
            return call()
        except Exception as error:  # it is the host's, and serves nobody
            self._unreported += 1
            now = time.monotonic()
            if now >= self._next_report_at:
                self._next_report_at = now + _REPORT_INTERVAL_S
                count, self._unreported = self._unreported, 0
                _log.warning("the tracer has failed %d times, spans are missing or incomplete: %r", count, error)
            return None
