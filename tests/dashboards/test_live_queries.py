"""Every query of the dashboard and every rule runs in a real Prometheus that scrapes real runtimes under load.

A panel that stays empty there is a panel that an operator would find empty: a metric that does not exist any more, a
label value that was never written, two sides that do not match.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import promql_parser
import pytest

from tests.dashboards.processes import first_line, started
from tests.dashboards.prometheus_server import Prometheus, prometheus_scrapes, require_prometheus
from tests.dashboards.queries import (
    RULE_FILES,
    SERVER,
    Panel,
    alerts,
    fill_in,
    find_vector_selectors,
    panels,
    recordings,
    sample_names,
)
from tests.dashboards.served import running_server
from tests.engine.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(150)

EMPTY = {"Alerts": "lists alerts that fire, and a healthy machine has none"}
"""Panels that may be empty, and why."""
SCRAPES = 6
"""Enough for rates."""


@contextmanager
def running_exporter() -> Iterator[int]:
    """A process with a runtime under load; gives the port of its metrics, and fails if it did not end well."""
    with started([sys.executable, "-m", "tests.dashboards.exporter"]) as process:
        yield int(first_line(process))
    assert process.returncode == 0


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    require_prometheus()
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        running_exporter() as exporter,
        running_server(write_tiny_model(folder / "tiny.gguf").path) as served,
        prometheus_scrapes([exporter, served], rules=list(RULE_FILES), folder=folder) as prometheus,
    ):
        prometheus.wait_until(f"count_over_time(up[2m]) >= {SCRAPES}", answers=2)
        prometheus.wait_until("aiokv:hit_token_ratio:rate5m > 0", answers=2)
        prometheus.wait_until("aiokv_serve_time_to_first_token_seconds_count > 0", answers=3)
        yield prometheus


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel.title))
def test_a_panel_shows_something(prometheus: Prometheus, panel: Panel) -> None:
    for expr in panel.exprs:
        values = [sample.value for sample in prometheus.ask(fill_in(expr))]
        assert any(map(math.isfinite, values)) or panel.title in EMPTY, expr


def test_a_request_to_the_server_is_timed_by_every_source(prometheus: Prometheus) -> None:
    counts = prometheus.ask("aiokv_serve_time_to_first_token_seconds_count > 0")
    assert {sample.labels["source"] for sample in counts} == {"gpu", "cpu", "compute"}


def test_the_server_shows_the_families_that_are_expected_of_it(prometheus: Prometheus) -> None:
    shown = {sample.labels["__name__"] for sample in prometheus.ask('{__name__=~"aiokv_serve_.+"}')}
    assert shown == {sample for name, (kind, _) in SERVER.items() for sample in sample_names(name, kind=kind)}


def test_no_panel_is_excused_that_does_not_exist() -> None:
    assert EMPTY.keys() <= {panel.title for panel in panels()}


def test_sources_sum_to_all_and_shares_to_one(prometheus: Prometheus) -> None:
    (share,) = [panel for panel in panels() if panel.title == "Share by source"]
    shares = {sample.labels["source"]: sample.value for sample in prometheus.ask(fill_in(share.exprs[0]))}
    assert set(shares) == {"gpu", "cpu", "compute"}
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) > 0, "the load makes use of every source"


@pytest.mark.parametrize("rule", recordings(), ids=lambda rule: str(rule["record"]))
def test_a_recording_rule_has_values(prometheus: Prometheus, rule: dict[str, str]) -> None:
    assert any(math.isfinite(sample.value) for sample in prometheus.ask(rule["record"]))


def test_every_rule_is_evaluated_without_an_error(prometheus: Prometheus) -> None:
    rules = prometheus.rules()
    assert {rule["name"]: rule["health"] for rule in rules} == {
        name: "ok" for rule in (*alerts(), *recordings()) if (name := rule.get("alert", rule.get("record")))
    }
    assert not [rule for rule in rules if rule.get("lastError")]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_what_an_alert_watches_exists_before_anything_goes_wrong(prometheus: Prometheus, rule: dict[str, str]) -> None:
    """By name and by label values: an alert over series that never come is silent for ever."""
    for selector in find_vector_selectors(rule["expr"]):
        assert prometheus.ask(selector), selector


def test_the_load_causes_no_accounting_error(prometheus: Prometheus) -> None:
    assert not prometheus.ask("aiokv_accounting_errors_total > 0")


def test_the_fast_parser_agrees_with_prometheus(prometheus: Prometheus) -> None:
    """Where there is no Prometheus, the parser alone checks the queries: it must refuse what Prometheus refuses."""
    for broken in ("sum(rate(aiokv_leases_opened_total))", "sum(aiokv_leases", "aiokv_leases{state=active}"):
        with pytest.raises(ValueError, match=r".+"):
            promql_parser.parse(broken)
        assert prometheus.refuses(broken)
