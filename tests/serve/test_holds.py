"""How long the server holds the loop at a time, while the model computes in its own thread."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable

import httpx
import pytest

from aiokv.cli.bench.hold import Steps
from aiokv_engine.model_file import LoadedModel
from aiokv_engine.server.body import MAX_BODY_BYTES
from tests.serve.cases import MODEL, PATIENCE, running

BUDGET_S = 0.005
STREAMS = 24
LONG = "the quick brown fox jumps over the lazy dog " * 200


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.timeout(120)
async def test_no_part_of_a_request_holds_the_loop_for_long(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time of the loop's thread per callback, clients in threads of their own; uvloop calls the same callbacks."""
    asyncio.get_running_loop().set_debug(False)
    async with running(tiny, gpu_blocks=513, cpu_blocks=600) as server:
        await server.complete("what is imported lazily is imported now")
        holds = Steps()
        _time_callbacks(holds, monkeypatch=monkeypatch)
        statuses = await asyncio.to_thread(_talk, server.url)
        monkeypatch.undo()
        await server.assert_all_given_back()
    ms = [1000 * seconds for seconds in (holds.percentile_s(0.99), holds.percentile_s(0.999), holds.longest_s)]
    print(f"{holds.count} holds: p99 {ms[0]:.2f} ms, p99.9 {ms[1]:.2f} ms, longest {ms[2]:.2f} ms")
    assert statuses.count(200) == STREAMS + 2
    assert statuses.count(400) == 4
    assert holds.count > 1000
    assert holds.percentile_s(0.99) <= BUDGET_S


def _time_callbacks(holds: Steps, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every callback of asyncio's loop, tasks' steps among them, is one call of a handle."""
    loop_thread = threading.get_ident()
    run: Callable[[asyncio.Handle], None] = vars(asyncio.Handle)["_run"]

    def timed(handle: asyncio.Handle) -> None:
        started = time.thread_time()
        run(handle)
        if threading.get_ident() == loop_thread:
            holds.note(time.thread_time() - started)

    monkeypatch.setattr(asyncio.Handle, "_run", timed)


def _talk(url: str) -> list[int]:
    """Many streams at once, and bodies as large as they may be."""
    large: list[dict[str, object]] = [
        {"prompt": list(range(9, 250)) * 7, "max_tokens": 8},
        {"prompt": LONG[:1900], "max_tokens": 8},
        {"prompt": LONG * 100, "max_tokens": 8},
        {"prompt": [[5] * 100] * 128, "max_tokens": 5000},
        {"prompt": [300] * 150_000, "max_tokens": 8},
        {"prompt": ["a"] * 150_000},
    ]
    bodies = [json.dumps({"model": MODEL, **said}).encode() for said in large]
    assert all(len(body) <= MAX_BODY_BYTES for body in bodies)
    statuses: list[int] = []

    def ask(body: bytes) -> None:
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{url}/v1/completions", content=body, headers=headers, timeout=6 * PATIENCE)
        statuses.append(answer.status_code)

    streams = [
        json.dumps({"model": MODEL, "prompt": f"{number} {LONG[:400]}", "max_tokens": 40, "stream": True}).encode()
        for number in range(STREAMS)
    ]
    threads = [threading.Thread(target=ask, args=(body,)) for body in (*streams, *bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses
