"""Where requests may go: the hosts the server is known under, on every path alike, and what shows the way."""

from __future__ import annotations

import pytest

from aiokv import ConfigError
from aiokv_engine.model_file import LoadedModel
from aiokv_engine.server.app import Access
from tests.serve.cases import MODEL, error_of, running


async def test_the_address_alone_tells_where_to_go_on(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        places = (await server.client.get("/")).json()
        assert places.pop("model") == MODEL
        assert {name: (await server.client.get(path)).status_code for name, path in places.items()} == {
            "api": 404, "openapi": 200, "live": 200, "metrics": 200,
        }  # fmt: skip
        assert (await server.client.get(places["api"] + "/models")).status_code == 200
        assert "/" not in (await server.client.get(places["openapi"])).json()["paths"]


async def test_the_live_page_and_what_it_reads_are_served(tiny: LoadedModel) -> None:
    async with running(tiny, gpu_blocks=33) as server:
        page = await server.client.get("/live")
        state = await server.client.get("/live.json")
    assert page.headers["content-type"].startswith("text/html")
    assert "<html" in page.text
    assert state.status_code == 200
    assert state.json()["is_accepting"]


async def test_requests_for_a_foreign_host_are_refused(tiny: LoadedModel) -> None:
    access = Access(allowed_hosts=("Example.org", "*.example.COM"))
    async with running(tiny, access=access) as server:
        for host, status in (("example.org:81", 200), ("a.example.com", 200), ("evil.net", 400), ("127.0.0.1", 400)):
            response = await server.client.get("/v1/models", headers={"host": host})
            assert response.status_code == status, host
    async with running(tiny) as server:
        response = await server.client.get("/v1/models", headers={"host": "evil.net"})
        assert error_of(response)["code"] == "unknown_host"
        assert (await server.client.get("/v1/models", headers={"host": "localhost"})).status_code == 200


async def test_a_foreign_host_is_refused_on_every_path_alike(tiny: LoadedModel) -> None:
    paths = ("/", "/live", "/live.json", "/metrics", "/health", "/ready", "/openapi.json", "/v1/models", "/v1/nothing")
    asked = [*(("GET", path) for path in paths), ("POST", "/v1/completions"), ("GET", "/v1/completions")]
    async with running(tiny) as server:
        for method, path in asked:
            refused = await server.client.request(method, path, headers={"host": "evil.net"})
            assert (refused.status_code, error_of(refused)["code"]) == (400, "unknown_host"), path
        assert await server.metric("aiokv_serve_requests_total", outcome="invalid") == 0


@pytest.mark.parametrize("host", ["evil.net:80", "http://evil.net", "*.*", ""])
def test_an_allowed_host_that_is_none_is_refused_before_anything_is_loaded(host: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        Access(allowed_hosts=("localhost", host))


async def test_a_host_that_is_malformed_is_no_known_host(tiny: LoadedModel) -> None:
    """A URL of such a header falls back to the address of the server, which is allowed."""
    hosts = (
        b"",
        b"[::1",
        b"[::1]x",
        b"//evil.net",
        b"evil.net/127.0.0.1",
        b"user@127.0.0.1",
        b"127.0.0.1:port",
        b"\xff",
    )
    async with running(tiny) as server:
        for host in hosts:
            assert (await server.client.get("/v1/models", headers=[(b"host", host)])).status_code == 400, host
        for host in (b"LocalHost:81", b"[::1]:81"):
            assert (await server.client.get("/v1/models", headers=[(b"host", host)])).status_code == 200, host
