"""`aiokv bench compare`, what a slot costs: each side in a process that has done nothing else, budgets and a floor."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aiokv import ConfigError
from aiokv.cli.bench.compare.process import SlotCosts, WorkerFailed, started
from aiokv.cli.bench.compare.settings import PEER_WORKER, CompareSettings
from aiokv.cli.bench.compare.slot_memory import SlotMemory, check_memory
from tests.cli.bench.fake_peer import AGES, Fake, compared, lives_on
from tests.cli.test_main import run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="workers are sessions of their own, as POSIX has them")

SLOTS = 20_000
ANSWER = (
    "say(memory={{'slots': question['memory'], 'resident': question['memory'], 'bytes_per_empty_slot': 120.5, "
    "'bytes_per_resident_slot': {resident}}})"
)
ASKED = ("--blocks", "64", "--operation", "release", "--memory-slots", str(SLOTS))


def test_a_slot_is_weighed_on_both_sides_in_processes_of_its_own(
    fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    peer = fake(on_memory=ANSWER.format(resident=AGES))
    status = compared(peer.path, *ASKED, "--json")
    report = json.loads(capsys.readouterr().out)
    assert status == (0 if report["ok"] else 1)
    memory = report["memory"]
    assert (memory["slots"], memory["floor"]) == (SLOTS, 2.0)
    assert (memory["peer_bytes_per_empty_slot"], memory["peer_bytes_per_resident_slot"]) == (120.5, AGES)
    assert memory["ours_bytes_per_resident_slot"] - memory["ours_bytes_per_empty_slot"] > 32, "of a hash alone"
    assert memory["ratio"] == pytest.approx(AGES / memory["ours_bytes_per_resident_slot"], rel=0.01)
    starts = [at for at, (_, what) in enumerate(peer.notes) if "pids" in what]
    assert len(starts) == 2
    assert [what for _, what in peer.notes[starts[1] + 1 :]] == [{"memory": SLOTS}]
    assert not [pid for pid in peer.pids if lives_on(pid)]


def test_a_peer_that_takes_as_little_fails_the_command(
    fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(fake(on_memory=ANSWER.format(resident=1.0)).path, *ASKED, "--json") == 1
    assert "memory: a resident slot of the peer takes" in json.loads(capsys.readouterr().out)["complaints"][-1]


def test_nobody_is_asked_where_it_is_left_out(fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]) -> None:
    peer = fake()
    assert compared(peer.path, *ASKED, "--memory-slots", "0", "--json") == 0
    assert "memory" not in json.loads(capsys.readouterr().out)
    assert not [question for question in peer.asked if "memory" in question]


def costs(*, empty: float, resident: float) -> SlotCosts:
    return SlotCosts(slots=SLOTS, resident=SLOTS, bytes_per_empty_slot=empty, bytes_per_resident_slot=resident)


def test_budgets_are_ours_and_the_peer_takes_at_least_twice_as_much() -> None:
    peer = costs(empty=120.0, resident=400.0)
    assert SlotMemory(ours=costs(empty=40.0, resident=200.0), peer=peer).complaints == ()
    assert SlotMemory(ours=costs(empty=40.5, resident=250.0), peer=peer).complaints == (
        "memory: gpu: bytes_per_empty_slot is 40.5, over 40",
        "memory: gpu: bytes_per_resident_slot is 250.0, over 200",
        "memory: a resident slot of the peer takes 1.60x the bytes of ours, not 2x",
    )


@pytest.mark.parametrize("resident", [0.0, -8.0])
def test_a_process_that_has_not_grown_has_a_ratio_all_the_same(resident: float) -> None:
    memory = SlotMemory(ours=costs(empty=0.0, resident=resident), peer=costs(empty=1.0, resident=300.0))
    assert memory.ratio == 300.0


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ("say(memory=[5])", "answered '[5]', not slots, resident"),
        ("say(memory={'slots': 7})", "not slots, resident"),
        (ANSWER.format(resident="'many'"), "not slots, resident"),
        (ANSWER.format(resident=300).replace("question['memory']", "7", 1), "has filled 9 of 7 slots, not 9"),
        (ANSWER.format(resident=300).replace("'resident': question['memory']", "'resident': 8"), "filled 8 of 9 slots"),
        ("say(error='MemoryError: no room')", "failed: MemoryError: no room"),
        ("os.kill(os.getpid(), 9)", "ended with status -9"),
    ],
)
async def test_a_side_that_cannot_tell_is_named(instead: str, said: str, fake: Callable[..., Fake]) -> None:
    peer = fake(on_memory=instead)
    with pytest.raises(WorkerFailed, match=re.escape(said)):
        async with started([str(peer.path)], side="peer", environment={}, timeout_s=50) as worker:
            await worker.memory(9)
    assert not [pid for pid in peer.pids if lives_on(pid)]


def test_a_pool_that_does_not_fit_into_memory_is_refused_before_anything_starts(
    fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    peer = fake()
    assert compared(peer.path, *ASKED, "--memory-slots", str(10**13), "--json") == 2
    assert "are available" in " ".join(capsys.readouterr().err.split())
    assert not peer.notes
    check_memory(1_000_000, available=600 * 10**6)
    with pytest.raises(ConfigError, match="1,000,000 slots"):
        check_memory(1_000_000, available=600 * 10**6 - 1)


def test_fewer_than_no_slots_are_refused() -> None:
    assert run("bench", "compare", "--peer-python", sys.executable, "--memory-slots", "-1") == 2
    with pytest.raises(ConfigError, match="is none"):
        CompareSettings(peer_python=Path(sys.executable), memory_slots=-1)


def test_either_script_of_the_peer_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "peer_worker.py").write_text(PEER_WORKER.read_text())
    with pytest.raises(ConfigError, match=r"peer_memory\.py, is missing"):
        CompareSettings(peer_python=Path(sys.executable), peer_script=tmp_path / "peer_worker.py")
