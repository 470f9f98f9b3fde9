"""How long leases are held, and which of them too long.

Duty: stamp each lease when it is admitted, time it when it is closed, and say which ones are older than the limit: once
each in the log, at most one line in `_REPORT_INTERVAL_S`, and in a count for the metrics.

Rules: one timer for all leases, set for the oldest one that is not overdue yet. It wakes the loop at most once in the
time of the limit, or when a lease does become overdue, and never while every lease is closed or overdue already.
"""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import islice
from typing import Final, final

from aiokv.core.cache import CacheState
from aiokv.core.holder_audit import AuditClock
from aiokv.core.lease_table import LeaseRecord
from aiokv.observe.stats import Stats

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
        "_core",
        "_loop",
        "_next_report_at",
        "_overdue",
        "_stats",
        "_timer",
        "_unreported",
        "_young",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, core: CacheState, stats: Stats, age_limit_s: float | None
    ) -> None:
        self._loop = loop
        self._core = core
        self._stats = stats
        self._age_limit_s = age_limit_s
        self._young: dict[int, float] = {}
        """When each lease that is not overdue was admitted, oldest first; empty without a limit."""
        self._overdue: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._unreported = 0
        self._next_report_at = 0.0

    def opened(self, record: LeaseRecord) -> None:
        """A lease was admitted now."""
        now = record.opened_at = time.monotonic()
        self._stats.opened_at[record.lease_id] = now
        if self._age_limit_s is not None:
            self._young[record.lease_id] = now
            if self._timer is None:
                self._set_timer(self._age_limit_s)

    def closed(self, record: LeaseRecord) -> None:
        """A lease was closed now. Idempotent."""
        opened = self._stats.opened_at.pop(record.lease_id, None)
        if opened is None:
            return
        self._stats.lease_seconds.observe(time.monotonic() - opened)
        self._young.pop(record.lease_id, None)
        if record.lease_id in self._overdue:
            self._overdue.remove(record.lease_id)
            self._stats.overdue_leases = len(self._overdue)
        if not self._young:
            self.stop()

    def read(self) -> AuditClock:
        """The time now, and the limit, for an audit."""
        return AuditClock(now=time.monotonic(), lease_age_limit=self._age_limit_s)

    def stop(self) -> None:
        """Wake nobody until another lease is opened. Works on a closed loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, delay_s: float) -> None:
        if not self._loop.is_closed():
            self._timer = self._loop.call_later(max(delay_s, 0.0), self._look)

    def _look(self) -> None:
        """The oldest lease may have become overdue."""
        self._timer = None
        limit = self._age_limit_s
        if limit is None:
            return
        now = time.monotonic()
        due = [lease_id for lease_id, opened in islice(self._young.items(), _AT_ONCE) if now - opened >= limit]
        for lease_id in due:
            del self._young[lease_id]
        self._overdue.update(due)
        self._stats.overdue_leases = len(self._overdue)
        self._unreported += len(due)
        if due and now >= self._next_report_at:
            self._report(now)
        if self._young:
            self._set_timer(next(iter(self._young.values())) + limit - now)

    def _report(self, now: float) -> None:
        self._next_report_at = now + _REPORT_INTERVAL_S
        count, self._unreported = self._unreported, 0
        oldest = self._core.find_lease(min(self._overdue))
        if oldest is not None and oldest.opened_at is not None:
            _log.warning(
                "%d leases have become older than %g s; the oldest one, of request %r, is held for %.1f s",
                count, self._age_limit_s, oldest.request.request_id, now - oldest.opened_at,
            )  # fmt: skip
