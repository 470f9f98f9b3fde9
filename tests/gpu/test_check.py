"""`check.py` on the fake driver, in a process of its own each time; without a driver it says what is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.fakecuda import build_fake_driver
from tests.fakecuda.fixtures import skipped_without_compiler

CHECK = Path(__file__).with_name("check.py")
RUN = f"""
import runpy, sys
sys.argv = [{str(CHECK)!r}, *sys.argv[1:]]
runpy.run_path({str(CHECK)!r}, run_name="__main__")
"""
LIMIT_S = 55


def check(*arguments: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs it in an interpreter in which `before` was executed."""
    command = [sys.executable, "-c", before + RUN, *arguments]
    known = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S, env=known)


def hidden(*modules: str) -> str:
    """What makes an interpreter believe that these are not installed."""
    return f"import sys; sys.modules.update(dict.fromkeys({modules!r}))"


@pytest.fixture(autouse=True)
def needs_bindings() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed: pip install 'aiokv[test]'")


@pytest.fixture
def compiler() -> None:
    """Skipped where the fake driver cannot be built."""
    with skipped_without_compiler():
        build_fake_driver()


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(done.stdout)
    assert (report["schema_version"], report["machine"]["driver"]) == (1, "fake"), done.stderr
    return report


@pytest.mark.usefixtures("compiler")
def test_on_the_fake_driver_every_section_runs_and_finds_what_it_should() -> None:
    done = check("--fake-driver")
    report = report_of(done)
    assert (done.returncode, report["ok"]) == (0, True), done.stderr
    sections = report["sections"]
    assert {name: part["faults"] for name, part in sections.items()} == {name: [] for name in sections}
    for race in ("store", "load", "wait"):
        figures = sections["races"][race]
        assert figures["corrupt_fenced"] == 0
        # Not of every round: where this process is held up, a kernel may have ended before the copy was handed over.
        assert 0 < figures["corrupt_unfenced"] <= figures["rounds"]
    assert sections["races"]["store_any_order"]["corrupt_fenced"] > 0, "the fake reads such sources at once"
    assert min(sections["requests"]["blocks_hit"].values()) > 0
    assert sections["queue_depth"]["knee"] == 1023
    assert [row["in_flight"] for row in sections["wakeups"]["rows"]] == [1, 8]
    for name in sections:
        assert f"\n{name} (" in done.stderr, "people read a table"


NO_STORE_OR_LOAD_WAITS = """
from aiokv.backends.cuda_stream import CopyJob
init = CopyJob.__init__
CopyJob.__init__ = lambda job, copies, *, fences: init(job, copies, fences=())
"""
NO_KERNEL_WAITS = """
from aiokv.backends.cuda_queue import StreamQueue
StreamQueue.hold_back = lambda queue, stream, *, behind: None
"""


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("forgetting", "corrupt"),
    [(NO_STORE_OR_LOAD_WAITS, ["store", "load"]), (NO_KERNEL_WAITS, ["wait"])],
    ids=["copies", "kernels"],
)
def test_who_does_not_wait_is_found(forgetting: str, corrupt: list[str]) -> None:
    done = check("--fake-driver", "--only", "races", before=forgetting)
    report = report_of(done)
    assert (done.returncode, report["ok"]) == (1, False)
    faults = " ".join(report["sections"]["races"]["faults"])
    races = ("store", "load", "wait")
    assert [name for name in races if re.search(rf"{name}: \d+ of 12 are corrupt, though", faults)] == corrupt


LOSES_COPIES = """
from aiokv.backends.cuda_batch import BatchCopier
BatchCopier.enqueue = lambda copier, copies, *, stream: None
"""


@pytest.mark.usefixtures("compiler")
def test_bytes_that_do_not_arrive_are_found() -> None:
    done = check("--fake-driver", "--only", "bytes", "--only", "requests", before=LOSES_COPIES)
    report = report_of(done)
    assert done.returncode == 1
    assert any("CPU blocks" in fault for fault in report["sections"]["bytes"]["faults"])
    assert any("had other bytes" in fault for fault in report["sections"]["requests"]["faults"])


@pytest.mark.usefixtures("compiler")
def test_where_the_runtime_misses_a_module_the_backends_are_checked_without_it() -> None:
    done = check("--fake-driver", before=hidden("anyio"))
    report = report_of(done)
    assert done.returncode == 0, done.stderr
    skipped = {name: part["skipped"] for name, part in report["sections"].items() if "skipped" in part}
    assert skipped == dict.fromkeys(("requests", "wakeups"), "not installed: anyio")
    assert report["sections"]["bytes"]["bytes_compared"] > 0


@pytest.mark.parametrize(
    ("arguments", "before", "says"),
    [
        ((), "", "CUDA cannot be used"),
        ((), hidden("torch"), "not installed: torch"),
        ((), hidden("cuda.bindings", "torch"), "not installed: cuda.bindings, torch"),
        (("--fake-driver",), hidden("cuda.bindings"), "not installed: cuda.bindings"),
    ],
    ids=["driver", "torch", "bindings", "bindings for the fake"],
)
def test_what_is_missing_is_said_in_one_line(arguments: tuple[str, ...], before: str, says: str) -> None:
    done = check(*arguments, before=before, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert says in line


@pytest.mark.usefixtures("compiler")
def test_an_unknown_section_is_refused() -> None:
    done = check("--fake-driver", "--only", "weather")
    assert (done.returncode, done.stdout) == (2, "")
    assert "only the sections bytes, races" in done.stderr


def test_a_section_that_fails_or_hangs_costs_itself_only() -> None:
    from tests.gpu.bench import TINY, Bench, Found
    from tests.gpu.sections import Section, run_sections

    released = threading.Event()

    def hang(_: Bench) -> Found:
        released.wait(LIMIT_S)
        return Found()

    def fail(_: Bench) -> Found:
        raise ValueError("no such thing")

    bench = Bench(engine=Any, driver=Any, api=Any, sizes=TINY)  # type: ignore[arg-type]  # nobody uses them
    sections = [
        Section(name="hangs", run=hang, limit_s=0.05, is_judged=True),
        Section(name="fails", run=fail, limit_s=LIMIT_S),
        Section(name="lacks", run=fail, limit_s=LIMIT_S, needs=("no_such_module",)),
        Section(name="works", run=lambda _: Found(figures={"answer": 42}), limit_s=LIMIT_S),
    ]
    hangs, fails, lacks, works = run_sections(bench, sections=sections, total_s=LIMIT_S)
    released.set()
    assert hangs.found.faults == ["it did not end within 0 s"]
    assert fails.found.faults[0] == "ValueError: no such thing"
    assert (lacks.is_ok, lacks.skipped) == (True, "not installed: no_such_module")
    assert works.as_json() | {"seconds": 0} == {"ok": True, "seconds": 0, "answer": 42, "faults": []}
