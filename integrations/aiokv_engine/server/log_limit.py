"""What the server says in its log: repeated lines seldom, and of a fault its kind only.

Whoever can reach the port can make every line here come as often as they like; and an error's text, or its traceback,
may hold what a client has sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

__all__ = ["PERIOD_S", "LogLimit", "limited_logs"]

PERIOD_S: Final = 10.0
"""A line comes at most once in so many seconds."""
_LOGGERS: Final = (
    "uvicorn.error",
    "aiokv_engine.server.app",
    "aiokv_engine.server.choices",
    "aiokv_engine.server.exchange",
)


@dataclass(slots=True, kw_only=True)
class _Line:
    """When it may come again, and how often it could not come."""

    due: float
    dropped: int = 0


@final
class LogLimit(logging.Filter):
    """The first of the same lines comes at once; the next says how many did not come meanwhile."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lines: dict[str, _Line] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line comes now; changes what it says."""
        text = _describe(record)
        now = self._clock()
        line = self._lines.setdefault(text, _Line(due=now))
        if now < line.due:
            line.dropped += 1
            return False
        record.msg = f"{text} (and {line.dropped} more like it)" if line.dropped else text
        record.args = record.exc_info = record.exc_text = None
        line.due, line.dropped = now + PERIOD_S, 0
        return True


def _describe(record: logging.LogRecord) -> str:
    """Returns what `record` says: an error in it by its type, so that there are few different lines."""
    text = record.getMessage().strip()
    kind = record.exc_info[0] if record.exc_info else None
    return text if kind is None else f"{text}: {kind.__name__}"


@contextmanager
def limited_logs() -> Iterator[None]:
    """Limits what the server and uvicorn say inside."""
    limit = LogLimit()
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(limit)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(limit)
