"""The names, labels and texts of all families, checked against our own rules, two parsers and promtool."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from enum import Enum

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from aiokv import DeclineReason, DeferReason, Tier
from aiokv.backends.base import WakeMode
from aiokv.core.block_ages import GAP_BOUNDS
from aiokv.core.counters import (
    Closing,
    EventRefusal,
    EvictReason,
    HintClosing,
    HintExtent,
    LookupResult,
    Phase,
    RevokeReason,
    Source,
)
from aiokv.core.pool_values import SlotState
from aiokv.model.ids import Direction
from aiokv.model.plan import Outcome
from aiokv.observe.families import FAMILIES, Family, Kind
from aiokv.observe.stats import (
    LEASE_BUCKETS,
    STEP_BUCKETS,
    TRANSFER_BUCKETS,
    WAKE_BUCKETS,
    CancelStage,
    Degradation,
    EventKind,
    Invariant,
    LeaseTerm,
    Polls,
)
from tests.observe.support import Scrape, opened
from tests.runtime.support import finish_copies, prompt

BASE_UNITS = ("seconds", "bytes", "tokens", "blocks")
FORBIDDEN_WORDS = {"ms", "us", "ns", "milliseconds", "kb", "mb", "gb", "perc", "percent", "d2h", "h2d", "count"}
RATIOS = {"rate", "ratio", "hitrate", "usage"}
RESERVED_SUFFIXES = ("_total", "_count", "_sum", "_bucket", "_created", "_info")
MAX_BUCKETS = 16
MAX_SERIES = 700
"""A scrape of some 4 ms; with more, the thread that renders holds the interpreter too long."""
LABELS: dict[str, tuple[type[Enum], ...]] = {
    "source": (Source,),
    "phase": (Phase,),
    "result": (LookupResult, Polls),
    "stage": (CancelStage,),
    "bridge": (WakeMode,),
    "direction": (Direction,),
    "outcome": (Outcome,),
    "tier": (Tier,),
    "reason": (EvictReason, DeclineReason, DeferReason, Degradation, EventRefusal, Outcome, RevokeReason),
    "how": (Closing, HintClosing),
    "invariant": (Invariant,),
    "type": (EventKind,),
    "state": (SlotState, LeaseTerm, HintExtent),
}
OTHER_LABELS = {
    "version": {"0.1.0"},
    "backend": {"fake"},
    "block_tokens": {"16"},
}


def name_of(family: Family) -> str:
    return family.name


@pytest.fixture(scope="module")
def busy() -> tuple[Scrape, str]:
    """A scrape of a runtime that has done a little of everything, in both formats."""

    async def serve() -> tuple[Scrape, str]:
        async with opened(gpu_blocks=9, cpu_blocks=6, manual=False) as case:
            for seed in (*range(4), 0):
                async with case.kv.acquire(f"{seed}", prompt(3, seed=seed)) as lease:
                    lease.confirm(lease.num_tokens)
                await finish_copies(case)
            registry = CollectorRegistry()
            registry.register(case.kv.collector)
            text: bytes = generate_openmetrics(registry)  # type: ignore[no-untyped-call]  # the package types a part
            return Scrape(case.kv.collector), text.decode()

    return asyncio.run(serve())


@pytest.mark.parametrize("family", FAMILIES, ids=name_of)
def test_a_name_follows_the_rules(family: Family) -> None:
    words = family.name.split("_")
    assert re.fullmatch(r"aiokv(_[a-z0-9]+)+", family.name), "one prefix, snake case, no colon"
    assert not (FORBIDDEN_WORDS | RATIOS) & set(words)
    assert not family.name.endswith(RESERVED_SUFFIXES), "the exposition adds these itself"
    if family.unit:
        assert family.unit in BASE_UNITS
        assert words[-1] == family.unit
    elif "seconds" in words or "bytes" in words:
        assert family.name.endswith("_seconds_max")


@pytest.mark.parametrize("family", FAMILIES, ids=name_of)
def test_a_help_text_is_one_sentence_of_its_own(family: Family) -> None:
    assert family.help[0].isupper()
    assert family.help.endswith(".")
    assert "\n" not in family.help
    assert [other.help for other in FAMILIES].count(family.help) == 1


@pytest.mark.parametrize("family", FAMILIES, ids=name_of)
def test_labels_are_closed_enums(family: Family) -> None:
    assert len(set(family.labels)) == len(family.labels)
    assert set(family.labels) <= LABELS.keys() | OTHER_LABELS.keys()
    assert (family.kind is Kind.INFO) == (family.name == "aiokv_build")


def test_names_differ() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_every_family_is_shown_with_its_type_and_with_enum_members_only(busy: tuple[Scrape, str]) -> None:
    scrape, _ = busy
    shown = {family.name if family.kind is not Kind.INFO else f"{family.name}_info": family for family in FAMILIES}
    assert set(scrape.types) == set(shown)
    for name, family in shown.items():
        assert scrape.types[name] == ("gauge" if family.kind is Kind.INFO else family.kind.value)
    for label, enums in LABELS.items():
        assert scrape.values_of(label) <= {member.value for enum in enums for member in enum}, label
    for label, values in OTHER_LABELS.items():
        assert scrape.values_of(label) <= values


def test_series_are_few_and_none_says_when_it_was_created(busy: tuple[Scrape, str]) -> None:
    scrape, openmetrics = busy
    assert len(scrape.samples) <= MAX_SERIES
    assert "_created" not in scrape.text + openmetrics


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.kind is Kind.HISTOGRAM], ids=name_of)
def test_a_histogram_has_at_most_sixteen_rising_buckets(busy: tuple[Scrape, str], family: Family) -> None:
    scrape, _ = busy
    series: dict[frozenset[tuple[str, str]], dict[float, float]] = {}
    for (name, labels), value in scrape.samples.items():
        if name == f"{family.name}_bucket":
            own = frozenset(label for label in labels if label[0] != "le")
            series.setdefault(own, {})[float(dict(labels)["le"])] = value
    assert series
    for own, buckets in series.items():
        assert 1 < len(buckets) <= MAX_BUCKETS
        counts = [buckets[bound] for bound in sorted(buckets)]
        assert counts == sorted(counts)
        assert buckets[float("inf")] == scrape.samples[f"{family.name}_count", own]


@pytest.mark.parametrize("bounds", [TRANSFER_BUCKETS, LEASE_BUCKETS, STEP_BUCKETS, WAKE_BUCKETS, GAP_BOUNDS])
def test_bounds_rise(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_openmetrics_parses_with_units_and_the_same_values(busy: tuple[Scrape, str]) -> None:
    scrape, openmetrics = busy
    families = list(parse_openmetrics(openmetrics))  # type: ignore[no-untyped-call]  # the package types a part
    assert {family.name: family.unit for family in families} == {family.name: family.unit for family in FAMILIES}
    values = {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}
    assert values == scrape.samples


def test_promtool_has_nothing_to_say(busy: tuple[Scrape, str]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=busy[0].text, capture_output=True, text=True, timeout=30, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
