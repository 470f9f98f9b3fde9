"""A comparison for people: a row per pair."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.table import Table

from aiokv.cli.bench.compare.pairs import Pair
from aiokv.cli.bench.compare.runner import Result

__all__ = ["table_of"]


def table_of(results: Sequence[Result]) -> Table:
    """Medians in microseconds, and how many times as long the peer took."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("operation", "prompt", "model"):
        table.add_column(heading, no_wrap=True)
    for heading in ("blocks", "ours µs", "peer µs", "ratio", "floor"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("the peer", no_wrap=True)
    for result in results:
        case, floor = result.pair.case, result.pair.floor
        table.add_row(
            case.operation.value,
            case.layout.value,
            case.model.value,
            f"{case.blocks:,}",
            f"{median(result.ours_ns) / 1e3:,.1f}",
            f"{median(result.peer_ns) / 1e3:,.1f}",
            f"[red]{result.ratio:.2f}[/]" if result.is_too_slow else f"{result.ratio:.2f}",
            "" if floor is None else f"{floor:g}",
            _difference(result.pair),
        )
    return table


def _difference(pair: Pair) -> str:
    """What the peer does instead, if it is something else."""
    if pair.peer_operation != pair.case.operation.value:
        return pair.peer_operation
    return "" if pair.peer_layout is pair.case.layout else f"{pair.peer_layout.value} only"
