"""Wake-ups by the number of transfers in flight, for people: narrow enough for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.table import Table

__all__ = ["table_of"]

_HEADINGS: Final = ("in flight", "least", "woken", "timed", "p50 us", "p90 us", "p99 us", "loop us", "loop share")
_CAPTION: Final = (
    "From the end of a copy until its request goes on: percentiles, in microseconds. The loop's CPU time, in "
    "microseconds for one request (median) and as a share of the wall time."
)


def table_of(cases: Sequence[Mapping[str, Any]]) -> Table:
    """A row per number in flight; how the loop's time spreads is told in the JSON alone."""
    table = Table(box=None, header_style="bold", pad_edge=False, caption=_CAPTION, caption_justify="left")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for case in cases:
        counts = (f"{case[name]:,}" for name in ("in_flight", "least_in_flight", "completions", "timed"))
        latencies = (f"{case['latency_us'][name]:,.0f}" for name in ("p50", "p90", "p99"))
        loop_us = f"{case['loop_us_per_request']['median']:,.0f}"
        table.add_row(*counts, *latencies, loop_us, f"{case['loop_share']:.1%}")
    return table
