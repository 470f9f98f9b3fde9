"""What one panel of the dashboard is, apart from where it stands and how Grafana writes it down."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, final

from dashboards.promql import quantile

__all__ = [
    "BY_SOURCE",
    "BY_STATE",
    "FULL",
    "HALF",
    "QUARTER",
    "SIXTH",
    "THIRD",
    "Kind",
    "Limit",
    "Panel",
    "Query",
    "Row",
    "Unit",
    "quantiles",
]

FULL, HALF, THIRD, QUARTER, SIXTH = 24, 12, 8, 6, 4
"""Widths: a row is 24 wide."""

BY_SOURCE: Final = {"gpu": "green", "cpu": "blue", "compute": "orange"}
BY_STATE: Final = {"free": "#6E7074", "reserved": "orange", "resident": "green", "quarantined": "red"}


class Kind(Enum):
    """How values are drawn."""

    LINES = "lines"
    STACK = "stack"
    TILE = "tile"
    """The last value, in large letters."""
    NAMED_TILE = "named tile"
    """The same, with its name even if there is one only."""


class Unit(Enum):
    """Grafana's ids of units."""

    BYTES = "bytes"
    BYTES_PER_SECOND = "binBps"
    COUNT = "short"
    PER_SECOND = "cps"
    RATIO = "percentunit"
    REQUESTS_PER_SECOND = "reqps"
    SECONDS = "s"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One PromQL expression, and how its series are called: `{{label}}` stands for a label's value."""

    expr: str
    legend: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """From `value` on a value is drawn in `color`."""

    value: float
    color: str = "red"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`description` says what is shown and what a bad value means; `nothing`, what it means that there is no value."""

    title: str
    description: str
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    unit: Unit = Unit.COUNT
    axis: str = ""
    """What is counted, where the unit does not say it."""
    width: int = THIRD
    highest: float | None = None
    limits: tuple[Limit, ...] = ()
    words: dict[int, str] = field(default_factory=dict)
    """What is shown instead of a number."""
    colors: dict[str, str] = field(default_factory=dict)
    """Of series by their names, where they should be the same on every panel."""
    nothing: str = "nothing in this time"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def quantiles(histogram: str, *, label: str = "") -> tuple[Query, ...]:
    """The median and the 99th percentile of a histogram, by one of its labels."""
    by, name = ((label,), f" {{{{{label}}}}}") if label else ((), "")
    return tuple(Query(expr=quantile(q, histogram, by=by), legend=f"p{q * 100:g}{name}") for q in (0.5, 0.99))
