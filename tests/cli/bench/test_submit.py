"""`aiokv bench submit`: each batch is handed over, timed, and copied."""

from __future__ import annotations

import json

import pytest

from tests.cli.test_main import run


def test_each_size_is_told_in_both_directions(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "submit", "--copies", "1", "--copies", "300", "--repeats", "3", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema_version"], report["ok"], report["driver"], report["repeats"]) == (1, True, "host", 3)
    assert {(case["direction"], case["slots"], case["copies"]) for case in report["cases"]} == {
        (direction, slots, copies)
        for direction in ("load", "store")
        for slots in ("adjacent", "scattered")
        for copies in (1, 300)
    }
    for case in report["cases"]:
        assert case["us"]["median"] == pytest.approx(case["copies"] * case["us_per_block"], rel=0.01)
        assert case["us"]["median"] > 0.0


def test_an_unknown_backend_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "submit", "--backend", "tape", "--json") == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "says"), [(("--copies", str(10**12)), "are available"), (("--repeats", str(10**20)), "--repeats")]
)
def test_what_no_machine_can_hold_is_refused(
    arguments: tuple[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", "submit", *arguments, "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in " ".join(captured.err.split())
