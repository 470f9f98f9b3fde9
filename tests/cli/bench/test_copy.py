"""`aiokv bench copy`: every byte arrives, however slots lie; speed is told beside a memcpy of the same run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aiokv.backends.base import EventStatus
from aiokv.backends.cuda_batch import BatchCopier
from aiokv.backends.host import HostBackend
from aiokv.cli.bench.copy.runner import complaints_about
from aiokv.cli.bench.copy.settings import Adjacency
from aiokv.cli.bench.copy.world import opened_world
from aiokv.model.ids import Direction
from tests.cli.test_main import run

CASES = {
    (direction.value, adjacency.value, size)
    for direction in Direction
    for adjacency in Adjacency
    for size in (4096, 1000)
}


def test_each_case_is_told_and_every_byte_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--block-bytes", "4096", "--block-bytes", "1000", "--mib", "1", "--repeats", "2", "--backend", "host")
    assert run("bench", "copy", *arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema_version"], report["ok"], report["driver"]) == (2, True, "host")
    assert {(case["direction"], case["slots"], case["block_bytes"]) for case in report["cases"]} == CASES
    for case in report["cases"]:
        assert case["wrong_blocks"] == 0
        assert 0.0 < case["ratio"]["p10"] <= case["ratio"]["median"] <= case["ratio"]["p90"]
        assert case["shared_python"]["median"] > 0.0, "the other thread has made no progress: the GIL was held"


ON_DEVICE = ("--block-bytes", "4096", "--block-bytes", "1000", "--mib", "1", "--repeats", "2")


@pytest.mark.usefixtures("fake_device")
def test_on_a_device_each_case_is_told_and_every_byte_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "copy", *ON_DEVICE, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema_version"], report["ok"], report["driver"]) == (2, True, "fake")
    assert {(case["direction"], case["slots"], case["block_bytes"]) for case in report["cases"]} == CASES
    for case in report["cases"]:
        assert case["wrong_blocks"] == 0
        assert 0.0 < case["ratio"]["p10"] <= case["ratio"]["median"] <= case["ratio"]["p90"]


@pytest.mark.usefixtures("fake_device")
def test_on_a_device_a_copy_that_is_not_made_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BatchCopier, "enqueue", lambda _copier, _copies, *, stream: None)
    assert run("bench", "copy", *ON_DEVICE, "--json", "--backend", "cuda") == 1
    report = json.loads(capsys.readouterr().out)
    assert min(case["wrong_blocks"] for case in report["cases"]) > 0


@pytest.mark.parametrize(("size", "why"), [("63", "64"), (str(2 << 20), "no more than the 1 MiB")])
def test_a_block_that_cannot_be_measured_is_refused(size: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "copy", "--block-bytes", size, "--mib", "1", "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert why in captured.err


def test_arenas_that_no_machine_can_hold_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "copy", "--mib", str(10**12), "--json") == 2
    assert "are available" in capsys.readouterr().err


def test_a_copy_that_is_not_made_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        """A copy that is said to have been made."""

        def query(self) -> EventStatus:
            return EventStatus.DONE

    with opened_world(block_bytes=4096, round_bytes=1 << 20) as world:
        assert world.count_wrong(Direction.STORE, Adjacency.SCATTERED) == 0
        monkeypatch.setattr(HostBackend, "submit", lambda _backend, _batch: Nothing())
        assert world.count_wrong(Direction.STORE, Adjacency.SCATTERED) == world.blocks
        assert world.count_wrong(Direction.LOAD, Adjacency.ADJACENT) == world.blocks


def case(block_bytes: int, **figures: float) -> dict[str, Any]:
    where = {"direction": "load", "slots": "adjacent", "block_bytes": block_bytes}
    return {**where, "best_ratio": 1.0, "wrong_blocks": 0, **figures}


def test_wrong_bytes_and_slow_large_blocks_are_complaints() -> None:
    slow_but_small, just_fast_enough = case(32 << 10, best_ratio=0.3), case(64 << 10, best_ratio=0.9)
    assert complaints_about([slow_but_small, just_fast_enough]) == ()
    assert complaints_about([case(64 << 10, best_ratio=0.89), case(1024, wrong_blocks=3)]) == (
        "load, adjacent, 1024 bytes a block: 3 blocks are wrong",
        "load, adjacent, 65536 bytes a block: 0.89 of a plain memcpy, not 0.9",
    )
