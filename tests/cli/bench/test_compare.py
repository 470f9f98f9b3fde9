"""`aiokv bench compare`: both sides in turns, floors that decide the status, and no process left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from aiokv import ConfigError
from aiokv.cli.bench.cases import Layout, Model, Operation
from aiokv.cli.bench.compare.pairs import FLOORS, Extent, all_pairs, floor_of, requests_of
from aiokv.cli.bench.compare.process import WorkerFailed, started
from aiokv.cli.bench.compare.runner import take_turns
from aiokv.cli.bench.compare.settings import CompareSettings
from tests.cli.bench.fake_peer import AGES, Fake, compared, lives_on
from tests.cli.test_main import run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="workers are sessions of their own, as POSIX has them")

PEER_PYTHON = os.environ.get("AIOKV_PEER_PYTHON", "")
(PAIR,) = all_pairs(operations=[Operation.STORE], models=[Model.FULL], blocks=[1024], pool_slots=2048)


def test_a_slow_peer_is_as_promised(fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]) -> None:
    peer = fake()
    assert compared(peer.path, "--blocks", "64", "--blocks", "16", "--operation", "release", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema_version"], report["ok"], report["peer"], report["gc"]) == (1, True, "fake 1", "off")
    at_64, at_16 = report["cases"]
    assert (at_64["blocks"], at_64["floor"], at_16["blocks"], at_16["floor"]) == (64, 1.0, 16, None)
    assert (at_64["requests"], at_16["requests"]) == (1, 7)
    for pair in (at_64, at_16):
        rounds = 2 * (2048 // (pair["blocks"] * pair["requests"]))
        assert pair["ours"]["rounds"] == pair["peer"]["rounds"] == rounds
        assert pair["peer"]["us"] == pair["peer"]["us_p10"] == AGES / 1e3
        assert pair["ours"]["us_p10"] <= pair["ours"]["us"] <= pair["ours"]["us_p90"]
        assert pair["ratio"] == pytest.approx(pair["peer"]["us"] / pair["ours"]["us"], rel=0.01)
    assert not [pid for pid in peer.pids if lives_on(pid)]


def test_each_missed_floor_is_a_complaint(fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]) -> None:
    peer = fake(on_rounds="say(ns=[1] * question['rounds'])")
    assert compared(peer.path, "--blocks", "64", "--operation", "reserve", "--operation", "lookup", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    missed = [complaint.partition(",")[0] for complaint in report["complaints"]]
    assert missed == ["lookup gpu", "lookup cpu", "lookup interleaved", "reserve miss"]


def test_people_read_a_row_per_pair_and_how_the_sides_differ(
    fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(fake().path, "--blocks", "64", "--operation", "lookup") == 0
    shown = capsys.readouterr().out
    assert "lookup interleaved (1)" in shown
    assert "(1) the peer cannot use a prefix that interleaves tiers" in shown
    assert "as promised" in shown
    assert "8 x 64" not in shown


def test_people_read_how_many_requests_a_round_has(
    fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--blocks", "16", "--blocks", "128", "--operation", "release")
    assert compared(fake().path, *few) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "release gpu full 7 x 16 " in shown
    assert "release gpu full 128 " in shown
    assert "times are those of one" in shown


def test_the_peer_is_asked_for_what_it_can_do_and_sees_none_of_our_modules(
    fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("/elsewhere", os.environ.get("PYTHONPATH", ""))))
    peer = fake()
    assert compared(peer.path, "--blocks", "100", "--operation", "lookup", "--operation", "load", "--json") == 0
    opened = [question["open"] for question in peer.asked if "open" in question]
    assert [(case["operation"], case["layout"]) for case in opened] == [
        ("lookup", "gpu"), ("lookup", "cpu"), ("lookup", "cpu"), ("load", "cpu"),
        ("load-unregistered", "cpu"), ("load-whole", "cpu"),
    ]  # fmt: skip
    sizes = {(case["model"], case["blocks"], case["requests"], case["pool_slots"]) for case in opened}
    assert sizes == {("full", 100, 1, 300)}
    assert peer.notes[0][1]["PYTHONPATH"] is None
    floors = [pair["floor"] for pair in json.loads(capsys.readouterr().out)["cases"]]
    assert floors == [1.0, 1.0, 1.0, 1.0, None, None]


async def test_the_two_sides_take_turns_and_the_first_is_dropped(fake: Callable[..., Fake]) -> None:
    grows = "say(ns=[1000 * sum('rounds' in n for _, n in map(json.loads, open({!r})))] * question['rounds'])"
    log = str(fake().log)
    sides = [fake(name=name, on_rounds=grows.format(log)) for name in ("ours", "peer")]
    async with (
        started([str(sides[0].path)], side="ours", environment=os.environ, timeout_s=20) as ours,
        started([str(sides[1].path)], side="peer", environment=os.environ, timeout_s=20) as peer,
    ):
        result = await take_turns(PAIR, ours=ours, peer=peer, repeats=3)
    turns = [name for name, what in sides[0].notes if "rounds" in what]
    assert turns == ["ours", "peer"] * 4
    assert result.ours_ns == (3000, 3000, 5000, 5000, 7000, 7000)
    assert result.peer_ns == (4000, 4000, 6000, 6000, 8000, 8000)
    assert result.ratio == pytest.approx(6 / 5)
    assert not [pid for pid in sides[0].pids if lives_on(pid)]


@pytest.mark.parametrize(
    ("part", "instead", "said"),
    [
        ("greeting", "sys.exit('no such luck')", "ended with status 1: no such luck"),
        ("greeting", "print('Welcome!', flush=True)", "answered 'Welcome!\\n', which is no object"),
        ("greeting", "print('x' * 1_000_000, flush=True)", "is no line of JSON"),
        ("greeting", "time.sleep(300)", "did not answer within 3 s"),
        ("on_open", "say(error='KeyError: 7')", "failed: KeyError: 7"),
        ("on_open", "os._exit(3)", "ended with status 3"),
        ("on_rounds", "time.sleep(300)", "did not answer within 3 s"),
        ("on_rounds", "say(ns=[5])", "answered '[5]', not 2 times"),
        ("on_rounds", "say(ns=['5'] * question['rounds'])", "not 2 times"),
        ("on_rounds", "os.kill(os.getpid(), 9)", "ended with status -9"),
    ],
)
async def test_a_worker_that_fails_is_named_and_leaves_no_process(
    part: str, instead: str, said: str, fake: Callable[..., Fake]
) -> None:
    sides = [fake(name="ours"), fake(**{part: instead})]
    timeout_s = 3 if "within" in said else 50
    with pytest.raises(WorkerFailed, match=re.escape(said)) as failed:
        async with (
            started([str(sides[0].path)], side="ours", environment=os.environ, timeout_s=50) as ours,
            started([str(sides[1].path)], side="peer", environment=os.environ, timeout_s=timeout_s) as peer,
        ):
            await take_turns(PAIR, ours=ours, peer=peer, repeats=2)
    assert failed.value.side == "peer"
    assert len(sides[0].pids) == 4
    assert not [pid for pid in sides[0].pids if lives_on(pid)]


def test_a_failed_worker_fails_the_command(fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(fake(on_open="os._exit(3)").path, "--blocks", "64", "--json") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip() == "aiokv: the worker of the peer ended with status 3"


@pytest.mark.parametrize("what", ["nothing", "a directory", "not executable"])
def test_an_interpreter_that_cannot_be_run_is_the_callers_mistake(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "python"
    if what == "a directory":
        path.mkdir()
    elif what == "not executable":
        path.write_text("#!/bin/sh\n")
    assert compared(path, "--blocks", "64", "--json") == 2
    reason = "No such file or directory" if what == "nothing" else "Permission denied"
    assert capsys.readouterr().err == f"aiokv: {str(path)!r} cannot be run: {reason}\n"


@pytest.mark.skipif(find_spec("vllm") is not None, reason="this environment has vLLM")
def test_an_environment_without_vllm_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(Path(sys.executable), "--blocks", "64") == 1
    assert "No module named 'vllm'" in capsys.readouterr().err


def test_an_installed_package_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run this in a checkout"):
        CompareSettings(peer_python=Path(sys.executable), peer_script=tmp_path / "tests/bench/peer_worker.py")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--operation", "lifecycle"), "lifecycle is not compared"),
        (("--blocks", "301"), "has too few"),
        (("--operation", "tea"), "Invalid value"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(
    arguments: tuple[str, ...], said: str, fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    peer = fake()
    assert compared(peer.path, *arguments) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not peer.notes


def test_ctrl_c_ends_both_workers(fake: Callable[..., Fake]) -> None:
    peer = fake(on_rounds="time.sleep(300)")
    command = [sys.executable, "-m", "aiokv.cli.main", "bench", "compare", "--peer-python", str(peer.path)]
    driver = subprocess.Popen([*command, "--blocks", "64", "--operation", "hash"], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 40
        while not any("rounds" in question for question in peer.asked) and time.monotonic() < deadline:
            driver.poll()
            time.sleep(0.05)
        seen = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(driver.pid)], capture_output=True, text=True, check=True
        )
        workers = [int(pid) for pid in seen.stdout.split()]
        assert len(workers) == 2
        driver.send_signal(signal.SIGINT)
        _, complaint = driver.communicate(timeout=20)
    finally:
        driver.kill()
    assert driver.returncode not in (0, -signal.SIGKILL)
    assert "Traceback" not in complaint
    assert not [pid for pid in {*workers, *peer.pids} if lives_on(pid)]


def test_floors_begin_at_64_and_at_8192_blocks() -> None:
    assert [floor_of(Operation.RESERVE, blocks=blocks) for blocks in (63, 64, 8191, 8192, 9000)] == [
        None, 1.0, 1.0, 7.0, 7.0,
    ]  # fmt: skip


def test_all_operations_with_a_floor_are_compared_and_hashes_once() -> None:
    pairs = all_pairs(operations=tuple(FLOORS), models=tuple(Model), blocks=(8192,), pool_slots=20_000)
    assert {pair.case.operation for pair in pairs if pair.floor == FLOORS[pair.case.operation]} == set(FLOORS)
    assert [pair.case.layout for pair in pairs if pair.case.operation is Operation.HASH] == [Layout.MISS]
    alike = [pair for pair in pairs if pair.own_case == {**pair.peer_case, "extent": Extent.OPERATION.value}]
    assert alike
    assert all(pair.note for pair in pairs if pair not in alike)


@pytest.mark.parametrize(
    ("model", "blocks", "pool_slots", "requests"),
    [
        (Model.FULL, 64, 20_000, 8),
        (Model.HYBRID, 512, 20_000, 8),
        (Model.HYBRID, 513, 20_000, 1),
        (Model.FULL, 64, 2 * 4 * 65, 3),
        (Model.FULL, 64, 2 * 4 * 65 - 1, 2),
        (Model.HYBRID, 64, 2 * 4 * 65, 1),
        (Model.FULL, 1, 2, 1),
    ],
)
def test_several_short_prompts_are_let_in_together_as_far_as_half_a_pool_holds_them(
    model: Model, blocks: int, pool_slots: int, requests: int
) -> None:
    assert requests_of(model, blocks=blocks, pool_slots=pool_slots) == requests


async def test_our_worker_tells_the_whole_of_a_round_where_the_pair_wants_it() -> None:
    pairs = all_pairs(operations=[Operation.LOAD], models=[Model.FULL], blocks=[64], pool_slots=2_000)
    opened = {pair.peer_operation: pair.own_case for pair in pairs}
    command = [sys.executable, "-m", "aiokv.cli.bench.compare.worker"]
    times = {}
    async with started(command, side="ours", environment=os.environ, timeout_s=60) as ours:
        for name, case in opened.items():
            await ours.open(case)
            times[name] = min(await ours.rounds(8))
    assert times["load-whole"] > 1.5 * max(times["load"], times["load-unregistered"])


@pytest.mark.skipif(not PEER_PYTHON, reason="AIOKV_PEER_PYTHON names no interpreter with vLLM")
@pytest.mark.timeout(300)
def test_the_real_peer_answers_every_question(capsys: pytest.CaptureFixture[str]) -> None:
    """Times are not judged here; that the peer did the operation its worker checks itself, prompt by prompt."""
    sizes = ("--blocks", "64", "--blocks", "512", "--pool-slots", "2000", "--repeats", "1", "--memory-slots", "50000")
    assert run("bench", "compare", "--peer-python", PEER_PYTHON, *sizes, "--json") in (0, 1)
    report = json.loads(capsys.readouterr().out)
    assert report["peer"].startswith("vllm ")
    memory = report["memory"]
    assert memory["slots"] == 50_000
    assert memory["peer_bytes_per_resident_slot"] - memory["peer_bytes_per_empty_slot"] > 32, "of a hash alone"
    assert memory["peer_bytes_per_empty_slot"] > 8, "of a list alone"
    small, large = ([pair for pair in report["cases"] if pair["blocks"] == blocks] for blocks in (64, 512))
    assert len(small) == len(large) == 2 * 11 - 1
    assert {pair["requests"] for pair in small} == {8, 6}
    assert {pair["requests"] for pair in large} == {1}
    for few, many in zip(small, large, strict=True):
        assert many["peer"]["us"] > 2 * few["peer"]["us"] > 0, "its time does not grow with the prompt"
