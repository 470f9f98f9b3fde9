"""Bytes that are no proper HTTP, over raw sockets: they are refused, cost nothing, and the server goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from aiokv_engine.model_file import LoadedModel
from aiokv_engine.server.errors import RequestOutcome
from tests.serve.cases import PATIENCE, Running, running

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"model":"tiny","prompt":"a"}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)


async def talk(server: Running, sent: bytes) -> bytes:
    """Sends some bytes, and returns all that comes until the server closes, or has answered and says no more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(sent)
        async with asyncio.timeout(PATIENCE):
            return await reader.read(65_536)
    except ConnectionError:
        return b""
    finally:
        writer.close()


MALFORMED = [
    b"\r\n\r\n\r\n\x00\xff\xfe",
    b"GET\r\n\r\n",
    b"GET / HTTP/99\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    b"GET /v1/models HTTP/1.1\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    HEAD + b"Content-Length: -5\r\n\r\n" + BODY,
    HEAD + b"Content-Length: 99999999999999999999999999\r\n\r\n" + BODY,
    HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY,
    HEAD + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nabc\r\n",
    HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    HEAD + b"X-A : b\r\n" + LENGTH + b"\r\n" + BODY,
    HEAD + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
]


async def test_what_is_no_http_gets_an_error_or_nothing(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        before = server.serving.kv.snapshot()
        for sent in MALFORMED:
            answer = await talk(server, sent)
            assert not answer or answer.startswith(b"HTTP/1.1 4"), sent[:80]
            assert b"Traceback" not in answer
        assert server.serving.kv.snapshot() == before
        assert (await server.complete("still there")).status_code == 200


async def test_two_requests_in_one_write_are_answered_in_order(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        request = HEAD + LENGTH + b"\r\n" + BODY
        last = HEAD + LENGTH + b"Connection: close\r\n\r\n" + BODY
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request + last)
        async with asyncio.timeout(PATIENCE):
            answers = await reader.read(-1)
        writer.close()
        await server.assert_all_given_back()
    assert answers.count(b"HTTP/1.1 200") == 2


async def test_a_body_in_single_bytes_is_read(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for byte in HEAD + LENGTH + b"Connection: close\r\n\r\n" + BODY:
            writer.write(bytes([byte]))
            await writer.drain()
        async with asyncio.timeout(PATIENCE):
            answer = await reader.read(-1)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200")


async def test_the_rest_of_a_body_that_is_too_large_is_no_second_request(tiny: LoadedModel) -> None:
    """Bytes behind a refused body must not be taken for a request of their own."""
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with running(tiny) as server:
        sent = HEAD + b"Content-Length: 100000000\r\n\r\n" + hidden
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        async with asyncio.timeout(PATIENCE):
            answer = await reader.read(-1)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer.lower()
    assert answer.count(b"HTTP/1.1") == 1


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
STREAM = b'{"model":"tiny","prompt":"a","stream":true,"ignore_eos":true,"max_tokens":1500}'
NO_MORE_HTTP = [
    (HEAD.replace(b"completions", b"nothing") + CHUNKED, b'"code":null}}', b"ZZ\r\n"),
    (
        HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(STREAM) + STREAM,
        b"data: ",
        b"GET / HTTP/1.1\r\n\r\n",
    ),
]


@pytest.mark.parametrize(("first", "answer", "then"), NO_MORE_HTTP, ids=["answered", "answering"])
async def test_what_is_no_http_after_an_answer_has_begun_ends_the_connection_and_is_no_fault(
    tiny: LoadedModel, caplog: pytest.LogCaptureFixture, first: bytes, answer: bytes, then: bytes
) -> None:
    async with running(tiny) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(first)
        async with asyncio.timeout(PATIENCE):
            await reader.readuntil(answer)
            writer.write(then)
            with contextlib.suppress(ConnectionError):
                while rest := await reader.read(65_536):
                    assert b"HTTP/1.1" not in rest
        writer.close()
        await server.assert_all_given_back()
        assert server.server_app.service.metrics.requests(RequestOutcome.OK) == 0
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_what_is_no_http_before_an_answer_has_begun_is_refused_once_and_is_no_fault(
    tiny: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """The path is answered without its body, so that both answers are made in the same moment."""
    async with running(tiny) as server:
        answer = await talk(server, HEAD.replace(b"completions", b"nothing") + CHUNKED + b"ZZ\r\n")
        await server.assert_all_given_back()
        assert (await server.complete("still there")).status_code == 200
    assert answer.count(b"HTTP/1.1 400") == 1
    assert answer.count(b"HTTP/1.1") == 1
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
