"""`aiokv bench events`: readers are told of every block, slow ones what they have missed, and a scrape is elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aiokv.cli.bench.events.runner import complaints_about
from tests.cli.test_main import run

BLOCKS, REPEATS, POOL_PROMPTS = 24, 3, 4
ROUNDS = 2 * POOL_PROMPTS + 1 + REPEATS


def test_readers_hear_everything_and_a_slow_one_holds_nobody_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "events", "--blocks", str(BLOCKS), "--repeats", str(REPEATS), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema_version"], report["ok"], report["blocks"]) == (1, True, BLOCKS)
    by_listeners = {case["listeners"]: case for case in report["cases"]}
    for case in by_listeners.values():
        assert case["unheard_blocks"] == 0
        assert case["us_per_block"]["median"] > 0.0
    assert by_listeners["none"]["events"] == 0
    assert by_listeners["one"]["events"] == by_listeners["four"]["events"] >= 2 * ROUNDS
    slow = by_listeners["slow"]
    assert slow["dropped"] > 0
    assert slow["dropped"] + slow["kept"] == slow["events"]
    assert report["scrape"]["on_loop"] == 0
    assert report["scrape"]["page_bytes"] > 1000
    assert report["bytes_per_token"]["kept_by_runtime"] > 4.0  # the tokens themselves
    assert report["bytes_per_token"]["waiting_for_a_reader"] > 4.0


def complaints(*, unheard: int = 0, kept: int = 4, on_loop: int = 0) -> tuple[str, ...]:
    cases: list[dict[str, Any]] = [
        {"listeners": "one", "unheard_blocks": unheard, "events": 10, "dropped": 0, "kept": 0},
        {"listeners": "slow", "unheard_blocks": 0, "events": 10, "dropped": 6, "kept": kept},
    ]
    return complaints_about({"scrape": {"on_loop": on_loop}}, cases=cases)


def test_what_is_not_told_is_a_complaint() -> None:
    assert complaints() == ()
    assert complaints(unheard=3) == ("listeners one: 3 blocks were not told, or told twice",)
    assert complaints(kept=3) == ("a slow reader was told of 9 events of 10",)
    assert complaints(on_loop=1) == ("a scrape has run on the loop",)
