"""Who is answered: the hosts we are known under, and who knows the token; everybody else learns nothing."""

from __future__ import annotations

import hmac
from pathlib import Path

import httpx
import pytest

from aiokv import ConfigError
from aiokv.runtime.config_file import load_settings
from aiokv_asgi import LOOPBACK_HOSTS, KvRoutes, read_token
from tests.asgi.support import AUTHORIZED, TOKEN, app_of, client_of, embedded, new_runtime

PUBLIC = ("/metrics", "/health", "/ready", "/live", "/live.json")
ADMIN = (("GET", "/kv/snapshot"), ("GET", "/kv/audit"), ("POST", "/kv/reset?tier=cpu"))
NOT_ALLOWED = "the Host header names no host that is allowed here"
EVERYTHING = (*(("GET", path) for path in PUBLIC), *ADMIN)


# Hosts.


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "LocalHost", "localhost:8000", "[::1]:8000"])
async def test_our_own_names_are_answered_whatever_the_port(host: str) -> None:
    async with embedded() as case:
        for method, path in EVERYTHING:
            answer = await case.client.request(method, path, headers={"Host": host, **AUTHORIZED})
            assert answer.status_code == 200, path


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "evil.example:8000", "localhost@evil.example", "10.0.0.1", "", "["],
)
async def test_a_rebound_name_is_refused_everywhere(host: str) -> None:
    async with embedded() as case:
        for method, path in EVERYTHING:
            forwarded = {"Host": host, "X-Forwarded-Host": "localhost", **AUTHORIZED}
            answer = await case.client.request(method, path, headers=forwarded)
            assert (answer.status_code, answer.json()) == (400, {"error": NOT_ALLOWED}), path
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["cache-control"] == "no-store"


async def test_hosts_can_be_named_by_the_host() -> None:
    async with embedded(allowed_hosts=("kv.internal", "*.pods.example", "2001:db8::1")) as case:
        answered = {}
        for host in ("kv.internal", "a.pods.example", "[2001:db8::1]:80", "localhost", "pods.example.evil"):
            answered[host] = (await case.client.get("/health", headers={"Host": host})).status_code
        assert list(answered.values()) == [200, 200, 200, 400, 400]
    async with embedded(allowed_hosts=("*",)) as case:
        assert (await case.client.get("/health", headers={"Host": "any.example"})).status_code == 200


async def test_a_name_that_lacks_www_is_refused_and_not_sent_elsewhere() -> None:
    async with embedded(allowed_hosts=("www.example.com",)) as case:
        answer = await case.client.get("/health", headers={"Host": "example.com"})
        assert answer.status_code == 400
        assert "location" not in answer.headers


@pytest.mark.parametrize(
    "hosts", [(), "localhost", ("localhost:80",), ("http://localhost",), ("*.",), ("a*",), ("**",), ("a b",), ("",)]
)
def test_patterns_that_are_no_hosts_are_refused(hosts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        KvRoutes(new_runtime(), allowed_hosts=hosts)


def test_loopback_is_the_default() -> None:
    assert LOOPBACK_HOSTS == ("localhost", "127.0.0.1", "::1")


# Tokens.


async def test_without_a_token_there_are_no_admin_routes() -> None:
    async with embedded(admin_token=None) as case:
        for method, path in ADMIN:
            answer = await case.client.request(method, path, headers=AUTHORIZED)
            assert answer.status_code == 404, path


@pytest.mark.parametrize(
    "credentials",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [b"Bearer short"],
        [b"Bearer " + TOKEN[:-1].encode()],
        [b"Bearer " + TOKEN.encode() + b"x"],
        [b"Bearer " + TOKEN.upper().encode()],
        [b"Bearer " + "ä-token-for-tests-0123456789".encode()],
        [b"Bearer " + bytes(range(0x80, 0x100))],
        [b"Basic " + TOKEN.encode()],
        [TOKEN.encode()],
        [b"Bearer " + TOKEN.encode(), b"Bearer " + TOKEN.encode()],
        [b"Bearer wrong", b"Bearer " + TOKEN.encode()],
        [b"Bearer " + b"x" * 100_000],
    ],
    ids=repr,
)
async def test_wrong_credentials_are_refused(credentials: list[bytes]) -> None:
    async with embedded() as case:
        for method, path in ADMIN:
            headers = [(b"host", b"localhost"), *((b"authorization", value) for value in credentials)]
            answer = await case.client.request(method, path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == 'Bearer realm="aiokv"'
            assert TOKEN not in answer.text


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_the_right_token_is_let_in(scheme: str) -> None:
    async with embedded() as case:
        answer = await case.client.get("/kv/snapshot", headers={"Authorization": f"{scheme} {TOKEN}"})
        assert answer.status_code == 200
        assert TOKEN not in answer.text


async def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, ours: bytes) -> bool:
        compared.append((given, ours))
        return given == ours

    monkeypatch.setattr(hmac, "compare_digest", compare)
    async with embedded() as case:
        await case.client.get("/kv/snapshot", headers={"Authorization": "Bearer guess"})
        assert (await case.client.get("/kv/snapshot", headers=AUTHORIZED)).status_code == 200
    assert compared == [(b"guess", TOKEN.encode()), (TOKEN.encode(), TOKEN.encode())]


async def test_public_routes_need_no_token() -> None:
    async with embedded() as case:
        for path in PUBLIC:
            assert (await case.client.get(path)).status_code == 200, path


async def test_a_wrong_host_is_told_nothing_of_tokens() -> None:
    async with embedded() as case:
        answer = await case.client.get("/kv/snapshot", headers={"Host": "evil.example"})
        assert answer.status_code == 400
        assert "www-authenticate" not in answer.headers


@pytest.mark.parametrize(
    "token", ["", " ", "short", "fifteen-letters", "with a space in between", "ümlaut" * 4, "a\nb" * 9]
)
def test_tokens_that_are_none_are_refused(token: str, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text(token, encoding="utf-8")
    with pytest.raises(ConfigError, match="admin token") as caught:
        KvRoutes(new_runtime(), admin_token=token)
    assert not token.strip() or token not in str(caught.value)
    with pytest.raises(ConfigError, match="admin token"):
        read_token(file=secret, environ={})
    with pytest.raises(ConfigError, match="AIOKV_ADMIN_TOKEN"):
        read_token(file=None, environ={"AIOKV_ADMIN_TOKEN": token})


def test_a_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text(f"  {TOKEN}\n", encoding="utf-8")
    other = {"AIOKV_ADMIN_TOKEN": "another-token-0123456789"}
    assert read_token(file=secret, environ=other) == TOKEN
    assert read_token(file=None, environ=other) == "another-token-0123456789"
    assert read_token(file=None, environ={}) is None


def test_a_file_that_cannot_be_read_or_is_no_text_is_an_error(tmp_path: Path) -> None:
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the admin token"):
            read_token(file=missing, environ={"AIOKV_ADMIN_TOKEN": TOKEN})
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(256)) * 1000)
    with pytest.raises(ConfigError, match="at most 4096 bytes"):
        read_token(file=binary, environ={})
    binary.write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match="printable ASCII"):
        read_token(file=binary, environ={})


def test_a_token_that_is_too_long_for_its_file_is_no_other_token(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("t" * 4096, encoding="utf-8")
    assert read_token(file=secret, environ={}) == "t" * 4096
    secret.write_text("t" * 4097, encoding="utf-8")
    with pytest.raises(ConfigError, match="at most 4096 bytes") as caught:
        read_token(file=secret, environ={})
    assert "tttt" not in str(caught.value)


def test_the_variable_is_no_setting_of_the_runtime() -> None:
    assert load_settings(file=None, environ={"AIOKV_ADMIN_TOKEN": TOKEN}, arguments={"gpu_blocks": 9}).gpu_blocks == 9


async def test_answers_are_not_kept_and_not_guessed_at() -> None:
    async with embedded() as case:
        answers: list[httpx.Response] = [
            await case.client.request(method, path, headers=AUTHORIZED) for method, path in EVERYTHING
        ]
    for answer in answers:
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in answer.headers


async def test_the_live_page_can_be_left_out() -> None:
    kv = new_runtime()
    async with client_of(app_of(KvRoutes(kv, live=False))) as client:
        for path in ("/live", "/live.json"):
            assert (await client.get(path)).status_code == 404
        assert (await client.get("/health")).status_code == 200
