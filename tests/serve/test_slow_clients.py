"""Clients that say or read nothing, and such that say too much, over real sockets: none is waited for without end."""

from __future__ import annotations

import asyncio
import json
import os
import socket

import pytest

from aiokv_engine.model_file import LoadedModel
from aiokv_engine.server.errors import RequestOutcome
from tests.engine.cases import Gate
from tests.serve.cases import MODEL, PATIENCE, Running, running

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NEXT = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
LONG = 600  # tokens


def request_bytes(**said: object) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": "the", "ignore_eos": True, **said}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def connect(server: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.port)


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Everything until the server has closed the connection."""
    received = b""
    async with asyncio.timeout(PATIENCE):
        try:
            while piece := await reader.read(65_536):
                received += piece
        except ConnectionError:
            pass
    return received


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEAD, HEAD + b"X-A: b"])
async def test_a_head_that_does_not_come_in_time_ends_its_connection(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("aiokv_engine.server.connection.HEAD_SECONDS", 0.05)
    async with running(tiny) as server:
        reader, writer = await connect(server)
        writer.write(sent)
        assert await read_all(reader) == b""
        writer.close()
        assert (await server.complete("the", max_tokens=300)).status_code == 200


async def test_a_head_that_comes_byte_by_byte_gets_no_more_time(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiokv_engine.server.connection.HEAD_SECONDS", 0.1)
    async with running(tiny) as server:
        reader, writer = await connect(server)
        writer.write(request_bytes(max_tokens=1))
        await reader.readuntil(b'"usage"')
        ended = asyncio.create_task(read_all(reader))
        writer.write(HEAD)
        while not ended.done():
            writer.write(b"X-A: b\r\n")
            await asyncio.sleep(0.01)
        writer.close()
        assert b"HTTP/1.1" not in await ended


@pytest.mark.parametrize("ahead", [b"G", NEXT, NEXT + b"x" * 50_000])
async def test_a_client_that_leaves_is_seen_though_it_has_sent_a_next_request(
    tiny: LoadedModel, steps: Gate, ahead: bytes
) -> None:
    async with running(tiny) as server:
        gate = server.server_app.service.gate
        steps.close_at(3)
        _, writer = await connect(server)
        writer.write(request_bytes(max_tokens=1000))
        await server.until(lambda: gate.running == 1)
        writer.write(ahead)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        await server.until(lambda: gate.is_idle)
        steps.open()
        await server.assert_all_given_back()
        assert await server.metric("aiokv_serve_requests_total", outcome="cancelled") == 1


async def test_of_next_requests_only_so_much_is_read_while_one_is_answered(tiny: LoadedModel, steps: Gate) -> None:
    much = 2**24  # more than the kernel's buffers hold
    async with running(tiny) as server:
        gate = server.server_app.service.gate
        steps.close()
        _, writer = await connect(server)
        writer.write(request_bytes(max_tokens=1))
        await server.until(lambda: gate.running == 1)
        writer.write(b"G" * much)
        await server.until(lambda: writer.transport.get_write_buffer_size() < much - 32_768)
        for _ in range(20):
            assert (await server.client.get("/health")).status_code == 200
        assert writer.transport.get_write_buffer_size() > much // 2
        steps.open()
        writer.transport.abort()


async def test_a_next_request_is_answered_though_it_was_sent_while_one_ran(tiny: LoadedModel, steps: Gate) -> None:
    async with running(tiny) as server:
        gate = server.server_app.service.gate
        steps.close()
        reader, writer = await connect(server)
        writer.write(request_bytes(max_tokens=3))
        await server.until(lambda: gate.running == 1)
        writer.write(NEXT)
        steps.open()
        received = await read_all(reader)
        writer.close()
    assert received.count(b"HTTP/1.1 200 OK") == 2


async def test_a_client_that_reads_nothing_is_cut(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiokv_engine.server.connection.STALL_SECONDS", 0.05)
    async with running(tiny, buffers=4096) as server:
        reader, writer = await connect_narrowly(server)
        writer.write(long_stream())
        await server.until(lambda: ended(server, RequestOutcome.CANCELLED) == 1)
        await server.assert_all_given_back()
        assert b"DONE" not in await read_all(reader)
        writer.close()


@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
async def test_a_complete_answer_that_nobody_reads_holds_no_connection(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, connection: bytes
) -> None:
    """What is left of it fits into the buffer of the connection, which would wait for ever to write it."""
    monkeypatch.setattr("aiokv_engine.server.connection.STALL_SECONDS", 0.05)
    async with running(tiny, buffers=4096) as server:
        before = await count_open_files()
        _, writer = await connect_narrowly(server)
        writer.write(long_stream(tokens=140).replace(b"Connection: close", b"Connection: " + connection))
        await server.until(lambda: ended(server, RequestOutcome.OK) == 1)
        async with asyncio.timeout(PATIENCE):
            while await count_open_files() > before + 1:  # noqa: ASYNC110  # looked at from outside
                await asyncio.sleep(0.01)
        writer.close()


async def count_open_files() -> int:
    return len(await asyncio.to_thread(os.listdir, "/dev/fd"))


async def test_a_client_that_reads_late_but_in_time_gets_everything(tiny: LoadedModel) -> None:
    async with running(tiny, buffers=4096) as server:
        reader, writer = await connect_narrowly(server)
        writer.write(long_stream())
        metrics = server.server_app.service.metrics
        await server.until(lambda: metrics.generated_tokens == LONG)
        await server.serving.engine.wait_idle()
        assert ended(server, RequestOutcome.OK) == 0
        received = await read_all(reader)
        writer.close()
        assert b"data: [DONE]" in received
        assert received.count(b'"finish_reason":"length"') == 1
        await server.assert_all_given_back()


async def test_a_client_that_has_read_late_is_not_cut_afterwards(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiokv_engine.server.connection.STALL_SECONDS", 1.5)
    loop = asyncio.get_running_loop()
    async with running(tiny, buffers=4096) as server:
        reader, writer = await connect_narrowly(server)
        writer.write(long_stream(tokens=300).replace(b"Connection: close", b"Connection: keep-alive"))
        metrics = server.server_app.service.metrics
        await server.until(lambda: metrics.generated_tokens == 300)
        async with asyncio.timeout(PATIENCE):
            while b"[DONE]" not in await reader.readline():
                pass
        would_be_cut = loop.time() + 1.6
        await server.until(lambda: loop.time() > would_be_cut)
        writer.write(NEXT)
        assert b"HTTP/1.1 200 OK" in await read_all(reader)
        writer.close()


def long_stream(*, tokens: int = LONG) -> bytes:
    """A request for more than any buffer holds."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    request = request_bytes(max_tokens=tokens, stream=True, stream_options=usage)
    return request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)


async def connect_narrowly(server: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose own buffers hold little until it is read."""
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    narrow.connect(("127.0.0.1", server.port))
    narrow.settimeout(0)
    return await asyncio.open_connection(sock=narrow, limit=1024)


def ended(server: Running, outcome: RequestOutcome) -> int:
    return server.server_app.service.metrics.requests(outcome)
