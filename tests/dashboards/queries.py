"""The queries of the dashboard and of the rules as values, and what a PromQL parser sees in them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, final

import promql_parser
import yaml

from aiokv.observe.families import FAMILIES, Kind
from dashboards.generate import FILE

__all__ = [
    "FOLDER",
    "LABELS",
    "RULE_FILES",
    "SCRAPED",
    "SERVER",
    "Panel",
    "Selector",
    "alerts",
    "dashboard",
    "fill_in",
    "find_aggregated_labels",
    "find_calls",
    "find_selectors",
    "find_vector_selectors",
    "panels",
    "recordings",
    "sample_names",
]

FOLDER: Final = FILE.parent
RULE_FILES: Final = tuple(FOLDER / "prometheus" / name for name in ("recording.yml", "alerts.yml"))
SCRAPED: Final = frozenset({"instance", "job"})
SERVER: Final = {
    "aiokv_serve_requests": (Kind.COUNTER, ("outcome",)),
    "aiokv_serve_time_to_first_token_seconds": (Kind.HISTOGRAM, ("source",)),
    "aiokv_serve_queue_requests": (Kind.GAUGE, ()),
    "aiokv_serve_running_requests": (Kind.GAUGE, ()),
    "aiokv_serve_generated_tokens": (Kind.COUNTER, ()),
}
"""What `aiokv serve` shows beside the families of the library."""
OF_PROMETHEUS: Final = {"up": SCRAPED, "ALERTS": SCRAPED | {"alertname", "alertstate", "severity"}}
SUFFIXES: Final = {
    Kind.COUNTER: ("_total",),
    Kind.GAUGE: ("",),
    Kind.HISTOGRAM: ("_bucket", "_sum", "_count"),
    Kind.INFO: ("_info",),
}


def sample_names(name: str, *, kind: Kind) -> tuple[str, ...]:
    """How the samples of a family are called."""
    return tuple(name + suffix for suffix in SUFFIXES[kind])


def _all_labels() -> dict[str, frozenset[str]]:
    families = {family.name: (family.kind, family.labels) for family in FAMILIES} | SERVER
    found = dict(OF_PROMETHEUS)
    for name, (kind, labels) in families.items():
        for sample in sample_names(name, kind=kind):
            le = {"le"} if sample.endswith("_bucket") else set()
            found[sample] = SCRAPED | set(labels) | le
    return found


LABELS: Final = _all_labels()
"""The labels of every metric that exists, by the name of its samples."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel as it stands in the file, rows left out."""

    title: str
    json: dict[str, Any]

    @property
    def targets(self) -> list[dict[str, Any]]:
        """Its queries, as Grafana writes them."""
        targets: list[dict[str, Any]] = self.json["targets"]
        return targets

    @property
    def exprs(self) -> list[str]:
        """Its queries."""
        return [target["expr"] for target in self.targets]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """One selection of series in a query."""

    metric: str
    labels: frozenset[str]
    is_range: bool


@cache
def dashboard() -> dict[str, Any]:
    """The file."""
    board: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return board


def panels() -> list[Panel]:
    """All panels, as they stand on the page."""
    return [Panel(title=one["title"], json=one) for one in dashboard()["panels"] if one["type"] != "row"]


def recordings() -> list[dict[str, Any]]:
    """All recording rules."""
    return [rule for rule in _rules() if "record" in rule]


def alerts() -> list[dict[str, Any]]:
    """All alerts."""
    return [rule for rule in _rules() if "alert" in rule]


@cache
def _rules() -> list[dict[str, Any]]:
    files = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in RULE_FILES]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def fill_in(expr: str) -> str:
    """A query of the dashboard, as Grafana would send it with all instances chosen."""
    window = {"$__rate_interval": "30s", "$__range": "1m", "$instance": ".*"}
    return re.sub(r"\$\w+", lambda found: window[found.group()], expr)


def find_selectors(expr: str) -> list[Selector]:
    """Every selection of series in a query."""
    found: list[Selector] = []
    of_ranges: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            of_ranges.append(node.vector_selector)
        elif isinstance(node, promql_parser.VectorSelector):  # that of a range comes right after the range
            labels = frozenset(matcher.name for matcher in node.matchers.matchers)
            found.append(Selector(metric=node.name or "", labels=labels, is_range=bool(of_ranges)))
            of_ranges.clear()

    promql_parser.walk(promql_parser.parse(expr), visit)
    return found


def find_vector_selectors(expr: str) -> list[str]:
    """The same as text, without ranges and offsets."""
    return sorted({node.prettify().partition(" offset ")[0] for node in _nodes(expr, promql_parser.VectorSelector)})


def find_calls(expr: str, *, name: str) -> list[promql_parser.Call]:
    """Every call of one function in a query."""
    return [call for call in _nodes(expr, promql_parser.Call) if call.func.name == name]


def find_aggregated_labels(expr: str) -> list[tuple[frozenset[str], frozenset[str]]]:
    """For every aggregation: the labels that it keeps, and the metrics below it."""
    found = []
    for node in _nodes(expr, promql_parser.AggregateExpr):
        labels = frozenset(node.modifier.labels) if node.modifier else frozenset()
        found.append((labels, frozenset(one.metric for one in find_selectors(node.expr.prettify()))))
    return found


def _nodes(expr: str, kind: type[Any]) -> list[Any]:
    found: list[Any] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, kind):
            found.append(node)

    promql_parser.walk(promql_parser.parse(expr), visit)
    return found
