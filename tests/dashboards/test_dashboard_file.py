"""The file is what its generator writes, and says what an operator needs to know about every panel."""

from __future__ import annotations

import re

import promql_parser
import pytest

from dashboards.generate import FILE, ROWS, render
from tests.dashboards.queries import Panel, dashboard, fill_in, find_calls, find_selectors, panels

GRID_WIDTH = 24
PANELS = panels()


def title_of(panel: Panel) -> str:
    return panel.title


def test_the_file_is_what_the_generator_writes() -> None:
    assert FILE.read_text(encoding="utf-8") == render()


def test_the_file_holds_every_panel_in_its_order() -> None:
    assert [panel.title for panel in PANELS] == [panel.title for row in ROWS for panel in row.panels]


def test_ids_differ() -> None:
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert all(isinstance(one, int) for one in ids)
    assert len(set(ids)) == len(ids)


def test_panels_lie_on_the_grid_and_on_no_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= GRID_WIDTH, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_data_source_is_a_variable_and_instances_are_those_that_exist() -> None:
    variables = {one["name"]: one for one in dashboard()["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert variables["instance"]["query"] == "label_values(aiokv_build_info, instance)"
    assert set(variables) == {"datasource", "instance"}


@pytest.mark.parametrize("panel", PANELS, ids=title_of)
def test_a_panel_and_its_queries_name_the_data_source(panel: Panel) -> None:
    wanted = {"type": "prometheus", "uid": "${datasource}"}
    assert panel.json["datasource"] == wanted
    assert [target["datasource"] for target in panel.targets] == [wanted] * len(panel.targets)
    assert len({target["refId"] for target in panel.targets}) == len(panel.targets)


@pytest.mark.parametrize("panel", PANELS, ids=title_of)
def test_a_panel_explains_itself(panel: Panel) -> None:
    shown = panel.json["fieldConfig"]["defaults"]
    assert len(panel.json["description"].split()) >= 5
    assert panel.json["description"].endswith(".")
    assert shown["noValue"]
    assert shown["unit"] != "short" or panel.json["type"] == "stat" or shown["custom"]["axisLabel"], "of what?"


@pytest.mark.parametrize("panel", PANELS, ids=title_of)
def test_a_unit_fits_what_is_counted(panel: Panel) -> None:
    """Seconds are drawn as seconds, bytes as bytes, rates as rates, and shares up to 1."""
    shown = panel.json["fieldConfig"]["defaults"]
    for expr in panel.exprs:
        metrics = {one.metric for one in find_selectors(fill_in(expr))}
        is_rate = bool(find_calls(fill_in(expr), name="rate")) and "histogram_quantile" not in expr
        if " / " in expr:
            assert (shown["unit"], shown["max"]) == ("percentunit", 1)
        elif any("_seconds" in metric for metric in metrics):
            assert shown["unit"] == "s"
        elif any("_bytes" in metric for metric in metrics):
            assert shown["unit"] == ("binBps" if is_rate else "bytes")
        elif is_rate:
            label = shown["custom"].get("axisLabel", "")
            assert shown["unit"] in ("cps", "reqps") or label.endswith("/s")


@pytest.mark.parametrize("panel", PANELS, ids=title_of)
def test_no_counter_is_drawn_as_it_is(panel: Panel) -> None:
    for selector in (one for expr in panel.exprs for one in find_selectors(fill_in(expr))):
        assert selector.is_range == selector.metric.endswith(("_total", "_bucket", "_sum", "_count"))


@pytest.mark.parametrize("panel", PANELS, ids=title_of)
def test_a_rate_is_taken_over_what_grafana_says(panel: Panel) -> None:
    windows = {window for expr in panel.exprs for window in re.findall(r"\[(.*?)\]", expr)}
    assert windows <= {"$__rate_interval", "$__range"}


@pytest.mark.parametrize("panel", PANELS, ids=title_of)
def test_a_quantile_is_taken_of_a_sum_that_keeps_the_bounds(panel: Panel) -> None:
    for call in (one for expr in panel.exprs for one in find_calls(fill_in(expr), name="histogram_quantile")):
        summed = call.args[1]
        assert isinstance(summed, promql_parser.AggregateExpr)
        assert summed.modifier is not None
        assert "le" in summed.modifier.labels


@pytest.mark.parametrize("panel", PANELS, ids=title_of)
def test_only_the_chosen_instances_are_shown(panel: Panel) -> None:
    for selector in (one for expr in panel.exprs for one in find_selectors(fill_in(expr))):
        assert "instance" in selector.labels or selector.metric == "ALERTS"


@pytest.mark.parametrize("panel", PANELS, ids=title_of)
def test_series_are_called_by_labels_that_they_keep(panel: Panel) -> None:
    """Otherwise several lines have one name, or a name is empty."""
    for target in panel.targets:
        named = re.findall(r"{{(\w+)}}", target["legendFormat"])
        kept = re.search(r" by \((.*?)\)", target["expr"])
        labels = kept.group(1).split(", ") if kept else []
        assert sorted(named) == sorted(label for label in labels if label != "le")
