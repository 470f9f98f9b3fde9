"""A peer for `aiokv bench compare` that speaks its workers' protocol and does nothing; and the command, on little."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.test_main import run

GREET = "say(system='fake 1', python='3')"
AGES = 10**12
_PATIENCE_S = 10.0

FAKE = """#!{python}
import json, os, subprocess, sys, time
def say(**values): print(json.dumps(values), flush=True)
def note(what):
    with open({log!r}, "a") as file: file.write(json.dumps([{name!r}, what]) + "\\n")
child = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL)
note({{"pids": [os.getpid(), child.pid], "PYTHONPATH": os.environ.get("PYTHONPATH")}})
{greeting}
for line in sys.stdin:
    question = json.loads(line)
    note(question)
    if "open" in question: {on_open}
    elif "memory" in question: {on_memory}
    else: {on_rounds}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fake:
    """An interpreter that speaks the protocol whatever it is told to run, and what it was asked."""

    path: Path
    log: Path

    @property
    def notes(self) -> list[tuple[str, dict[str, Any]]]:
        return [tuple(json.loads(line)) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    @property
    def asked(self) -> list[dict[str, Any]]:
        return [what for _, what in self.notes if "pids" not in what]

    @property
    def pids(self) -> list[int]:
        return [pid for _, what in self.notes for pid in what.get("pids", ())]


def compared(peer: Path, *arguments: str) -> int:
    few = ("--pool-slots", "300", "--repeats", "2", "--model", "full", "--memory-slots", "0")
    return run("bench", "compare", "--peer-python", str(peer), *few, *arguments)


def lives_on(pid: int) -> bool:
    """Whether it still runs after some seconds: what was killed ends when the system comes to it."""
    give_up = time.monotonic() + _PATIENCE_S
    while _is_running(pid):
        if time.monotonic() >= give_up:
            return True
    return False


def _is_running(pid: int) -> bool:
    """Whether it exists and is no zombie, which only whoever has inherited it can remove."""
    seen = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return seen.stdout.strip()[:1] not in ("", "Z")
