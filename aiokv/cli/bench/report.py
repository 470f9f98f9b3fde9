"""How every benchmark answers: one JSON object or one table, then a line per broken promise, then the exit status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import typer
from rich.markup import escape
from rich.table import Table

from aiokv.cli.output import print_error, print_json, stdout
from aiokv.model.numbers import is_number

__all__ = ["BenchReport", "conclude"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """What one benchmark found: `figures` by name, flat or one level deep, and what is not as promised."""

    benchmark: str
    schema_version: int
    figures: Mapping[str, object]
    complaints: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """The object that `--json` prints, without its `schema_version`."""
        return {
            "benchmark": self.benchmark,
            "ok": not self.complaints,
            **self.figures,
            "complaints": list(self.complaints),
        }


def conclude(report: BenchReport, *, as_json: bool, table: Table | None = None) -> NoReturn:
    """Print the report and exit: 0 if there are no complaints, else 1. People read `table`, or a row per figure."""
    if as_json:
        print_json(report.as_json(), schema_version=report.schema_version)
    else:
        console = stdout()
        console.print(table or _table_of(report))
        console.print("\n[bold red]not as promised[/]" if report.complaints else "\n[green]as promised[/]")
    for complaint in report.complaints:
        print_error(f"bench {report.benchmark}: {complaint}")
    raise typer.Exit(1 if report.complaints else 0)


def _table_of(report: BenchReport) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right")
    for name, value in report.figures.items():
        if isinstance(value, Mapping):
            for inner, part in value.items():
                table.add_row(escape(f"{name}.{inner}"), _shown(part))
        else:
            table.add_row(escape(name), _shown(value))
    return table


def _shown(value: object) -> str:
    if not is_number(value):
        return escape(str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
