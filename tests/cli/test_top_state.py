"""What of a live state is understood, what is refused, and which rates follow from two of them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Final

import pytest

from aiokv import CacheGeometry, FullAttention, KVRuntime, RuntimeConfig
from aiokv.cli.top_state import NotLiveState, Rates, find_rates, parse_state
from aiokv.testing import FakeBackend
from tests.cli.top_server import LIVE, changed

FREE: Final = {"version", "backend", "degraded", "cells", "cell_slots", "prompt_tokens", "transfers", "evictions"}
"""Members that may be any text, any list or any object."""


def test_live_state_is_read_member_by_member() -> None:
    state = parse_state(LIVE)
    assert state.tiers["gpu"].states == {"free": 123, "reserved": 45, "resident": 855, "quarantined": 0}
    assert (state.active, state.waiting, state.overdue) == (6, 2, 1)
    assert state.transfers["store"].failed_blocks == 3
    assert [lease.request_id for lease in state.oldest] == [f"req-{number}" for number in range(1, 8)]


async def test_what_a_runtime_says_of_itself_is_understood() -> None:
    geometry = CacheGeometry(groups=(FullAttention("full", block_size=16),), hash_block_size=16)
    config = RuntimeConfig(geometry=geometry, gpu_blocks=9, cpu_blocks=8, backend=FakeBackend())
    async with KVRuntime(config) as kv, kv.acquire("req-1", list(range(40))) as lease:
        state = parse_state(kv.collector.live().as_json())
        assert state.tiers["gpu"].slots == 8
        assert sum(state.tiers["gpu"].states.values()) == 8
        assert state.tiers["cpu"].states["free"] == 8
        assert state.prompt_tokens == {"gpu": 0, "cpu": 0, "compute": 40}
        assert [(old.request_id, old.blocks) for old in state.oldest] == [("req-1", 3)]
        assert lease.state.value == state.oldest[0].state


def test_tier_and_direction_that_are_not_configured_are_absent() -> None:
    live = deepcopy(LIVE)
    del live["tiers"]["cpu"], live["prompt_tokens"]["cpu"], live["evictions"]["cpu"], live["transfers"]
    live["transfers"] = {}
    state = parse_state(live)
    assert list(state.tiers) == ["gpu"]
    assert state.transfers == {}
    assert list(state.prompt_tokens) == ["gpu", "compute"]


def test_members_of_later_versions_are_ignored() -> None:
    live = changed(weather="fine", tiers__disk={"slots": "many"}, transfers__load__ended_blocks__late=5)
    assert parse_state(live) == parse_state(LIVE)


@pytest.mark.parametrize("version", [2, 10**30, 0, -1, True, "1", None, 1.0])
def test_another_version_is_refused(version: object) -> None:
    with pytest.raises(NotLiveState):
        parse_state(changed(schema_version=version))


def test_newer_version_says_what_to_do() -> None:
    with pytest.raises(NotLiveState, match=r"version 2 .* this aiokv 1"):
        parse_state(changed(schema_version=2))


@pytest.mark.parametrize("document", [None, [], 1, "live", {}, {"schema_version": 1}, [LIVE]])
def test_other_documents_are_refused(document: object) -> None:
    with pytest.raises(NotLiveState):
        parse_state(document)


def _paths(part: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:  # noqa: ANN401  # JSON
    """Every member of the objects of a document."""
    if not isinstance(part, dict):
        return []
    return [deeper for name, member in part.items() for deeper in ((*path, name), *_paths(member, (*path, name)))]


@pytest.mark.parametrize("path", _paths(LIVE), ids=".".join)
@pytest.mark.parametrize("value", [-1, "", None, [None], {"a": 1}, 2**63, -0.5], ids=repr)
def test_a_member_of_another_type_is_refused_or_means_nothing(path: tuple[str, ...], value: object) -> None:
    live = changed(**{"__".join(path): value})
    try:
        state = parse_state(live)
    except NotLiveState as error:
        assert "\n" not in str(error)
        return
    assert path[-1] in FREE
    assert state.tiers


def test_rates_are_what_happened_a_second() -> None:
    before = parse_state(LIVE)
    after = parse_state(
        changed(uptime_s=14.5, prompt_tokens__gpu=3500, transfers__load__bytes=501 << 20, evictions__gpu=80)
    )
    rates = find_rates(before, after)
    assert rates == Rates(
        interval_s=2.0,
        prompt_tokens={"gpu": 250.0, "cpu": 0.0, "compute": 0.0},
        transfer_bytes={"load": (1 << 20) / 2, "store": 0.0},
        transfer_blocks={"load": 0.0, "store": 0.0},
        failed_blocks={"load": 0.0, "store": 0.0},
        evictions={"gpu": 5.0, "cpu": 0.0},
    )


@pytest.mark.parametrize(
    "after",
    [
        {"uptime_s": 12.5},
        {"uptime_s": 1.0},
        {"uptime_s": 99.0, "prompt_tokens__gpu": 2999},
        {"uptime_s": 99.0, "transfers__store__ended_blocks__ok": 0},
        {"uptime_s": 99.0, "prompt_tokens": {"gpu": 3000, "compute": 4000}},
    ],
)
def test_server_that_started_anew_has_no_rates_rather_than_negative_ones(after: dict[str, object]) -> None:
    assert find_rates(parse_state(LIVE), parse_state(changed(**after))) is None


def test_total_of_zero_that_is_gone_is_of_another_server() -> None:
    before = parse_state(changed(prompt_tokens__cpu=0))
    after = parse_state(changed(uptime_s=99.0, prompt_tokens={"gpu": 3000, "compute": 4000}))
    assert find_rates(before, after) is None


def test_of_endless_leases_so_many_are_read_as_could_be_shown() -> None:
    lease = {"request_id": "r", "age_s": 1, "state": "ready", "blocks": 1}
    assert len(parse_state(changed(leases__oldest=[lease] * 10_000)).oldest) == 64


@pytest.mark.parametrize(("before", "after"), [(0.0, 5e-324), (0.0, 1e-300), (12.5, 12.500000000000002)])
def test_time_too_short_to_be_told_is_none_between_two_looks(before: float, after: float) -> None:
    """A rate that no number can hold has no place in a picture."""
    many = changed(uptime_s=after, prompt_tokens__gpu=2**62, transfers__load__bytes=2**62)
    assert find_rates(parse_state(changed(uptime_s=before)), parse_state(many)) is None


def test_a_millisecond_is_a_time_between_two_looks() -> None:
    rates = find_rates(parse_state(changed(uptime_s=14.5)), parse_state(changed(uptime_s=14.501, evictions__gpu=71)))
    assert rates is not None
    assert rates.evictions["gpu"] == pytest.approx(1000)
