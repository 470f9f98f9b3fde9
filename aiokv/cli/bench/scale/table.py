"""Costs by the size of pools, for people: a row per operation, a column per size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import median

from rich.table import Table

from aiokv.cli.bench.scale.runner import Measured

__all__ = ["table_of"]

_CAPTION = "Microseconds per block in pools of so many slots, and how many times as much as in the smallest."


def table_of(results: Sequence[Measured]) -> Table:
    """Medians; where larger pools were measured with as many prompts in turn as they hold, that is a row of its own."""
    sizes = sorted({result.case.pool_slots for result in results})
    table = Table(box=None, header_style="bold", pad_edge=False, caption=_CAPTION, caption_justify="left")
    table.add_column("operation", no_wrap=True)
    for size in sizes:
        table.add_column(f"{size:,}", justify="right", no_wrap=True)
    for name, row in groupby(results, key=_row_of):
        shown = {result.case.pool_slots: _shown(result) for result in row}
        table.add_row(name, *(shown.get(size, "") for size in sizes))
    return table


def _row_of(result: Measured) -> str:
    name = f"{result.case.operation.value} {result.case.layout.value}"
    return name if result.is_like_base else f"{name}, many prompts"


def _shown(result: Measured) -> str:
    cost = f"{median(result.taken_ns) / 1e3 / result.case.blocks:.3f}"
    ratio = f"{result.ratio:.2f}x"
    return f"{cost}  [red]{ratio}[/]" if result.is_too_slow else f"{cost}  {ratio}"
