"""`aiokv bench bridge`: so many are in flight as it says, nothing wakes an idle loop, and what is a complaint."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest

from aiokv.backends.base import EventStatus
from aiokv.cli.bench import device
from aiokv.cli.bench.bridge.clocked import ClockedBackend
from aiokv.cli.bench.bridge.rounds import opened_crowd
from aiokv.cli.bench.bridge.runner import complaints_about
from aiokv.cli.bench.bridge.settings import BridgeSettings
from aiokv.model.ids import Direction
from tests.backends.support import load
from tests.cli.test_main import run
from tests.fakecuda import FakeDriver


def measured(capsys: pytest.CaptureFixture[str], *, backend: str) -> dict[str, Any]:
    few = ("--in-flight", "1", "--in-flight", "40", "--completions", "25", "--repeats", "2", "--copy-us", "500")
    arguments = (*few, "--idle-ms", "50", "--backend", backend, "--json")
    assert run("bench", "bridge", *arguments) in {0, 1}  # a busy machine has late loops
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def check(report: dict[str, Any], *, driver: str) -> None:
    assert (report["schema_version"], report["driver"]) == (2, driver)
    assert [case["in_flight"] for case in report["cases"]] == [1, 40]
    for case in report["cases"]:
        assert case["completions"] == 50
        assert case["least_in_flight"] == case["in_flight"]
        assert 0.0 < case["latency_us"]["p50"] <= case["latency_us"]["p90"] <= case["latency_us"]["p99"]
        assert 0.0 < case["loop_share"] <= 1.0
    assert report["idle"]["polls"] == 0
    assert report["idle"]["loop_share"] < min(case["loop_share"] for case in report["cases"])
    assert report["ratio"] > 0.0


def test_as_many_are_in_flight_as_it_says_and_an_idle_loop_sleeps(capsys: pytest.CaptureFixture[str]) -> None:
    report = measured(capsys, backend="clocked")
    check(report, driver="clocked")
    assert [case["timed"] for case in report["cases"]] == [50, 50]


def test_the_cuda_backend_is_measured_on_the_fake_driver(
    capsys: pytest.CaptureFixture[str], fake_device: FakeDriver
) -> None:
    """The ends of nearly all copies are seen; where the loop came too late to see one, that is no latency."""
    report = measured(capsys, backend="auto")
    check(report, driver="fake")
    assert min(case["timed"] for case in report["cases"]) >= 25
    assert fake_device.calls("cuMemcpyBatchAsync") > 100


@pytest.mark.usefixtures("fake_device")
def test_without_a_fake_driver_a_clock_is_measured_and_cuda_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where aiokv is installed from a wheel."""
    monkeypatch.setattr(device, "CHECKOUT", tmp_path)
    assert measured(capsys, backend="auto")["driver"] == "clocked"
    assert run("bench", "bridge", "--backend", "cuda", "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "need the fake CUDA driver of a checkout" in " ".join(captured.err.split())


def test_a_terminal_of_80_columns_shows_a_line_for_each_number_in_flight(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    sizes = ("--in-flight", "1", "--in-flight", "10000", "--completions", "5", "--repeats", "1", "--copy-us", "500")
    assert run("bench", "bridge", *sizes, "--idle-ms", "20", "--backend", "clocked") in {0, 1}
    shown = capsys.readouterr().out
    assert "…" not in shown
    lines = shown.splitlines()
    start = next(number for number, line in enumerate(lines) if "in flight" in line)
    one, many = (line.split() for line in lines[start + 1 : start + 3])
    assert lines[start].split("  ")[-1].strip() == "loop share"
    assert (one[:4], many[:4]) == (["1", "1", "5", "5"], ["10,000", "10,000", "5", "5"])
    assert len(one) == len(many) == 9
    assert all(0.0 < float(cell.replace(",", "")) for cell in (*one[4:8], *many[4:8]))


def figures(*, ratio: float = 1.0, polls: int = 0) -> dict[str, Any]:
    return {"ratio": ratio, "idle": {"polls": polls}}


def test_late_wake_ups_and_polls_of_nothing_are_complaints() -> None:
    assert complaints_about(figures(ratio=1.3)) == ()
    assert len(complaints_about(figures(ratio=1.31))) == 1
    assert complaints_about(figures(polls=2)) == ("2 polls with nothing in flight",)


def test_copies_of_the_clocked_device_end_one_after_the_other_and_not_before_they_may() -> None:
    backend = ClockedBackend(copy_s=1000.0)
    first, second = (backend.submit(load({1: 1})) for _ in range(2))
    assert first.query() is second.query() is EventStatus.PENDING
    backend.start()
    assert second.done_at - first.done_at == pytest.approx(1000.0)
    assert first.query() is EventStatus.PENDING
    assert backend.eta_seconds(Direction.LOAD, 0) == 1000.0
    backend.hurry()
    assert first.query() is second.query() is EventStatus.DONE
    assert backend.submit(load({1: 1})).query() is EventStatus.DONE


async def test_a_round_that_is_broken_off_leaves_no_request_behind() -> None:
    """As a Ctrl-C does."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    settings = BridgeSettings(in_flight=(20,), completions=10**4, copy_us=2_000)
    with pytest.raises(TimeoutError):
        async with opened_crowd(20, settings=settings) as crowd, asyncio.timeout(0.1):
            before = asyncio.all_tasks()
            await crowd.run_round()
    assert asyncio.all_tasks() <= before
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []
