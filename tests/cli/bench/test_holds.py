"""`aiokv bench hold`: every way of asking is timed by what it is, and what is over a budget is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aiokv.cli.bench.holds.runner import complaints_about
from aiokv.cli.bench.holds.settings import HoldSettings, Turn
from tests.cli.test_main import run

CLIENTS, TOKENS, ROUNDS, SLOTS, CHURN = 3, 1024, 2, 512, 1024
SETTINGS = HoldSettings(clients=CLIENTS, tokens=TOKENS, rounds=ROUNDS, churn_slots=SLOTS, churn_blocks=CHURN)
REQUESTS = CLIENTS * (1 + ROUNDS * len(Turn))


def as_arguments(settings: HoldSettings) -> list[str]:
    names = ("clients", "tokens", "rounds", "churn_slots", "churn_blocks")
    return [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(settings, name)))]


def test_every_request_is_served_in_its_way_and_every_step_is_of_some_kind(capsys: pytest.CaptureFixture[str]) -> None:
    status = run("bench", "hold", *as_arguments(SETTINGS), "--json")
    report = json.loads(capsys.readouterr().out)
    assert status == (0 if report["ok"] else 1)
    assert not [said for said in report["complaints"] if "hold_ms" not in said], "times depend on the machine"
    mixed, churned = report["mixed"], report["churn"]
    assert mixed["requests"] == REQUESTS
    assert mixed["cold"] == CLIENTS * (1 + ROUNDS)
    assert all(mixed[turn.value] == CLIENTS * ROUNDS for turn in Turn if turn is not Turn.COLD)
    assert mixed["gpu_tokens"] > mixed["cpu_tokens"] > 0
    assert churned["requests"] == SETTINGS.churn_prompts
    assert churned["gpu_evicted"] >= CHURN
    assert churned["cpu_evicted"] > 0
    for phase in ("mixed", "churn"):
        kinds, longest = report[f"{phase}_kinds"], report[f"{phase}_longest"]
        assert sum(kind["steps"] for kind in kinds.values()) == report[phase]["steps"]
        assert len(longest) == 10
        assert longest[0]["ms"] == report[phase]["hold_ms_max"] == max(kind["ms_max"] for kind in kinds.values())
        assert {step["step"] for step in longest} <= set(kinds)


def test_public_calls_coroutines_slices_and_ticks_are_kinds_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    run("bench", "hold", *as_arguments(SETTINGS), "--json")
    kinds = json.loads(capsys.readouterr().out)["mixed_kinds"]
    assert kinds["Lease.finish"]["steps"] + kinds["Lease.release"]["steps"] == REQUESTS
    assert kinds["Lease.extend"]["steps"] == kinds["Lease.release"]["steps"] == CLIENTS * ROUNDS
    assert kinds["KVRuntime.try_acquire"]["steps"] >= CLIENTS * ROUNDS
    assert kinds["Lease.append"]["steps"] % (CLIENTS * ROUNDS) == 0
    assert {"AcquireCall.send", "KVRuntime.prepare_keys", "Offloader._work", "Bridge._tick"} <= set(kinds)


def figures(**changes: float) -> dict[str, Any]:
    phase = {
        "hold_ms_p99": 1.0,
        "hold_ms_p999": 2.0,
        "requests": max(REQUESTS, SETTINGS.churn_prompts),
        "gpu_tokens": 1,
        "cpu_tokens": 1,
        "gpu_evicted": CHURN,
    }
    return {"mixed": phase | changes, "churn": phase}


def test_what_keeps_its_budgets_is_not_complained_about() -> None:
    assert complaints_about(figures(), settings=SETTINGS) == ()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("hold_ms_p99", 1.01, "mixed: hold_ms_p99 is 1.01, over 1.0"),
        ("hold_ms_p999", 2.5, "mixed: hold_ms_p999 is 2.5, over 2.0"),
        ("cpu_tokens", 0, "mixed: cpu_tokens is 0, at least 1 were to be seen"),
        ("requests", 7, f"mixed: requests is 7, at least {REQUESTS} were to be seen"),
    ],
)
def test_a_budget_that_is_not_kept_and_a_load_that_was_none_are_told(name: str, value: float, said: str) -> None:
    assert complaints_about(figures(**{name: value}), settings=SETTINGS) == (said,)


def test_the_pools_have_room_for_every_client_and_not_for_all_they_ask_for() -> None:
    settings = HoldSettings()
    grown = settings.blocks + settings.grown_tokens // 16
    assert settings.clients * grown < settings.gpu_blocks < 2 * settings.clients * settings.blocks
    assert settings.churn_clients * settings.blocks <= settings.churn_slots // 2
    assert settings.churn_prompts * settings.blocks >= settings.churn_slots + settings.churn_blocks


def test_a_single_short_conversation_has_room_to_grow(capsys: pytest.CaptureFixture[str]) -> None:
    """The smallest prompt, by itself, grows and generates more than it began with."""
    few = HoldSettings(clients=1, tokens=64, rounds=2, churn_slots=16, churn_blocks=1)
    run("bench", "hold", *as_arguments(few), "--json")
    captured = capsys.readouterr()
    assert json.loads(captured.out)["mixed"]["growing"] == 2
    assert json.loads(captured.out)["churn"]["requests"] == few.churn_prompts


def test_a_prompt_that_the_churned_pool_never_holds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "hold", "--tokens", "1025", "--churn-slots", "64", "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "give more --churn-slots" in captured.err


@pytest.mark.parametrize("option", ["--clients", "--churn-slots"])
def test_pools_that_no_machine_can_hold_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "hold", option, str(10**13), "--json") == 2
    assert "are available" in capsys.readouterr().err
