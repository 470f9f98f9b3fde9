"""The suite's own safety nets hold: both loops, debug mode, blocking calls, hangs, and what would only be logged."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from blockbuster import BlockingError

from aiokv.runtime.config_file import load_settings

ROOT = Path(__file__).resolve().parent.parent


async def test_async_tests_run_in_debug_mode_on_the_loop_their_name_says(request: pytest.FixtureRequest) -> None:
    loop = asyncio.get_running_loop()
    assert f"[{type(loop).__module__.partition('.')[0]}]" in request.node.name
    assert loop.get_debug()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no uvloop on Windows")
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_uvloop_is_one_of_the_loops() -> None:
    assert type(asyncio.get_running_loop()).__module__ == "uvloop"


async def test_a_blocking_call_of_the_library_on_the_loop_fails(tmp_path: Path) -> None:
    file = tmp_path / "aiokv.toml"
    await asyncio.to_thread(file.write_text, "gpu_blocks = 64")
    with pytest.raises(BlockingError):
        load_settings(file=file, environ={}, arguments={})


async def test_the_same_call_in_a_worker_thread_passes(tmp_path: Path) -> None:
    file = tmp_path / "aiokv.toml"
    await asyncio.to_thread(file.write_text, "gpu_blocks = 64")
    settings = await asyncio.to_thread(load_settings, file=file, environ={}, arguments={})
    assert settings.gpu_blocks == 64


@pytest.mark.allow_blocking("shows that the marker lets a blocking call pass")
async def test_a_test_with_a_reason_may_block(tmp_path: Path) -> None:
    file = tmp_path / "aiokv.toml"
    await asyncio.to_thread(file.write_text, "gpu_blocks = 64")
    assert load_settings(file=file, environ={}, arguments={}).gpu_blocks == 64


CARELESS_TESTS = """
import asyncio, warnings
import pytest

@pytest.mark.timeout(1)
async def test_hangs(): await asyncio.Event().wait()

async def test_forgets_to_await(): asyncio.sleep(0)

async def test_loses_the_exception_of_a_task():
    async def fail(): raise ValueError
    asyncio.get_running_loop().create_task(fail())
    await asyncio.sleep(0.01)

async def test_lets_a_callback_raise():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0.01)

def test_warns(): warnings.warn("x")

@pytest.mark.xfail
def test_passes_unexpectedly(): pass

async def test_is_careful(): await asyncio.sleep(0)
"""


def run_suite(directory: Path, *, tests: str) -> subprocess.CompletedProcess[str]:
    """A run of its own, of `tests` under this suite's settings."""
    (directory / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", directory)
    shutil.copy(ROOT / "tests/conftest.py", directory / "tests")
    (directory / "tests/test_careless.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_a_careless_test_fails_on_both_loops(tmp_path: Path) -> None:
    done = run_suite(tmp_path, tests=CARELESS_TESTS)
    assert done.returncode == 1
    bad = set(re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", done.stdout, re.MULTILINE))
    names = ("test_hangs", "test_forgets_to_await", "test_loses_the_exception_of_a_task", "test_lets_a_callback_raise")
    loops = ("asyncio",) if sys.platform == "win32" else ("asyncio", "uvloop")
    assert bad == {f"{name}[{loop}]" for name in names for loop in loops} | {"test_warns", "test_passes_unexpectedly"}


def test_blocking_needs_a_reason(tmp_path: Path) -> None:
    done = run_suite(tmp_path, tests="import pytest\n@pytest.mark.allow_blocking\nasync def test_x(): pass")
    assert done.returncode == 4
    assert "allow_blocking needs a reason" in done.stderr
