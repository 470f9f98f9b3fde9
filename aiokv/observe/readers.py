"""What each metric family reads, at scrape time, from the counts of one runtime.

Rules
- A reader only reads, and only what the loop's thread replaces in one step: integers, and dictionaries whose keys never
  change. It takes no lock and calls nothing that waits.
- The values of labels are members of closed enums, never names, ids or tokens.
- What belongs to a tier that is not configured has no reading at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar, final

from aiokv.core.cache import CacheState
from aiokv.model.ids import Direction, Tier
from aiokv.model.pinning import NOT_NEEDED, PinState, PinStatus
from aiokv.observe.ledger import Ledger
from aiokv.observe.stats import Degradation, Histogram, Invariant, Stats

__all__ = [
    "Buckets",
    "Reading",
    "RuntimeFacts",
    "ScrapeFaults",
    "View",
    "read_accounting_errors",
    "read_build_info",
    "read_degraded",
    "read_event_queue",
    "read_events_dropped",
    "read_events_published",
    "read_events_rejected",
    "read_steadily",
    "take",
]

T = TypeVar("T")

_READ_TRIES: Final = 5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeFacts:
    """What does not change while a runtime lives."""

    version: str
    backend: str
    slot_bytes: Mapping[Tier, int] = field(default_factory=dict)
    """Bytes behind one slot; absent or 0 where the backend has no memory of its own."""
    read_pinning: Callable[[], PinStatus] = lambda: NOT_NEEDED
    """How the CPU arena stands with the device, at the moment; any thread may ask."""
    read_accepting: Callable[[], bool] = lambda: True
    """Whether requests are let in, at the moment; any thread may ask."""
    read_waiting: Callable[[], int] = lambda: 0
    """How many requests wait in line for capacity; any thread may ask."""
    bridge: str = "poll"
    """How the runtime learns that copies have ended."""
    read_event_queue: Callable[[], int] = lambda: 0
    """How many cache events the slowest subscriber has not taken, at the moment; any thread may ask."""


@final
class ScrapeFaults:
    """What scrapes found wrong; written by the threads that scrape."""

    __slots__ = ("ledger", "unreadable")

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.unreadable = 0


@final
@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram at one moment: `counts[i]` observations up to `bounds[i]`, not cumulative, the last above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """One series: the values of the family's labels in their order, and the value."""

    labels: tuple[str, ...]
    value: float | Buckets


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One runtime as a scrape sees it."""

    core: CacheState
    stats: Stats
    facts: RuntimeFacts
    capacities: Mapping[Tier, int]
    """Usable slots of every configured tier."""
    faults: ScrapeFaults
    now: float

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Which way blocks can be copied; without a CPU tier, none."""
        return tuple(Direction) if Tier.CPU in self.capacities else ()


def read_accounting_errors(view: View) -> Iterable[Reading]:
    """What the loop's thread found, and what the scrapes found."""
    found = dict(view.stats.violations)
    found[Invariant.COUNTER] += view.faults.ledger.falls
    found[Invariant.METRICS] += view.faults.unreadable
    for invariant, count in found.items():
        yield Reading((invariant.value,), count)


def read_degraded(view: View) -> Iterable[Reading]:
    """1 where a runtime serves less well than it was built to."""
    yield Reading((Degradation.BACKEND_LOST.value,), int(view.core.is_backend_lost))
    yield Reading((Degradation.UNPINNED.value,), int(view.facts.read_pinning().state is PinState.UNPINNED))


def read_events_published(view: View) -> Iterable[Reading]:
    """Cache events handed to subscribers, each counted once."""
    for kind, events in view.stats.events_published.items():
        yield Reading((kind.value,), events)


def read_events_dropped(view: View) -> Iterable[Reading]:
    """Cache events that slow subscribers missed."""
    yield Reading((), view.stats.events_dropped)


def read_events_rejected(view: View) -> Iterable[Reading]:
    """What no event could be made of."""
    for reason, blocks in view.core.counters.events_refused.items():
        yield Reading((reason.value,), blocks)


def read_event_queue(view: View) -> Iterable[Reading]:
    """How far the slowest subscriber is behind."""
    yield Reading((), view.facts.read_event_queue())


def read_build_info(view: View) -> Iterable[Reading]:
    """What never changes, as labels."""
    tokens = str(view.core.geometry.hash_block_size)
    yield Reading((view.facts.version, view.facts.backend, tokens), 1)


def take(histogram: Histogram) -> Buckets:
    """A histogram as it is now."""
    return Buckets(histogram.bounds, tuple(histogram.counts), histogram.total)


def read_steadily(read: Callable[[], tuple[T, ...]]) -> tuple[T, ...]:
    """What `read` answers; nothing if the loop's thread changes it under the reader again and again."""
    for _ in range(_READ_TRIES):
        try:
            return read()
        except (RuntimeError, KeyError):  # a dictionary changed between two looks at it, or a lease went
            continue
    return ()
