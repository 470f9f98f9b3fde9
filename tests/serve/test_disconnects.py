"""Clients that leave, over real sockets: whatever they had asked for ends, and everything is given back at once."""

from __future__ import annotations

import asyncio
import json
import random
import threading

import httpx
import pytest

from aiokv_engine.model_file import LoadedModel
from aiokv_engine.server.errors import RequestOutcome
from aiokv_engine.tokenizer import GgufTokenizer
from tests.engine.cases import Gate
from tests.serve.cases import MODEL, PATIENCE, Running, error_of, running

PROMPT = [7 + index % 90 for index in range(100)]


def request_bytes(server: Running, **said: object) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": PROMPT, **said}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def connect(server: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.port)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


async def cancelled(server: Running) -> float:
    return await server.metric("aiokv_serve_requests_total", outcome="cancelled")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps_before", [1, 2, 3, 5])
async def test_a_client_that_leaves_in_any_step_ends_its_request_with_that_step(
    tiny: LoadedModel, steps: Gate, steps_before: int, *, stream: bool
) -> None:
    """The prompt takes two prefill steps; then come decode steps."""
    async with running(tiny) as server:
        gate = server.server_app.service.gate
        steps.close_at(steps_before)
        _, writer = await connect(server)
        writer.write(request_bytes(server, max_tokens=1000, stream=stream, ignore_eos=True))
        await server.until(lambda: len(steps.log) == steps_before)
        await hang_up(writer)
        await server.until(lambda: gate.is_idle)
        assert await cancelled(server) == 1
        steps.open()
        await server.assert_all_given_back()
        assert len(steps.log) == steps_before
        assert (await server.complete(PROMPT)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_it_waits_gives_its_place_back_while_others_run(
    tiny: LoadedModel, steps: Gate, *, stream: bool
) -> None:
    async with running(tiny, gpu_blocks=9) as server:
        gate = server.server_app.service.gate
        steps.close()
        with server.background(PROMPT, max_tokens=20) as first:
            await server.until(lambda: gate.running == 1)
            _, writer = await connect(server)
            writer.write(request_bytes(server, max_tokens=20, stream=stream))
            await server.until(lambda: gate.queued == 1)
            await hang_up(writer)
            await server.until(lambda: gate.queued == 0)
            assert len(server.serving.kv.audit().leases) == 1
            assert await cancelled(server) == 1
            steps.open()
            assert (await first).status_code == 200
        await server.assert_all_given_back()


async def test_a_client_that_leaves_while_it_sends_its_body_costs_nothing(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        before = server.serving.kv.snapshot()
        for cut in (10, 60, -1):
            _, writer = await connect(server)
            writer.write(request_bytes(server)[:cut])
            await writer.drain()
            await hang_up(writer)
        await server.until(lambda: server.server_app.service.gate.is_idle)
        assert server.serving.kv.snapshot() == before
        assert (await server.complete(PROMPT)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_may_leave_after_any_byte_of_its_answer(tiny: LoadedModel, *, stream: bool) -> None:
    async with running(tiny) as server:
        request = request_bytes(server, max_tokens=3, stream=stream)
        whole = await _first_bytes(server, request, count=10_000)
        assert len(whole) > 300
        for count in range(1, len(whole), 23):
            assert len(await _first_bytes(server, request, count=count)) >= count
        await server.assert_all_given_back()
        metrics = server.server_app.service.metrics
        asked = 1 + len(range(1, len(whole), 23))
        assert metrics.requests(RequestOutcome.OK) + metrics.requests(RequestOutcome.CANCELLED) == asked


async def _first_bytes(server: Running, request: bytes, *, count: int) -> bytes:
    """So many bytes of an answer, or all there are; the client leaves as soon as it has them."""
    reader, writer = await connect(server)
    writer.write(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
    received = b""
    async with asyncio.timeout(PATIENCE):
        while len(received) < count and (piece := await reader.read(count - len(received))):
            received += piece
    await hang_up(writer)
    return received


async def test_a_body_that_does_not_come_in_time_ends_its_connection(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiokv_engine.server.body.READ_SECONDS", 0.05)
    async with running(tiny) as server:
        reader, writer = await connect(server)
        writer.write(request_bytes(server)[:-1])
        async with asyncio.timeout(PATIENCE):
            answer = await reader.read(-1)
        await hang_up(writer)
        assert (await server.complete(PROMPT)).status_code == 200
    assert answer.startswith(b"HTTP/1.1 408")


async def test_a_client_that_leaves_while_it_is_tokenised_is_never_let_in(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    encode = GgufTokenizer.encode

    def wait_and_encode(tokenizer: GgufTokenizer, text: str) -> list[int]:
        has_begun.set()
        may_end.wait(PATIENCE)
        return encode(tokenizer, text)

    monkeypatch.setattr(GgufTokenizer, "encode", wait_and_encode)
    async with running(tiny) as server:
        with server.background("long " * 300) as request:
            await server.until(has_begun.is_set)
            request.cancel()
            await server.until(lambda: server.server_app.service.gate.is_idle)
            may_end.set()
        assert await server.metric("aiokv_serve_generated_tokens_total") == 0
        await server.assert_all_given_back()
        assert await cancelled(server) == 1


async def test_a_request_that_is_tokenised_when_the_grace_ends_is_told_so(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def wait(_: GgufTokenizer, __: str) -> list[int]:
        has_begun.set()
        may_end.wait(PATIENCE)
        return PROMPT

    monkeypatch.setattr(GgufTokenizer, "encode", wait)
    async with running(tiny) as server:
        gate = server.server_app.service.gate
        with server.background("long " * 300) as request:
            await server.until(has_begun.is_set)
            assert gate.cut_off() == 1
            response = await request
            may_end.set()
        await server.assert_all_given_back()
        assert await server.metric("aiokv_serve_generated_tokens_total") == 0
        assert await cancelled(server) == 1
    assert response.status_code == 503
    assert error_of(response)["code"] == "cut_off"


async def test_a_client_that_reads_nothing_holds_no_blocks_when_its_answer_is_complete(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        _, writer = await connect(server)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # the transport of a connection has it
        writer.write(request_bytes(server, max_tokens=300, stream=True, ignore_eos=True))
        metrics = server.server_app.service.metrics
        await server.until(lambda: metrics.generated_tokens == 300)
        async with asyncio.timeout(PATIENCE):
            await server.serving.engine.wait_idle()
            await server.serving.kv.drain()
        assert server.serving.kv.audit().leases == ()
        await hang_up(writer)
        await server.assert_all_given_back()


@pytest.mark.timeout(120)
async def test_two_hundred_streams_of_which_a_third_is_abandoned_leave_nothing(tiny: LoadedModel) -> None:
    asyncio.get_running_loop().set_debug(False)
    draw = random.Random(7)
    async with running(tiny, gpu_blocks=129, cpu_blocks=256) as server:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=100, limits=limits) as client:
            leavers = [number % 3 == 0 for number in range(200)]
            pauses = [draw.random() * 3 for _ in leavers]
            calls = [
                _talk(client, number, leaves_after=pauses[number] if leaves else None)
                for number, leaves in enumerate(leavers)
            ]
            complete = await asyncio.gather(*calls)
        await server.assert_all_given_back()
        gone = await cancelled(server)
        ok = await server.metric("aiokv_serve_requests_total", outcome="ok")
    assert [was for was, leaves in zip(complete, leavers, strict=True) if not leaves] == [True] * leavers.count(False)
    assert ok >= leavers.count(False)
    assert ok + gone <= 200, "one was counted twice"
    assert gone >= 20, "too few left in time to show anything"


async def _talk(client: httpx.AsyncClient, number: int, *, leaves_after: float | None) -> bool:
    """Whether the whole stream came."""
    said = {
        "model": MODEL,
        "prompt": [9] * (64 * (number % 3)) + [10 + number] * (20 + number % 50),
        "max_tokens": 5 + number % 20,
        "stream": True,
        "ignore_eos": True,
    }
    text = ""
    try:
        async with (
            asyncio.timeout(leaves_after),
            client.stream("POST", "/v1/completions", json=said) as response,
        ):
            async for piece in response.aiter_text():
                text += piece
    except TimeoutError:
        return False
    return text.endswith("data: [DONE]\n\n")
