"""Writes `aiokv.json`, the Grafana dashboard, with Grafana's own builders: `python -m dashboards.generate`.

What it shows stands in `panels/`; here is only how Grafana writes it down. Every panel names its data source, through a
variable, and has an id: without, an import asks, and links to panels break.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from string import ascii_uppercase
from typing import Final

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as model

from dashboards.panel import Kind, Limit, Panel, Query, Row
from dashboards.panels.faults import FAULTS
from dashboards.panels.hits import HITS, SERVER
from dashboards.panels.overview import OVERVIEW
from dashboards.panels.pools import HINTS, POOLS
from dashboards.panels.requests import EVENTS, REQUESTS
from dashboards.panels.transfers import LOOP, TRANSFERS

__all__ = ["FILE", "ROWS", "render"]

FILE: Final = Path(__file__).parent / "aiokv.json"
ROWS: Final = (OVERVIEW, HITS, SERVER, TRANSFERS, POOLS, REQUESTS, LOOP, FAULTS, EVENTS, HINTS)
TILE_HEIGHT: Final = 4
GRAPH_HEIGHT: Final = 8
DATASOURCE: Final = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
PanelBuilder = stat.Panel | timeseries.Panel


def render() -> str:
    """The dashboard as JSON; equal panels give equal bytes."""
    return json.dumps(_build().build(), cls=JSONEncoder, indent=2) + "\n"


def _build() -> dashboard.Dashboard:
    board = (
        dashboard.Dashboard("aiokv")
        .uid("aiokv")
        .description("KV-cache blocks between GPU and CPU memory: hits, transfers, pools, leases, and what is wrong.")
        .tags(["aiokv", "llm", "kv-cache"])
        .timezone("browser")
        .readonly()
        .refresh("10s")
        .time("now-30m", "now")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .variables([_datasource_variable(), _instance_variable()])
    )
    ids = count(1)
    for row in ROWS:
        board.with_row(_build_row(row).id(next(ids)))
        for panel in row.panels:
            board.with_panel(_build_panel(panel).id(next(ids)))
    return board


def _datasource_variable() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def _instance_variable() -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable("instance")
        .label("Instance")
        .datasource(DATASOURCE)
        .query("label_values(aiokv_build_info, instance)")
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(model.VariableOption(selected=True, text="All", value="$__all"))
    )


def _build_row(row: Row) -> dashboard.Row:
    return dashboard.Row(row.title).datasource(DATASOURCE)


def _build_panel(panel: Panel) -> PanelBuilder:
    builder = _build_tile(panel) if panel.kind in (Kind.TILE, Kind.NAMED_TILE) else _build_graph(panel)
    builder.title(panel.title).description(panel.description).datasource(DATASOURCE)
    builder.span(panel.width).unit(panel.unit.value).min(0).no_value(panel.nothing)
    if panel.highest is not None:
        builder.max(panel.highest)
    if panel.words:
        builder.mappings([_map_values(panel.words)])
    for series, color in panel.colors.items():
        builder.override_by_name(series, [model.DynamicConfigValue(id_val="color", value=_fix_color(color))])
    for place, query in enumerate(panel.queries):
        builder.with_target(_build_query(query).ref_id(ascii_uppercase[place]))
    return builder


def _fix_color(color: str) -> model.FieldColor:
    return model.FieldColor(mode=model.FieldColorModeId.FIXED, fixed_color=color)


def _build_tile(panel: Panel) -> stat.Panel:
    """The last value over its history; green, unless a limit says otherwise."""
    text = looks.BigValueTextMode.VALUE_AND_NAME if panel.kind is Kind.NAMED_TILE else looks.BigValueTextMode.AUTO
    return (
        stat.Panel()
        .height(TILE_HEIGHT)
        .graph_mode(looks.BigValueGraphMode.AREA)
        .color_mode(looks.BigValueColorMode.VALUE)
        .text_mode(text)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .thresholds(_build_limits(panel.limits))
    )


def _build_graph(panel: Panel) -> timeseries.Panel:
    graph = (
        timeseries.Panel()
        .height(GRAPH_HEIGHT)
        .line_width(1)
        .show_points(looks.VisibilityMode.NEVER)
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
        .tooltip(common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI).sort(looks.SortOrder.DESCENDING))
        .legend(
            common.VizLegendOptions()
            .display_mode(looks.LegendDisplayMode.LIST)
            .placement(looks.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    if panel.axis:
        graph.axis_label(panel.axis)
    if panel.kind is Kind.STACK:
        graph.fill_opacity(40).stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL))
    return graph


def _build_query(query: Query) -> prometheus.Dataquery:
    return prometheus.Dataquery().datasource(DATASOURCE).expr(query.expr).legend_format(query.legend).range()


def _build_limits(limits: tuple[Limit, ...]) -> dashboard.ThresholdsConfig:
    steps = [
        model.Threshold(value=limit.value, color=limit.color) for limit in (Limit(value=0, color="green"), *limits)
    ]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def _map_values(words: dict[int, str]) -> model.ValueMap:
    return model.ValueMap(options={str(value): model.ValueMappingResult(text=text) for value, text in words.items()})


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
