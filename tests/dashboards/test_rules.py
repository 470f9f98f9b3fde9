"""Recording rules and alerts: Prometheus's own tool accepts them, each fires when it must, and each says what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from aiokv.core.cache import CacheState
from aiokv.observe.metrics import Collector, RuntimeFacts
from aiokv.observe.stats import Stats
from tests.dashboards.queries import FOLDER, RULE_FILES, SCRAPED, alerts, recordings
from tests.observe.support import Scrape
from tests.runtime.support import GEOMETRY

CASES = sorted((Path(__file__).parent / "rules").glob("*.yml"))
RUNBOOK = (FOLDER / "README.md").read_text(encoding="utf-8")


def name_of(rule: dict[str, Any]) -> str:
    return str(rule.get("alert", rule.get("record")))


@pytest.fixture
def promtool() -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    return program


def run(*command: str | Path) -> str:
    """What the command printed; fails unless it succeeded."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("rule", [*recordings(), *alerts()], ids=name_of)
def test_an_expression_parses(rule: dict[str, Any]) -> None:
    assert promql_parser.parse(rule["expr"]).prettify()


def test_promtool_accepts_the_configuration_and_the_rules_that_it_names(promtool: str) -> None:
    printed = run(promtool, "check", "config", FOLDER / "prometheus" / "prometheus.yml")
    assert f"SUCCESS: {len(RULE_FILES)} rule files found" in printed
    assert f"SUCCESS: {len(alerts())} rules found" in printed


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_rules_say_what_they_must_and_nothing_else(promtool: str, tmp_path: Path, cases: Path) -> None:
    file = tmp_path / cases.name
    file.write_text(cases.read_text(encoding="utf-8").replace("RULES", str(FOLDER / "prometheus")))
    assert "SUCCESS" in run(promtool, "test", "rules", file)


def test_rules_are_tried_on_series_that_exist() -> None:
    """By name, by every label and its value, by the bounds of buckets: anything else would prove nothing."""
    collector = Collector()
    core = CacheState(GEOMETRY, gpu_blocks=9, cpu_blocks=9)
    collector.attach(core, stats=Stats(), facts=RuntimeFacts(version="0", backend="none"))
    shown = Scrape(collector).samples.keys() | {("up", frozenset[tuple[str, str]]())}
    tests = [one for file in CASES for one in yaml.safe_load(file.read_text(encoding="utf-8"))["tests"]]
    for series in (given["series"] for one in tests for given in one["input_series"]):
        selector = promql_parser.parse(series)
        assert isinstance(selector, promql_parser.VectorSelector)
        labels = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
        own = frozenset((name, value) for name, value in labels.items() if name not in SCRAPED)
        assert labels.keys() >= SCRAPED, series
        assert (selector.name, own) in shown, series


def test_every_rule_has_a_case_and_every_alert_one_in_which_it_is_silent() -> None:
    tests = [one for file in CASES for one in yaml.safe_load(file.read_text(encoding="utf-8"))["tests"]]
    asked = [case for one in tests for case in one.get("alert_rule_test", ())]
    fires = {case["alertname"] for case in asked if case["exp_alerts"]}
    quiet = {case["alertname"] for case in asked if not case["exp_alerts"]}
    names = {name_of(alert) for alert in alerts()}
    assert fires == names
    assert quiet == names
    recorded = {case["expr"].partition("{")[0] for one in tests for case in one.get("promql_expr_test", ())}
    assert recorded == {name_of(rule) for rule in recordings()}


@pytest.mark.parametrize("rule", alerts(), ids=name_of)
def test_an_alert_says_how_bad_it_is_and_where_to_read_on(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
    file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert (file, anchor) == ("dashboards/README.md", rule["alert"].lower())
    headings = [heading.lower() for heading in re.findall(r"^#+ (\w+)$", RUNBOOK, re.MULTILINE)]
    assert headings.count(anchor) == 1


def test_the_runbook_names_no_alert_that_does_not_exist() -> None:
    assert set(re.findall(r"\bAiokv\w+", RUNBOOK)) == {name_of(alert) for alert in alerts()}
