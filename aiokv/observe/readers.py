"""What each metric family reads, at scrape time, from the counts of one runtime.

Rules
- A reader only reads, and only what the loop's thread replaces in one step: integers, and dictionaries whose keys never
  change. It takes no lock and calls nothing that waits.
- The values of labels are members of closed enums, never names, ids or tokens.
- What belongs to a tier that is not configured has no reading at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, final

from aiokv.core.cache import CacheState
from aiokv.core.counters import Source
from aiokv.model.ids import Direction, Tier
from aiokv.model.pinning import NOT_NEEDED, PinState, PinStatus
from aiokv.observe.checks import COPY_ENDS, count_in_flight
from aiokv.observe.ledger import Ledger
from aiokv.observe.stats import Degradation, Histogram, Invariant, Stats

__all__ = ["Buckets", "Reading", "RuntimeFacts", "ScrapeFaults", "View"]

RUN_BOUNDS: Final = (0, 1, 2, 4, 8, 16, 32, 63)
"""Upper bounds in switches; the core counts 64 and more as 64."""
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


# Requests.


def read_prompt_tokens(view: View) -> Iterable[Reading]:
    """Written once per request, by source (law 7)."""
    for (source, phase), tokens in view.core.counters.prompt_tokens.items():
        if source is not Source.CPU or Tier.CPU in view.capacities:
            yield Reading((source.value, phase.value), tokens)


def read_lookups(view: View) -> Iterable[Reading]:
    """Every admission attempt that looked at the indexes."""
    for result, count in view.core.counters.lookups.items():
        yield Reading((result.value,), count)


def read_lookup_duration(view: View) -> Iterable[Reading]:
    """The loop's time in one attempt."""
    yield Reading((), _take(view.stats.lookup_seconds))


def read_interleaved_runs(view: View) -> Iterable[Reading]:
    """Switches between the tiers, one observation per admitted request."""
    if Tier.CPU not in view.capacities:
        return
    counts = [0] * (len(RUN_BOUNDS) + 1)
    total = 0
    for switches, requests in view.core.counters.interleaved_runs.items():
        counts[bisect_left(RUN_BOUNDS, switches)] += requests
        total += switches * requests
    yield Reading((), Buckets(RUN_BOUNDS, tuple(counts), total))


def read_load_failed_tokens(view: View) -> Iterable[Reading]:
    """Only the CPU tier can promise and fail."""
    if Tier.CPU in view.capacities:
        yield Reading((Source.CPU.value,), view.core.counters.load_failed_tokens)


def read_truncated_tokens(view: View) -> Iterable[Reading]:
    """Written, then given up."""
    yield Reading((), view.core.counters.truncated_tokens)


def read_cancellations(view: View) -> Iterable[Reading]:
    """Cancelled and timed out requests, by what they waited for."""
    for stage, count in view.stats.cancellations.items():
        yield Reading((stage.value,), count)


# Transfers.


def read_transfer_bytes(view: View) -> Iterable[Reading]:
    """Bytes that arrived."""
    for direction in view.directions:
        yield Reading((direction.value,), view.stats.transfer_bytes[direction])


def read_transfer_blocks(view: View) -> Iterable[Reading]:
    """Blocks whose copy has ended."""
    for direction in view.directions:
        for outcome in COPY_ENDS:
            blocks = view.core.counters.transferred_blocks[direction, outcome]
            yield Reading((direction.value, outcome.value), blocks)


def read_submitted_blocks(view: View) -> Iterable[Reading]:
    """Blocks handed to the backend."""
    for direction in view.directions:
        yield Reading((direction.value,), view.core.counters.submitted_blocks[direction])


def read_transfer_duration(view: View) -> Iterable[Reading]:
    """Submission to completion seen."""
    for direction in view.directions:
        yield Reading((direction.value,), _take(view.stats.transfer_seconds[direction]))


def read_queue_wait(view: View) -> Iterable[Reading]:
    """Ready to submitted."""
    for direction in view.directions:
        yield Reading((direction.value,), _take(view.stats.queue_wait_seconds[direction]))


def read_queue_blocks(view: View) -> Iterable[Reading]:
    """Waiting for room in their stream."""
    for direction in view.directions:
        yield Reading((direction.value,), view.stats.queued_blocks[direction])


def read_inflight_blocks(view: View) -> Iterable[Reading]:
    """Submitted and not ended."""
    for direction in view.directions:
        yield Reading((direction.value,), count_in_flight(view.core.counters, direction))


def read_rank_reports(view: View) -> Iterable[Reading]:
    """Once per rank and transfer."""
    if view.directions:
        for outcome, reports in view.core.counters.rank_reports.items():
            yield Reading((outcome.value,), reports)


def read_partly_reported(view: View) -> Iterable[Reading]:
    """Waiting for the slower ranks."""
    if view.directions:
        yield Reading((), view.core.partly_reported)


def read_bridge_polls(view: View) -> Iterable[Reading]:
    """Looks at device events."""
    for result, polls in view.stats.polls.items():
        yield Reading((result.value,), polls)


# Pools.


def read_pool_blocks(view: View) -> Iterable[Reading]:
    """What is neither free, resident nor quarantined is reserved: read so, the states always sum to the capacity."""
    pools = view.core.peek.pools()
    for tier, capacity in view.capacities.items():
        states = pools[tier].by_state()
        states["reserved"] = capacity - states["free"] - states["resident"] - states["quarantined"]
        for state, blocks in states.items():
            yield Reading((tier.value, state), blocks)


def read_pool_capacity(view: View) -> Iterable[Reading]:
    """Usable slots times what lies behind one."""
    for tier, capacity in view.capacities.items():
        if slot_bytes := view.facts.slot_bytes.get(tier, 0):
            yield Reading((tier.value,), capacity * slot_bytes)


def read_pinned_bytes(view: View) -> Iterable[Reading]:
    """Only a CPU tier has an arena to register."""
    if Tier.CPU in view.capacities:
        yield Reading((), view.facts.read_pinning().registered_bytes)


def read_evictions(view: View) -> Iterable[Reading]:
    """Blocks that are not findable any more."""
    for (tier, reason), blocks in view.core.counters.evicted_blocks.items():
        if tier in view.capacities:
            yield Reading((tier.value, reason.value), blocks)


def read_store_skips(view: View) -> Iterable[Reading]:
    """Blocks offered to the CPU tier and not copied."""
    if Tier.CPU in view.capacities:
        for reason, blocks in view.core.counters.store_skipped_blocks.items():
            yield Reading((reason.value,), blocks)


def read_corrupt_blocks(view: View) -> Iterable[Reading]:
    """Blocks whose bytes had changed."""
    if Tier.CPU in view.capacities:
        yield Reading((), view.core.counters.corrupt_blocks)


def read_alloc_failures(view: View) -> Iterable[Reading]:
    """Requests that had to wait for GPU slots; what the CPU pool lacks is a skipped store."""
    for reason, count in view.core.counters.alloc_failures.items():
        yield Reading((Tier.GPU.value, reason.value), count)


# Leases.


def read_leases_opened(view: View) -> Iterable[Reading]:
    """Admitted requests."""
    yield Reading((), view.core.counters.leases_opened)


def read_forks(view: View) -> Iterable[Reading]:
    """Admitted with what another lease holds."""
    yield Reading((), view.core.counters.forks)


def read_leases_closed(view: View) -> Iterable[Reading]:
    """By the way they ended."""
    for how, count in view.core.counters.leases_closed.items():
        yield Reading((how.value,), count)


def read_leases(view: View) -> Iterable[Reading]:
    """Those that hold blocks; all are read before the overdue ones, of which none is new."""
    live = view.core.live_leases
    overdue = view.stats.overdue_leases
    yield Reading(("active",), live - overdue)
    yield Reading(("overdue",), overdue)


def read_oldest_lease(view: View) -> Iterable[Reading]:
    """The first entry is the oldest one; 0 without leases."""
    opened_at = view.stats.opened_at
    for _ in range(_READ_TRIES):
        try:
            oldest = next(iter(opened_at.values()), view.now)
        except RuntimeError:  # the loop's thread opened or closed a lease between the two calls
            continue
        yield Reading((), max(view.now - oldest, 0.0))
        return


def read_lease_duration(view: View) -> Iterable[Reading]:
    """Admission to given back."""
    yield Reading((), _take(view.stats.lease_seconds))


# The whole.


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
    yield Reading((), view.stats.events_published)


def read_events_dropped(view: View) -> Iterable[Reading]:
    """Cache events that slow subscribers missed."""
    yield Reading((), view.stats.events_dropped)


def read_build_info(view: View) -> Iterable[Reading]:
    """What never changes, as labels."""
    tokens = str(view.core.geometry.hash_block_size)
    yield Reading((view.facts.version, view.facts.backend, tokens), 1)


def _take(histogram: Histogram) -> Buckets:
    return Buckets(histogram.bounds, tuple(histogram.counts), histogram.total)
