"""What the runtime counts and times: plain integers and fixed-bucket histograms, written by the loop's thread alone.

Recording costs tens of nanoseconds; the collector in `aiokv.observe.metrics` reads everything at scrape time, from any
thread. The one thing a scrape writes here is the flag `check_due`.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from typing import Final, final

from aiokv.model.events import BlockRemoved, BlockStored, CacheEvent, TierCleared
from aiokv.model.ids import Direction, KeyEnum

__all__ = [
    "EVENT_KINDS",
    "LEASE_BUCKETS",
    "STEP_BUCKETS",
    "TRANSFER_BUCKETS",
    "WAKE_BUCKETS",
    "CancelStage",
    "Degradation",
    "EventKind",
    "Histogram",
    "Invariant",
    "LeaseTerm",
    "Polls",
    "Stats",
]

TRANSFER_BUCKETS: Final = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Seconds: from one small block to a whole long prompt."""
LEASE_BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Seconds a request holds its blocks."""
STEP_BUCKETS: Final = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 2e-3, 3e-3, 1e-2, 0.1, 1.0)
"""Seconds of one synchronous step; none should take more than 2 ms (law 8)."""
WAKE_BUCKETS: Final = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 5e-3, 1e-2, 3e-2, 0.1, 1.0)
"""Seconds until somebody goes on. From 5 ms on the alert calls it slow: without that bound it would guess."""


class Polls(KeyEnum):
    """What one tick of the bridge found."""

    EMPTY = "empty"
    PROGRESS = "progress"


class CancelStage(Enum):
    """What a request was waiting for when it was cancelled or timed out."""

    LOOKUP = "lookup"
    """Its prompt was being hashed and looked up."""
    QUEUED = "queued"
    INFLIGHT = "inflight"


class EventKind(KeyEnum):
    """Kinds of cache events."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


EVENT_KINDS: Final[dict[type[CacheEvent], EventKind]] = {
    BlockStored: EventKind.STORED,
    BlockRemoved: EventKind.REMOVED,
    TierCleared: EventKind.CLEARED,
}


class Degradation(Enum):
    """Why a runtime serves less well than it was built to."""

    BACKEND_LOST = "backend_lost"
    """No copy can be made any more: there is no CPU tier."""
    UNPINNED = "unpinned"
    """The CPU arena could not be registered with the device: copies are slower."""


class Invariant(Enum):
    """What must hold of the counts at any time. Each is a metric label."""

    COUNTER = "counter"
    """A counter never falls."""
    IDLE = "idle"
    """Without leases and transfers nothing is reserved."""
    LEASES = "leases"
    """Opened less closed is what is live."""
    METRICS = "metrics"
    """Reading the counts raises nothing."""
    POOLS = "pools"
    """The states of a pool sum to its capacity, and none is negative."""
    TRANSFERS = "transfers"
    """What was submitted has ended or is in flight."""


class LeaseTerm(Enum):
    """Whether a lease is held for as long as it may be."""

    ACTIVE = "active"
    OVERDUE = "overdue"
    """For longer than `lease_age_limit_s`."""


@final
class Histogram:
    """Counts by upper bound in seconds, and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Observations per bucket, not cumulative; the last one is above every bound."""
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@final
class Stats:
    """Everything a runtime counts beside the core's own counters."""

    __slots__ = (
        "cancellations",
        "check_due",
        "cleanup_seconds",
        "events_dropped",
        "events_published",
        "lease_seconds",
        "lookup_seconds",
        "loop_lag_seconds",
        "opened_at",
        "overdue_leases",
        "polls",
        "queue_wait_seconds",
        "queued_blocks",
        "transfer_bytes",
        "transfer_seconds",
        "violations",
        "wake_seconds",
    )

    def __init__(self) -> None:
        self.transfer_bytes = dict.fromkeys(Direction, 0)
        """Bytes of transfers that ended well."""
        self.transfer_seconds = {direction: Histogram(TRANSFER_BUCKETS) for direction in Direction}
        """From submission until the completion was seen."""
        self.queue_wait_seconds = {direction: Histogram(TRANSFER_BUCKETS) for direction in Direction}
        """From the moment a transfer could run until it was submitted."""
        self.queued_blocks = dict.fromkeys(Direction, 0)
        """Blocks that wait for their stream now; those nobody wants any more count until it is their turn."""
        self.lookup_seconds = Histogram(STEP_BUCKETS)
        """One admission attempt: lookup, plan, pin."""
        self.wake_seconds = Histogram(WAKE_BUCKETS)
        """From the end of a request's last load, as the bridge knows it, until the coroutine that awaits it goes on."""
        self.loop_lag_seconds = Histogram(WAKE_BUCKETS)
        """How late the loop ran what it was asked to run in its next turn, or at a time. Measured by the work that
        there is anyway: an idle loop is woken by nobody."""
        self.cleanup_seconds = Histogram(TRANSFER_BUCKETS)
        """From a cancellation until the request's pins, and those of its copies, were back."""
        self.lease_seconds = Histogram(LEASE_BUCKETS)
        """From admission until everything was given back."""
        self.opened_at: dict[int, float] = {}
        """When each open lease was admitted, oldest first, in seconds of the monotonic clock."""
        self.overdue_leases = 0
        """Open leases that are older than the configured limit."""
        self.polls = dict.fromkeys(Polls, 0)
        self.cancellations = dict.fromkeys(CancelStage, 0)
        self.events_published = dict.fromkeys(EventKind, 0)
        self.events_dropped = 0
        self.check_due = False
        """A scrape asks the loop's thread to look at the invariants, between two steps of its own."""
        self.violations = dict.fromkeys(Invariant, 0)
