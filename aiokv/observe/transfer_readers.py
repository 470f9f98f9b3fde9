"""What the metric families of transfers and of waiting for them read; the rules are those of `readers.py`."""

from __future__ import annotations

from collections.abc import Iterable

from aiokv.core.counters import COPY_ENDS
from aiokv.model.plan import Outcome
from aiokv.observe.checks import count_in_flight
from aiokv.observe.readers import Reading, View, take

__all__ = [
    "read_bridge_polls",
    "read_dropped_blocks",
    "read_inflight_blocks",
    "read_loop_lag",
    "read_partly_reported",
    "read_queue_blocks",
    "read_queue_wait",
    "read_rank_reports",
    "read_submitted_blocks",
    "read_transfer_blocks",
    "read_transfer_bytes",
    "read_transfer_duration",
    "read_wake_latency",
]


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


def read_dropped_blocks(view: View) -> Iterable[Reading]:
    """Blocks of transfers that nobody wanted any more before it was their turn: not submitted."""
    for direction in view.directions:
        blocks = view.core.counters.transferred_blocks[direction, Outcome.DROPPED]
        yield Reading((direction.value,), blocks)


def read_transfer_duration(view: View) -> Iterable[Reading]:
    """Submission to completion seen."""
    for direction in view.directions:
        yield Reading((direction.value,), take(view.stats.transfer_seconds[direction]))


def read_queue_wait(view: View) -> Iterable[Reading]:
    """Ready to submitted."""
    for direction in view.directions:
        yield Reading((direction.value,), take(view.stats.queue_wait_seconds[direction]))


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


def read_wake_latency(view: View) -> Iterable[Reading]:
    """Copy ended to coroutine resumed; a runtime has one way of learning of it."""
    if view.directions:
        yield Reading((view.facts.bridge,), take(view.stats.wake_seconds))


def read_loop_lag(view: View) -> Iterable[Reading]:
    """How late the loop ran what it was asked to run."""
    yield Reading((), take(view.stats.loop_lag_seconds))
