"""What the tests of the ASGI routes share: a runtime that is not open yet, clients in process, a real server."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, final

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from aiokv import KVRuntime, RuntimeConfig
from aiokv.testing import FakeBackend
from aiokv_asgi import KvRoutes
from tests.runtime.support import GEOMETRY

TOKEN = "a-token-for-tests-0123456789"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


def new_runtime(*, gpu_blocks: int = 33, cpu_blocks: int = 64, backend: FakeBackend | None = None) -> KVRuntime:
    """Not open yet; copies end at the next turn unless the backend says otherwise."""
    copying = FakeBackend(manual=False) if backend is None else backend
    return KVRuntime(RuntimeConfig(geometry=GEOMETRY, gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks, backend=copying))


def app_of(kv_routes: KvRoutes) -> Starlette:
    """An app with nothing but these routes."""
    return Starlette(routes=kv_routes.routes, lifespan=kv_routes.lifespan)


@asynccontextmanager
async def client_of(app: ASGIApp, *, host: str = "localhost") -> AsyncIterator[httpx.AsyncClient]:
    """Requests without a network and without the lifespan."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}", timeout=30.0) as client:
        yield client


async def reached(event: threading.Event) -> None:
    """Wait for a thread to say that it has come so far."""
    assert await asyncio.to_thread(event.wait, 20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """An open runtime behind its routes."""

    kv: KVRuntime
    kv_routes: KvRoutes
    client: httpx.AsyncClient


@asynccontextmanager
async def embedded(kv: KVRuntime | None = None, **options: Any) -> AsyncIterator[Embedded]:  # noqa: ANN401  # of KvRoutes
    """A runtime opened by its routes' lifespan, with the admin routes on unless told otherwise."""
    runtime = new_runtime() if kv is None else kv
    kv_routes = KvRoutes(runtime, **{"admin_token": TOKEN, **options})
    app = app_of(kv_routes)
    async with kv_routes.lifespan(app), client_of(app) as client:
        yield Embedded(kv=runtime, kv_routes=kv_routes, client=client)


@final
class _Server(uvicorn.Server):
    """Leaves the signals of the process alone, and says when it has started."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A real server on the loopback device, in the test's own loop."""

    port: int
    server: uvicorn.Server

    @property
    def origin(self) -> str:
        """What a browser calls it."""
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def served(app: ASGIApp, *, port: int = 0) -> AsyncIterator[Served]:
    """`app` with its lifespan, on a free port unless one is given."""
    with socket.create_server(("127.0.0.1", port)) as listening:
        server = _Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5))
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        try:
            await server.has_started.wait()
            yield Served(port=listening.getsockname()[1], server=server)
        finally:
            server.should_exit = True
            await serving
