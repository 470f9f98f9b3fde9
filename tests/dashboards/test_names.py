"""Every metric and label that the dashboard or a rule asks for exists, and every family is shown somewhere."""

from __future__ import annotations

import pytest

from aiokv.observe.families import FAMILIES, Family
from tests.dashboards.queries import (
    LABELS,
    SERVER,
    alerts,
    fill_in,
    find_aggregated_labels,
    find_selectors,
    panels,
    recordings,
    sample_names,
)

NOT_SHOWN = {"aiokv_prompt_blocks": "the same as aiokv_prompt_tokens, in full blocks"}
"""Families without a panel, and why."""
SHOWN = [fill_in(expr) for panel in panels() for expr in panel.exprs]
RULES = [rule["expr"] for rule in (*recordings(), *alerts())]


def name_of(family: Family) -> str:
    return family.name


@pytest.mark.parametrize("expr", [*SHOWN, *RULES])
def test_a_query_selects_metrics_that_exist_by_labels_that_they_have(expr: str) -> None:
    selectors = find_selectors(expr)
    assert selectors
    for selector in selectors:
        assert selector.metric in LABELS
        assert selector.labels <= LABELS[selector.metric]


@pytest.mark.parametrize("expr", [*SHOWN, *RULES])
def test_a_query_sums_by_labels_that_its_metrics_have(expr: str) -> None:
    for labels, metrics in find_aggregated_labels(expr):
        assert all(labels <= LABELS[metric] for metric in metrics)


@pytest.mark.parametrize("family", FAMILIES, ids=name_of)
def test_a_family_is_on_the_dashboard(family: Family) -> None:
    asked = {selector.metric for expr in SHOWN for selector in find_selectors(expr)}
    is_shown = bool(asked & set(sample_names(family.name, kind=family.kind)))
    assert is_shown != (family.name in NOT_SHOWN), "shown, or named in NOT_SHOWN"


@pytest.mark.parametrize("name", SERVER)
def test_a_family_of_the_server_is_on_the_dashboard(name: str) -> None:
    asked = {selector.metric for expr in SHOWN for selector in find_selectors(expr)}
    assert asked & set(sample_names(name, kind=SERVER[name][0]))


def test_no_family_is_excused_that_does_not_exist() -> None:
    assert NOT_SHOWN.keys() <= {family.name for family in FAMILIES}
