"""What `aiokv top` asks, and what it refuses as an answer: within its patience, and in one line."""

from __future__ import annotations

import gzip
import json
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from aiokv.cli.top_source import LiveSource, NoLiveState, find_live_url
from aiokv.errors import UsageError
from tests.cli.top_server import LIVE, Answer, LiveServer, answering, body, document, serving

PATIENCE_S = 20.0
SHORT_S = 0.3


def read(url: str, *, patience_s: float = PATIENCE_S) -> object:
    return LiveSource(url, patience_s=patience_s).read()


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/live.json"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/live.json"),
        ("https://kv.example/internal/", "https://kv.example/internal/live.json"),
        ("http://[::1]:8000/live.json", "http://[::1]:8000/live.json"),
    ],
)
def test_live_state_is_below_the_path_of_the_server(url: str, asked: str) -> None:
    assert find_live_url(url) == asked


@pytest.mark.parametrize(
    "url",
    [
        "", "127.0.0.1:8000", "localhost", "http://", "http:///live", "file:///etc/passwd", "ftp://host/x", "data:,x",
        "http://host:port", "http://host:99999", "http://[::1", "http://ho st", "http://host/\n", "http://host/\x1b[2J",
        "http://höst/", "http://user:secret@host", "http://host/?a=b", "http://host/#a",
    ],
)  # fmt: skip
def test_what_is_no_address_of_a_server_is_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        find_live_url(url)
    assert "secret" not in str(refused.value)
    assert str(refused.value).isprintable()


def test_document_is_read_from_the_path_asked_for() -> None:
    with serving(LIVE) as server:
        assert read(server.url + "/internal") == LIVE
        assert server.paths == ["/internal/live.json"]


def test_loopback_is_asked_without_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving(LIVE) as server:
        assert read(server.url) == LIVE


def test_another_machine_is_asked_through_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving(LIVE) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert read("http://kv.example:8000") == LIVE
        assert proxy.paths == ["http://kv.example:8000/live.json"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (body(b"<html>hello</html>", kind="text/html"), "something else than JSON"),
        (body(b""), "something else than JSON"),
        (body(b"\xff\xfe\x00"), "something else than JSON"),
        (body(gzip.compress(json.dumps(LIVE).encode())), "something else than JSON"),
        (body(b'{"uptime_s": NaN}'), "something else than JSON"),
        (body(b'{"uptime_s": 1e999}'), "something else than JSON"),
        (body(b'{"uptime_s": ' + b"9" * 10_000 + b"}"), "something else than JSON"),
        (body(b"[" * 200_000 + b"]" * 200_000), "something else than JSON"),
        (document({"detail": "Not Found"}, status=404), "404 Not Found"),
        (document({"error": "not open"}, status=503), "503 Service Unavailable: its runtime is not open"),
        (document({"error": "host"}, status=400), "400 Bad Request: does it allow this host name?"),
        (body(b"", status=302, Location="file:///etc/passwd"), "302"),
        (body(b"", status=302, Location="ftp://127.0.0.1/x"), "302"),
        (body(b"", status=302, Location="//["), "Invalid IPv6 URL"),
        (body(b"x" * (1 << 20) + b"x"), "more than 1 MiB"),
    ],
)  # fmt: skip
def test_an_answer_that_is_no_live_state_is_one_line(answer: Answer, said: str) -> None:
    with answering(answer) as server, pytest.raises(NoLiveState) as error:
        read(server.url)
    assert said in str(error.value)
    assert server.url in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 200


def test_redirect_within_http_is_followed() -> None:
    with serving(LIVE) as server, answering(body(b"", status=307, Location=f"{server.url}/live.json")) as front:
        assert read(front.url) == LIVE


def test_redirect_to_itself_ends() -> None:
    with answering(body(b"", status=302, Location="/live.json")) as server, pytest.raises(NoLiveState, match="302"):
        read(server.url)
    assert len(server.paths) < 20


def test_what_a_server_writes_into_its_status_line_is_inert() -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"\x1b]0;owned\x07\x1b[2J not HTTP\r\n\r\n")
        request.close_connection = True

    with answering(answer) as server, pytest.raises(NoLiveState) as error:
        read(server.url)
    assert str(error.value).isprintable()


def test_closed_port_is_told_at_once() -> None:
    with serving(LIVE) as server:
        url = server.url
    with pytest.raises(NoLiveState, match="refused"):
        read(url)


@contextmanager
def dripping(start: bytes) -> Iterator[LiveServer]:
    """A server whose answers never end, and are never silent for as long as the timeout of a socket."""

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(start)
        while not server.until_released.wait(SHORT_S / 10):
            request.wfile.write(b" ")
            request.wfile.flush()

    with answering(drip) as server:
        yield server


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nX-Long: ", b"HTTP/1.1 200 OK\r\n\r\n{"])
def test_answer_that_never_ends_costs_no_more_than_the_patience(start: bytes) -> None:
    with dripping(start) as server:
        source = LiveSource(server.url, patience_s=SHORT_S)
        for _ in range(3):
            with pytest.raises(NoLiveState, match="no answer within"):
                source.read()
        assert len(server.paths) <= 3


def test_questions_that_are_never_answered_leave_one_thread_behind() -> None:
    with dripping(b"HTTP/1.1 200 OK\r\nX-Long: ") as server:
        source = LiveSource(server.url, patience_s=SHORT_S)
        for _ in range(3):
            with pytest.raises(NoLiveState):
                source.read()
        assert len(server.paths) == 1


def test_server_that_answers_again_is_read_again() -> None:
    def hang(request: BaseHTTPRequestHandler) -> None:
        server.until_released.wait(PATIENCE_S)

    with answering(hang) as server:
        source = LiveSource(server.url, patience_s=SHORT_S)
        with pytest.raises(NoLiveState):
            source.read()
        server.until_released.set()
        server.answer = document(LIVE)
        deadline = time.monotonic() + PATIENCE_S
        answer: object = None
        while answer is None and time.monotonic() < deadline:
            try:
                answer = source.read()
            except NoLiveState:
                continue
        assert answer == LIVE


def test_answer_that_never_ends_is_given_up_and_the_server_asked_anew() -> None:
    with dripping(b"HTTP/1.1 200 OK\r\n\r\n{") as server:
        source = LiveSource(server.url, patience_s=SHORT_S)
        with pytest.raises(NoLiveState, match="no answer within"):
            source.read()
        server.answer = document(LIVE)
        deadline = time.monotonic() + PATIENCE_S
        answer: object = None
        while answer is None and time.monotonic() < deadline:
            try:
                answer = source.read()
            except NoLiveState:
                continue
        assert answer == LIVE


@pytest.fixture
def certified(tmp_path: Path) -> ssl.SSLContext:
    """What a server with a certificate of its own making speaks."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("makes a certificate with openssl, which is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    arguments = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([openssl, *arguments, *names], check=True, capture_output=True, timeout=30)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def test_https_needs_a_certificate_that_somebody_vouches_for(
    certified: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(LIVE, tls=certified) as server:
        with pytest.raises(NoLiveState, match="certificate verify failed"):
            read(server.url)
        assert not server.paths
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
        assert read(server.url) == LIVE


def test_https_is_not_left_for_http_by_a_redirect(
    certified: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
    with serving(LIVE) as plain:
        redirect = body(b"", status=302, Location=f"{plain.url}/live.json")
        with answering(redirect, tls=certified) as server, pytest.raises(NoLiveState, match="302"):
            read(server.url)
        assert not plain.paths
