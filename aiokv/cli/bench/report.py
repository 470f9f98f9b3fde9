"""How every benchmark answers: one JSON object or one table, then a line per broken promise, then the exit status."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Final, NoReturn

import typer
from rich.markup import escape
from rich.table import Table

from aiokv.cli.output import print_error, print_json, stdout, stdout_kept_clean
from aiokv.model.numbers import is_number

__all__ = ["BenchReport", "Judgement", "answer", "conclude"]

_LARGE: Final = 1_000
"""From here on people need no fraction, and no exponent."""


class Judgement(Enum):
    """Whether a benchmark holds what it finds against promises."""

    BY_PROMISES = "by promises"
    NONE = "none"
    """It only tells: its report has no complaints, and says of nothing that it is as promised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """What one benchmark found: `figures` by name, flat or one level deep, and what is not as promised.

    `cases` are figures of the same names for each of several measurements: a row each, where people read.
    """

    benchmark: str
    schema_version: int
    figures: Mapping[str, object]
    complaints: tuple[str, ...]
    cases: tuple[Mapping[str, object], ...] = ()
    judgement: Judgement = Judgement.BY_PROMISES

    def as_json(self) -> dict[str, object]:
        """The object that `--json` prints, without its `schema_version`."""
        return {
            "benchmark": self.benchmark,
            "ok": not self.complaints,
            **self.figures,
            **({"cases": [dict(case) for case in self.cases]} if self.cases else {}),
            "complaints": list(self.complaints),
        }


def answer(
    measure: Callable[[], BenchReport],
    *,
    as_json: bool,
    table_of: Callable[[Sequence[Mapping[str, object]]], Table] | None = None,
) -> NoReturn:
    """Measure, with nothing printed where programs read the report, then `conclude`; people read `table_of(cases)`."""
    with stdout_kept_clean() if as_json else nullcontext():
        report = measure()
    conclude(report, as_json=as_json, table=table_of(report.cases) if table_of else None)


def conclude(report: BenchReport, *, as_json: bool, table: Table | None = None) -> NoReturn:
    """Print the report and exit: 0 if there are no complaints, else 1. People read `table` in place of the cases."""
    if as_json:
        print_json(report.as_json(), schema_version=report.schema_version)
    else:
        _print_tables(report, table=table)
    for complaint in report.complaints:
        print_error(f"bench {report.benchmark}: {complaint}")
    raise typer.Exit(1 if report.complaints else 0)


def _print_tables(report: BenchReport, *, table: Table | None) -> None:
    console = stdout()
    console.print(_table_of_figures(report))
    if report.cases:
        console.print()
        console.print(table or _table_of(report.cases))
    if report.complaints:
        console.print("\n[bold red]not as promised[/]")
    elif report.judgement is Judgement.BY_PROMISES:
        console.print("\n[green]as promised[/]")


def _table_of_figures(report: BenchReport) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right")
    for name, value in report.figures.items():
        if isinstance(value, Mapping):
            for inner, part in value.items():
                table.add_row(escape(f"{name}.{inner}"), _shown(part))
        elif isinstance(value, list | tuple):
            for number, part in enumerate(value, start=1):
                table.add_row(escape(f"{name}.{number}"), _shown(part))
        else:
            table.add_row(escape(name), _shown(value))
    return table


def _table_of(cases: tuple[Mapping[str, object], ...]) -> Table:
    """A row per case; what has parts is folded where the terminal is narrow, and left out where no case has any."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    names = [name for name in cases[0] if any(case[name] != {} for case in cases)]
    for name in names:
        is_single = not isinstance(cases[0][name], Mapping)
        table.add_column(escape(name), justify="right" if is_single else "left", no_wrap=is_single)
    for case in cases:
        table.add_row(*(_shown(case[name]) for name in names))
    return table


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{escape(str(name))} {_shown(part)}" for name, part in value.items())
    if not is_number(value):
        return escape(str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= _LARGE else f"{value:,.4g}"
