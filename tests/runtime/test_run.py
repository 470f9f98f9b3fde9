"""`aiokv.run`: a program's loop, the recommended one where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest
import uvloop

import aiokv
from aiokv import KVRuntime
from tests.runtime.support import config_of, prompt


async def loop_class() -> type[asyncio.AbstractEventLoop]:
    return type(asyncio.get_running_loop())


def test_it_runs_a_function_or_a_coroutine_on_uvloop_and_returns_its_result() -> None:
    assert aiokv.run(loop_class) is uvloop.Loop
    assert aiokv.run(loop_class()) is uvloop.Loop


def test_without_uvloop_it_runs_on_the_loop_of_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert aiokv.run(loop_class) is not uvloop.Loop


@pytest.mark.parametrize("debug", [False, True])
def test_debug_is_passed_on(debug: bool) -> None:  # noqa: FBT001
    async def is_debugged() -> bool:
        return asyncio.get_running_loop().get_debug()

    assert aiokv.run(is_debugged, debug=debug) is debug


def test_an_exception_goes_through() -> None:
    async def fail() -> None:
        raise KeyError("it")

    with pytest.raises(KeyError, match="it"):
        aiokv.run(fail)


def test_a_runtime_lives_in_it() -> None:
    async def main() -> int:
        async with KVRuntime(config_of()) as kv, kv.acquire("request", prompt(2)) as lease:
            return lease.hit.compute_tokens

    assert aiokv.run(main) == 33
