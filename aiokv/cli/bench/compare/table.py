"""A comparison for people: a row per pair, and below them how the two sides of some differ."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.table import Table

from aiokv.cli.bench.compare.runner import Result

__all__ = ["table_of"]


def table_of(results: Sequence[Result]) -> Table:
    """Medians in microseconds of one request, and how many times as long the peer took."""
    notes = list(dict.fromkeys(result.pair.note for result in results if result.pair.note))
    caption = [f"({number}) {note}" for number, note in enumerate(notes, 1)]
    if any(result.pair.case.requests > 1 for result in results):
        caption.append("8 x 64: eight requests of 64 blocks each, one right after the other; times are those of one")
    table = Table(
        box=None, header_style="bold", pad_edge=False, caption="\n".join(caption) or None, caption_justify="left"
    )
    for heading in ("operation", "model"):
        table.add_column(heading, no_wrap=True)
    for heading in ("blocks", "ours us", "peer us", "ratio", "floor"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        case, floor, note = result.pair.case, result.pair.floor, result.pair.note
        mark = f" ({notes.index(note) + 1})" if note else ""
        table.add_row(
            f"{case.operation.value} {case.layout.value}{mark}",
            case.model.value,
            f"{case.requests} x {case.blocks}" if case.requests > 1 else f"{case.blocks:,}",
            f"{median(result.ours_ns) / 1e3:,.1f}",
            f"{median(result.peer_ns) / 1e3:,.1f}",
            f"[red]{result.ratio:.2f}[/]" if result.is_too_slow else f"{result.ratio:.2f}",
            "" if floor is None else f"{floor:g}",
        )
    return table
