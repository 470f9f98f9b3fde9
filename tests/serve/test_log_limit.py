"""What the server logs: no line again and again, nothing of what a client has sent."""

from __future__ import annotations

import logging

import pytest

from aiokv_engine.model_file import LoadedModel
from aiokv_engine.server.log_limit import PERIOD_S, LogLimit
from tests.serve.cases import running

SECRET = "xyzzy-of-a-client"


def record_of(text: str, *arguments: object, error: Exception | None = None) -> logging.LogRecord:
    exc_info = (type(error), error, None) if error is not None else None
    return logging.LogRecord("server", logging.ERROR, __file__, 1, text, arguments, exc_info)


def test_a_line_comes_at_once_and_then_seldom_with_the_number_of_those_that_did_not_come() -> None:
    now = [5.0]
    limit = LogLimit(clock=lambda: now[0])
    first, last = record_of("bad %s", "request"), record_of("bad %s", "request")
    assert limit.filter(first)
    assert not any(limit.filter(record_of("bad %s", "request")) for _ in range(3))
    now[0] += PERIOD_S - 0.01
    assert not limit.filter(record_of("bad %s", "request"))
    now[0] += 0.01
    assert limit.filter(last)
    now[0] += PERIOD_S
    again = record_of("bad %s", "request")
    assert limit.filter(again)
    assert [record.getMessage() for record in (first, last, again)] == [
        "bad request", "bad request (and 4 more like it)", "bad request",
    ]  # fmt: skip


def test_other_lines_come_meanwhile() -> None:
    limit = LogLimit(clock=lambda: 0.0)
    assert limit.filter(record_of("a request has failed: %s", "ValueError"))
    assert limit.filter(record_of("a request has failed: %s", "KeyError"))
    assert limit.filter(record_of("fault", error=ValueError()))
    assert limit.filter(record_of("fault", error=KeyError()))


def test_of_a_fault_only_its_kind_comes() -> None:
    record = record_of("Exception in ASGI application\n", error=ValueError(SECRET))
    assert LogLimit().filter(record)
    assert logging.Formatter().format(record) == "Exception in ASGI application: ValueError"


async def test_requests_that_are_none_do_not_fill_the_log(tiny: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tiny) as server:
        for _ in range(5):
            headers = {"connection": "upgrade", "upgrade": "h2c"}
            assert (await server.client.get(f"/v1/models/{SECRET}", headers=headers)).status_code == 404
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("uvicorn")]
    assert lines
    assert len(lines) == len(set(lines))
    assert SECRET not in caplog.text
