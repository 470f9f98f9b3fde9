"""The suite's own safety nets hold: both loops, debug mode, blocking calls, unawaited coroutines."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from blockbuster import BlockingError

from aiokv.runtime.config_file import load_settings


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
