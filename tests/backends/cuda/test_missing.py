"""Machines without a device, each in a process of its own: all imports, "auto" is the host, "cuda" says what lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakecuda import build_fake_driver
from tests.fakecuda.fixtures import skipped_without_compiler

ROOT = Path(__file__).parents[3]

NO_LIBRARY = ""
NO_BINDINGS = "sys.modules['cuda.bindings'] = None"
FAKE = "from tests.fakecuda import FakeDriver; fake = FakeDriver.load({version}); {then}"
NO_DEVICE = FAKE.format(version=13000, then="fake.hide()")
OLD_DRIVER = FAKE.format(version=11080, then="None")

LOOK = """
import sys
exec(sys.argv[1])
import asyncio, json, logging, pkgutil
import numpy as np
import aiokv

class Lines(logging.Handler):
    def emit(self, record):
        lines.append((record.levelname, record.getMessage()))

lines = []
logging.getLogger("aiokv").addHandler(Lines())
logging.getLogger("aiokv").setLevel(logging.INFO)
modules = [module.name for module in pkgutil.walk_packages(aiokv.__path__, "aiokv.")]
for module in modules:
    __import__(module)

geometry = aiokv.CacheGeometry(groups=(aiokv.FullAttention("full", block_size=16),), hash_block_size=16)

async def serve(backend):
    config = aiokv.RuntimeConfig(geometry=geometry, gpu_blocks=8, cpu_blocks=9, backend=backend, compute_stream=0)
    async with aiokv.KVRuntime(config, arenas={"full": [np.zeros((8, 32), np.uint8)]}) as kv:
        async with kv.acquire("one", list(range(33))) as lease:
            lease.confirm(33)
        await kv.drain()
        return [s.labels["backend"] for f in kv.collector.collect() for s in f.samples if "backend" in s.labels]

on_host, told = asyncio.run(serve("auto")), list(lines)
try:
    asyncio.run(serve("cuda"))
except aiokv.ConfigError as error:
    refusal = str(error)
print(json.dumps({"modules": modules, "backends": on_host, "told": told, "refusal": refusal}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is done to the interpreter first, and what must be said of it."""

    before: str
    says: str


MACHINES = {
    "no library": Machine(before=NO_LIBRARY, says="the driver's libcuda.so.1 does not load"),
    "no bindings": Machine(before=NO_BINDINGS, says="cuda-bindings is missing, pip install 'aiokv[cuda]'"),
    "no device": Machine(before=NO_DEVICE, says="CUDA_ERROR_NO_DEVICE (100)"),
    "old driver": Machine(before=OLD_DRIVER, says="the driver supports CUDA 11.8, aiokv needs 12.0"),
}


def look(machine: Machine) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, machine.before],
        capture_output=True,
        text=True,
        check=False,
        timeout=55,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def require(machine: Machine) -> None:
    """Skip, with the reason, what this machine cannot pretend to be."""
    if machine.before != NO_BINDINGS:
        pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed: pip install 'aiokv[test]'")
    if machine.before == NO_LIBRARY:
        probe = subprocess.run(
            [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"], check=False, stderr=subprocess.DEVNULL
        )
        if not probe.returncode:
            pytest.skip("this machine has a CUDA driver")
    if "FakeDriver" in machine.before:
        with skipped_without_compiler():
            build_fake_driver()


@pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
def test_everything_imports_auto_is_the_host_and_cuda_says_what_is_missing(machine: Machine) -> None:
    require(machine)
    found = look(machine)
    assert "aiokv.backends.cuda" in found["modules"]
    assert set(found["backends"]) == {"host"}
    (line,) = [text for _, text in found["told"] if "backend" in text]
    assert line == "backend auto: the tensors are in host memory: copies in RAM"
    assert [text for level, text in found["told"] if level != "INFO"] == []
    assert found["refusal"].startswith("CUDA cannot be used: ")
    assert machine.says in found["refusal"]
