"""The routes in apps as hosts build them: FastAPI, under a prefix, two runtimes, a real server and rude clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount

from aiokv import ConfigError, KVRuntime, RuntimeConfig
from aiokv_asgi import KvRoutes
from tests.asgi.support import AUTHORIZED, TOKEN, app_of, client_of, new_runtime, served
from tests.runtime.support import GEOMETRY, granted, prompt, turns

PATHS = ("/metrics", "/health", "/ready", "/live", "/live.json", "/kv/snapshot", "/kv/audit")


async def statuses(client: httpx.AsyncClient, *, prefix: str = "") -> set[int]:
    return {(await client.get(f"{prefix}{path}", headers=AUTHORIZED)).status_code for path in PATHS}


# Apps.


async def test_fastapi_takes_the_routes_and_keeps_them_out_of_its_document() -> None:
    kv_routes = KvRoutes(new_runtime(), admin_token=TOKEN)
    app = FastAPI(lifespan=kv_routes.lifespan)
    app.router.routes.extend(kv_routes.routes)

    @app.get("/v1/models")
    async def list_models() -> list[str]:
        return ["tiny"]

    async with kv_routes.lifespan(app), client_of(app) as client:
        assert await statuses(client) == {200}
        assert (await client.get("/v1/models")).json() == ["tiny"]
        assert (await client.post("/kv/reset?tier=cpu", headers=AUTHORIZED)).status_code == 200
        assert (await client.get("/kv/snapshot")).status_code == 401
        assert set((await client.get("/openapi.json")).json()["paths"]) == {"/v1/models"}


@pytest.mark.parametrize("host_app", [Starlette, FastAPI])
async def test_under_a_prefix(host_app: type[Starlette]) -> None:
    kv_routes = KvRoutes(new_runtime(), admin_token=TOKEN)
    app = host_app(lifespan=kv_routes.lifespan)
    app.mount("/internal", Starlette(routes=kv_routes.routes))
    async with kv_routes.lifespan(app), client_of(app) as client:
        assert await statuses(client, prefix="/internal") == {200}
        assert await statuses(client) == {404}
        assert 'fetch("live.json"' in (await client.get("/internal/live")).text, "found beside the page"
        evil = await client.get("/internal/live.json", headers={"Host": "evil.example"})
        assert evil.status_code == 400


async def test_two_runtimes_in_one_app() -> None:
    chat, batch = (KvRoutes(new_runtime(cpu_blocks=cpu_blocks), admin_token=TOKEN) for cpu_blocks in (64, 0))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for kv_routes in (chat, batch):
                await stack.enter_async_context(kv_routes.lifespan(app))
            yield

    app = Starlette(
        routes=[Mount("/chat", routes=chat.routes), Mount("/batch", routes=batch.routes)], lifespan=lifespan
    )
    async with served(app) as server, httpx.AsyncClient(base_url=server.origin) as client:
        assert await statuses(client, prefix="/chat") == await statuses(client, prefix="/batch") == {200}
        tiers = [set((await client.get(f"/{name}/live.json")).json()["tiers"]) for name in ("chat", "batch")]
        assert tiers == [{"gpu", "cpu"}, {"gpu"}]
        batch.start_draining()
        assert (await client.get("/batch/ready")).status_code == 503
        assert (await client.get("/chat/ready")).status_code == 200


# A real server.


async def test_the_life_of_a_server_is_that_of_the_runtime() -> None:
    kv = new_runtime()
    async with served(app_of(KvRoutes(kv, admin_token=TOKEN))) as server:
        async with httpx.AsyncClient(base_url=server.origin) as client:
            assert await statuses(client) == {200}
            assert (await client.get("/ready")).json() == {"status": "ready", "degraded": []}
        assert kv.collector.standing().is_accepting
    assert not kv.collector.standing().is_accepting


async def test_a_server_is_told_why_the_runtime_does_not_open() -> None:
    kv = KVRuntime(RuntimeConfig(geometry=GEOMETRY, gpu_blocks=9, backend="host"), arenas={"nobody": []})
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "lifespan.startup"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    with pytest.raises(ConfigError):
        await app_of(KvRoutes(kv))({"type": "lifespan", "state": {}}, receive, send)
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]
    assert "no tensors for 'full'" in sent[0]["message"]


@pytest.mark.parametrize("path", ["/metrics", "/kv/audit", "/kv/snapshot", "/live.json"])
async def test_a_client_that_hangs_up_harms_nobody(path: str) -> None:
    kv = new_runtime(gpu_blocks=20_000, cpu_blocks=0)
    async with served(app_of(KvRoutes(kv, admin_token=TOKEN))) as server:
        lease = granted(kv, prompt(1))
        for turns_before in (0, 1, 4, 16):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
            writer.write(request.encode())
            await turns(turns_before)
            writer.transport.abort()
            await turns(2)
        async with httpx.AsyncClient(base_url=server.origin) as client:
            assert await statuses(client) == {200}
            audit = (await client.get("/kv/audit", headers=AUTHORIZED)).json()
            assert (audit["violations"]["count"], audit["leases"]["count"]) == (0, 1)
        lease.release()
