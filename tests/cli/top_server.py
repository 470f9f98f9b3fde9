"""Servers that answer `aiokv top` as a test says, in threads of their own on a free port of the loopback."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, final

__all__ = ["LIVE", "Answer", "LiveServer", "answering", "body", "changed", "document", "serving"]

Answer = Callable[[BaseHTTPRequestHandler], None]

LIVE: dict[str, Any] = {
    "schema_version": 1,
    "version": "0.1.0",
    "backend": "host",
    "block_tokens": 16,
    "uptime_s": 12.5,
    "degraded": [],
    "is_accepting": True,
    "tiers": {
        "gpu": {
            "slots": 1023,
            "states": {"free": 123, "reserved": 45, "resident": 855, "quarantined": 0},
            "pinned": 66,
            "cell_slots": 2,
            "cells": "p" * 33 + "c" * 394 + "r" * 23 + "." * 61,
        },
        "cpu": {
            "slots": 8192,
            "states": {"free": 4000, "reserved": 0, "resident": 4191, "quarantined": 1},
            "pinned": 12,
            "cell_slots": 16,
            "cells": "q" + "c" * 261 + "." * 250,
        },
    },
    "prompt_tokens": {"gpu": 3000, "cpu": 1000, "compute": 4000},
    "transfers": {
        "load": {
            "queued_blocks": 7,
            "inflight_blocks": 64,
            "ended_blocks": {"ok": 500, "corrupt": 0, "error": 0, "lost": 0},
            "bytes": 500 << 20,
        },
        "store": {
            "queued_blocks": 0,
            "inflight_blocks": 8,
            "ended_blocks": {"ok": 900, "corrupt": 0, "error": 3, "lost": 0},
            "bytes": 900 << 20,
        },
    },
    "leases": {
        "active": 6,
        "overdue": 1,
        "waiting": 2,
        "oldest": [
            {"request_id": f"req-{number}", "age_s": 700.0 / number, "state": "ready", "blocks": 11 * number}
            for number in range(1, 8)
        ],
    },
    "evictions": {"gpu": 70, "cpu": 0},
}
"""A live state as a server gives it; `changed` makes others of it."""


def changed(**members: object) -> dict[str, Any]:
    """`LIVE` with other members; a member of an object is named as `leases__waiting`."""
    live = deepcopy(LIVE)
    for name, value in members.items():
        *path, last = name.split("__")
        place: Any = live
        for step in path:
            place = place[step]
        place[last] = value
    return live


def body(content: bytes, *, status: int = 200, kind: str = "application/json", **headers: str) -> Answer:
    """Answer with this body."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(content)

    return answer


def document(content: object, *, status: int = 200) -> Answer:
    """Answer with this as JSON."""
    return body(json.dumps(content).encode(), status=status)


@final
class LiveServer:
    """Answers each request with `answer`, which may be replaced at any time; `paths` are those that were asked for.

    `until_released` is for answers that hang: it ends with the server.
    """

    def __init__(self, answer: Answer, *, tls: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self.paths: list[str] = []
        self.until_released = threading.Event()
        live_server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                live_server.paths.append(self.path)
                try:
                    live_server.answer(self)
                except OSError:  # whoever asked has gone
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._scheme = "http"
        if tls is not None:
            self._scheme = "https"
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"{self._scheme}://{host!s}:{port}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Nobody listens at the port any more."""
        self.until_released.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


@contextmanager
def serving(content: object, *, tls: ssl.SSLContext | None = None) -> Iterator[LiveServer]:
    """A server that answers with this document."""
    with answering(document(content), tls=tls) as server:
        yield server


@contextmanager
def answering(answer: Answer, *, tls: ssl.SSLContext | None = None) -> Iterator[LiveServer]:
    """A server that answers so."""
    server = LiveServer(answer, tls=tls)
    server.start()
    try:
        yield server
    finally:
        server.close()
