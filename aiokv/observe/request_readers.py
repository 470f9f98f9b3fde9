"""What the metric families of requests and their leases read; the rules are those of `readers.py`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

from aiokv.core.counters import Phase, Source
from aiokv.model.ids import Tier
from aiokv.observe.readers import Buckets, Reading, View, read_steadily, take
from aiokv.observe.stats import LeaseTerm

__all__ = [
    "read_cancel_cleanup",
    "read_cancellations",
    "read_forks",
    "read_interleaved_runs",
    "read_lease_duration",
    "read_leases",
    "read_leases_closed",
    "read_leases_opened",
    "read_load_failed_tokens",
    "read_lookup_duration",
    "read_lookups",
    "read_oldest_lease",
    "read_prompt_blocks",
    "read_prompt_tokens",
    "read_truncated_tokens",
]

RUN_BOUNDS: Final = (0, 1, 2, 4, 8, 16, 32, 63)
"""Upper bounds in switches; the core counts 64 and more as 64."""


def read_prompt_tokens(view: View) -> Iterable[Reading]:
    """Written once per request, by source (law 7)."""
    yield from _by_source(view, view.core.counters.prompt_tokens)


def read_prompt_blocks(view: View) -> Iterable[Reading]:
    """Written in the same step."""
    yield from _by_source(view, view.core.counters.prompt_blocks)


def read_lookups(view: View) -> Iterable[Reading]:
    """Every admission attempt that looked at the indexes."""
    for result, count in view.core.counters.lookups.items():
        yield Reading((result.value,), count)


def read_lookup_duration(view: View) -> Iterable[Reading]:
    """The loop's time in one attempt."""
    yield Reading((), take(view.stats.lookup_seconds))


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
        for outcome, tokens in view.core.counters.load_failed_tokens.items():
            yield Reading((Source.CPU.value, outcome.value), tokens)


def read_truncated_tokens(view: View) -> Iterable[Reading]:
    """Written, then given up."""
    yield Reading((), view.core.counters.truncated_tokens)


def read_cancellations(view: View) -> Iterable[Reading]:
    """Cancelled and timed out requests, by what they waited for."""
    for stage, count in view.stats.cancellations.items():
        yield Reading((stage.value,), count)


def read_cancel_cleanup(view: View) -> Iterable[Reading]:
    """Cancelled to given back; those that were never let in held nothing."""
    yield Reading((), take(view.stats.cleanup_seconds))


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
    yield Reading((LeaseTerm.ACTIVE.value,), live - overdue)
    yield Reading((LeaseTerm.OVERDUE.value,), overdue)


def read_oldest_lease(view: View) -> Iterable[Reading]:
    """The first entry is the oldest one; 0 without leases."""
    opened_at = view.stats.opened_at
    for oldest in read_steadily(lambda: (next(iter(opened_at.values()), view.now),)):
        yield Reading((), max(view.now - oldest, 0.0))


def read_lease_duration(view: View) -> Iterable[Reading]:
    """Admission to given back."""
    yield Reading((), take(view.stats.lease_seconds))


def _by_source(view: View, counts: Mapping[tuple[Source, Phase], int]) -> Iterable[Reading]:
    for (source, phase), count in counts.items():
        if source is not Source.CPU or Tier.CPU in view.capacities:
            yield Reading((source.value, phase.value), count)
