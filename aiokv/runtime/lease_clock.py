"""How long leases are held, and which of them too long.

Duty: stamp each lease when it is admitted, time it when it is closed, and say which ones are older than the limit: once
each in the log, at most one line in `_REPORT_INTERVAL_S`, and in a count for the metrics.

Rules: one timer for all leases, set for the oldest one that is not overdue yet, or for a line that is to be written. It
wakes the loop at most once in the time of the limit, beside the moments when a lease does become overdue, and never
while every lease is closed, or overdue and reported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import islice
from typing import Final, final

from aiokv.core.audit import AuditClock
from aiokv.core.cache import CacheState
from aiokv.core.lease_table import LeaseRecord
from aiokv.observe.stats import Stats
from aiokv.runtime.timers import Timer

__all__ = ["LeaseClock"]

_log = logging.getLogger(__name__)

_REPORT_INTERVAL_S: Final = 60.0
_AT_ONCE: Final = 1024
"""Leases that one wake-up declares overdue; the others come in the next turn (law 8)."""


@final
class LeaseClock:
    """Knows since when each open lease of one runtime is held. `age_limit_s` None: none is ever overdue."""

    __slots__ = (
        "_age_limit_s",
        "_clock",
        "_core",
        "_next_report_at",
        "_overdue",
        "_stats",
        "_timer",
        "_unreported",
        "_young",
    )

    def __init__(
        self,
        core: CacheState,
        *,
        stats: Stats,
        age_limit_s: float | None,
        make_timer: Callable[[Callable[[], None]], Timer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._clock = clock
        self._stats = stats
        self._age_limit_s = age_limit_s
        self._young: dict[int, float] = {}
        """When each lease that is not overdue was admitted, oldest first; empty without a limit."""
        self._overdue: set[int] = set()
        self._timer = make_timer(self._look)
        self._unreported = 0
        self._next_report_at = 0.0

    def opened(self, record: LeaseRecord) -> None:
        """A lease was admitted now."""
        now = record.opened_at = self._clock()
        self._stats.opened_at[record.lease_id] = now
        if self._age_limit_s is not None:
            self._young[record.lease_id] = now
            if len(self._young) == 1:
                self._set_timer(now)

    def closed(self, record: LeaseRecord) -> None:
        """A lease was closed now. Idempotent."""
        opened = self._stats.opened_at.pop(record.lease_id, None)
        if opened is None:
            return
        self._stats.lease_seconds.observe(self._clock() - opened)
        self._young.pop(record.lease_id, None)
        if record.lease_id in self._overdue:
            self._overdue.remove(record.lease_id)
            self._stats.overdue_leases = len(self._overdue)
        if not self._young and not (self._unreported and self._overdue):
            self.stop()

    def read(self) -> AuditClock:
        """The time now, and the limit, for an audit."""
        return AuditClock(now=self._clock(), lease_age_limit=self._age_limit_s)

    def stop(self) -> None:
        """Wake nobody until another lease is opened. Works on a closed loop."""
        self._timer.cancel()

    def _set_timer(self, now: float) -> None:
        """Wake up when there may be something to do or to say."""
        moments = []
        if self._young and self._age_limit_s is not None:
            moments.append(next(iter(self._young.values())) + self._age_limit_s)
        if self._unreported and self._overdue:
            moments.append(self._next_report_at)
        if moments:
            self._timer.set(max(min(moments) - now, 0.0))

    def _look(self) -> None:
        """The oldest lease may have become overdue."""
        limit = self._age_limit_s
        if limit is None:
            return
        now = self._clock()
        due = [lease_id for lease_id, opened in islice(self._young.items(), _AT_ONCE) if now - opened >= limit]
        for lease_id in due:
            del self._young[lease_id]
        self._overdue.update(due)
        self._stats.overdue_leases = len(self._overdue)
        self._unreported += len(due)
        if self._unreported and self._overdue and now >= self._next_report_at:
            self._report(now)
        self._set_timer(now)

    def _report(self, now: float) -> None:
        self._next_report_at = now + _REPORT_INTERVAL_S
        count, self._unreported = self._unreported, 0
        oldest = self._core.find_lease(min(self._overdue))
        if oldest is not None and oldest.opened_at is not None:
            _log.warning(
                "%d leases have become older than %g s; the oldest one, of request %r, is held for %.1f s",
                count, self._age_limit_s, oldest.request.request_id, now - oldest.opened_at,
            )  # fmt: skip
