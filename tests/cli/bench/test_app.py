"""The `bench` command: what it lists, how it answers, and that it loads only what it runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer

from aiokv.cli.bench.report import BenchReport, Judgement, conclude
from tests.cli.test_main import run


def test_help_names_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "--help") == 0
    shown = capsys.readouterr().out
    assert "soak" in shown
    wanted = ("convoy", "compare", "replay", "hash", "lookup", "lifecycle", "hold", "memory", "copy", "submit")
    assert all(name in shown for name in (*wanted, "bridge", "events", "scale"))


def test_an_unknown_benchmark_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "soap", "--json") == 2
    assert capsys.readouterr().out == ""


LISTED_WITHOUT_THE_RUNS = """
import sys
from aiokv.cli.main import main
try:
    main(["bench", "--help"])
finally:
    names = ("soak", "convoy", "compare", "copy", "submit", "bridge", "events", "holds", "footprint", "replay", "scale")
    runs = {f"aiokv.cli.bench.{name}.runner" for name in names}
    loaded = {"torch", "aiokv.cli.bench.operations", *runs} & set(sys.modules)
    assert not loaded, loaded
"""


def test_a_benchmark_is_loaded_when_it_runs() -> None:
    done = subprocess.run([sys.executable, "-c", LISTED_WITHOUT_THE_RUNS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def report_of(*complaints: str, judgement: Judgement = Judgement.BY_PROMISES) -> BenchReport:
    figures = {"blocks": 12_345, "is_so": True, "us": 23_456.7, "way": {"ms": 1.5, "[odd]": "[red]"}}
    return BenchReport(
        benchmark="sample", schema_version=3, figures=figures, complaints=complaints, judgement=judgement
    )


@pytest.mark.parametrize(("complaints", "status"), [((), 0), (("one", "two"), 1)])
def test_a_report_is_one_object_and_its_complaints_decide_the_status(
    complaints: tuple[str, ...], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        conclude(report_of(*complaints), as_json=True)
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert ended.value.exit_code == status
    assert (report["schema_version"], report["benchmark"], report["ok"]) == (3, "sample", not complaints)
    assert report["complaints"] == list(complaints)
    assert captured.err.splitlines() == [f"aiokv: bench sample: {complaint}" for complaint in complaints]


def test_people_read_a_row_per_figure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        conclude(report_of(), as_json=False)
    shown = capsys.readouterr().out
    assert "12,345" in shown
    assert "23,457" in shown
    assert "way.[odd]" in shown
    assert "[red]" in shown
    assert "as promised" in shown


def test_a_benchmark_that_judges_nothing_speaks_of_no_promise(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        conclude(report_of(judgement=Judgement.NONE), as_json=False)
    shown = capsys.readouterr().out
    assert ended.value.exit_code == 0
    assert "12,345" in shown
    assert "promised" not in shown


def test_people_read_a_row_per_case_with_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    cases = ({"size": 5, "parts": {"a": 1.5, "b": 2}, "none": {}}, {"size": 6_000, "parts": {"a": 2.5}, "none": {}})
    report = BenchReport(benchmark="sample", schema_version=3, figures={}, complaints=(), cases=cases)
    with pytest.raises(typer.Exit):
        conclude(report, as_json=False)
    shown = capsys.readouterr().out
    header, first, second = (line.split() for line in shown.splitlines()[2:5])
    assert header == ["size", "parts"]
    assert (first, second) == (["5", "a", "1.5,", "b", "2"], ["6,000", "a", "2.5"])


def test_programs_read_a_list_of_cases(capsys: pytest.CaptureFixture[str]) -> None:
    report = BenchReport(
        benchmark="sample", schema_version=3, figures={"n": 1}, complaints=(), cases=({"size": 5, "parts": {"a": 1.5}},)
    )
    with pytest.raises(typer.Exit):
        conclude(report, as_json=True)
    assert json.loads(capsys.readouterr().out)["cases"] == [{"size": 5, "parts": {"a": 1.5}}]
