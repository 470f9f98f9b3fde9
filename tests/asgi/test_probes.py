"""Probes and lifespan: alive is not ready, degraded is not unready, and a failed start leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, final

import pytest
from starlette.applications import Starlette

from aiokv import ConfigError, KVRuntime, RuntimeConfig
from aiokv.backends.base import BackendLayout
from aiokv.testing import FakeBackend
from aiokv_asgi import KvRoutes
from tests.asgi.support import app_of, client_of, embedded, new_runtime, reached
from tests.runtime.staged_pinning import PinningBackend, StagedPinning
from tests.runtime.support import GEOMETRY, granted, prompt, turns, until


@final
class SlowToOpen:
    """A fake backend whose `open` stands still, in its worker thread, until it is let go."""

    def __init__(self) -> None:
        self.fake = FakeBackend(manual=False)
        self.reached = threading.Event()
        self.let_go = threading.Event()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever else a backend does
        return getattr(self.fake, name)

    def open(self, layout: BackendLayout) -> None:
        self.reached.set()
        self.let_go.wait(20.0)
        self.fake.open(layout)


def runtime_over(backend: Any) -> KVRuntime:  # noqa: ANN401  # anything with the methods of a backend
    return KVRuntime(RuntimeConfig(geometry=GEOMETRY, gpu_blocks=9, cpu_blocks=16, backend=backend))


# Probes.


async def test_ready_from_open_until_draining_and_alive_all_the_while() -> None:
    kv = new_runtime()
    kv_routes = KvRoutes(kv)
    app = app_of(kv_routes)
    seen = []

    async with client_of(app) as client:

        async def look() -> None:
            ready, health = await client.get("/ready"), await client.get("/health")
            seen.append((ready.status_code, ready.json()["status"]))
            assert (health.status_code, health.json()) == (200, {"status": "alive"})

        await look()
        async with kv_routes.lifespan(app):
            await look()
            kv_routes.start_draining()
            kv_routes.start_draining()
            await look()
            async with kv.acquire("a", prompt(1)):
                pass  # who is here already is served
        await look()
    assert seen == [(503, "not_open"), (200, "ready"), (503, "draining"), (503, "closed")]


async def test_a_runtime_that_its_host_opens_and_closes_is_seen_as_it_is() -> None:
    kv = new_runtime()
    kv_routes = KvRoutes(kv)
    async with client_of(app_of(kv_routes)) as client:
        async with kv:
            assert (await client.get("/ready")).status_code == 200
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()) == (503, {"status": "closed", "degraded": []})


async def test_draining_before_opening_is_said_first() -> None:
    kv_routes = KvRoutes(new_runtime())
    kv_routes.start_draining()
    async with client_of(app_of(kv_routes)) as client:
        assert (await client.get("/ready")).json()["status"] == "draining"


async def test_not_ready_while_the_arena_is_pinned_and_ready_though_degraded_when_it_cannot_be() -> None:
    staged = StagedPinning()
    async with embedded(runtime_over(PinningBackend(FakeBackend(manual=False), staged))) as case:
        async with case.kv.acquire("early", prompt(1)):
            answer = await case.client.get("/ready")
            assert (answer.status_code, answer.json()["status"]) == (503, "pinning")
        staged.give_up()
        answer = await case.client.get("/ready")
        assert (answer.status_code, answer.json()) == (200, {"status": "ready", "degraded": ["unpinned"]})


async def test_a_lost_backend_is_degraded_and_ready() -> None:
    async with embedded() as case:
        case.kv.core.lose_backend()
        answer = await case.client.get("/ready")
        assert (answer.status_code, answer.json()) == (200, {"status": "ready", "degraded": ["backend_lost"]})


async def test_closed_while_the_last_copies_are_awaited() -> None:
    backend = FakeBackend(manual=True)
    kv = new_runtime(backend=backend)
    async with embedded(kv) as case:
        lease = granted(kv, prompt(2))
        lease.confirm(lease.num_tokens)
        await until(lambda: bool(backend.pending))
        lease.release()
        closing = asyncio.ensure_future(kv.aclose())
        await turns(2)
        assert not closing.done()
        assert (await case.client.get("/ready")).json()["status"] == "closed"
        backend.complete_all()
        await closing


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_answer_head_and_refuse_other_methods(path: str) -> None:
    async with embedded() as case:
        head = await case.client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["cache-control"] == "no-store"
        assert (await case.client.post(path)).status_code == 405


# Lifespan.


async def test_a_configuration_that_cannot_be_used_fails_the_start_up() -> None:
    kv = KVRuntime(RuntimeConfig(geometry=GEOMETRY, gpu_blocks=9, backend="host"), arenas={"nobody": []})
    kv_routes = KvRoutes(kv)
    app = app_of(kv_routes)
    with pytest.raises(ConfigError):
        async with kv_routes.lifespan(app):
            pytest.fail("the app must not start")
    async with client_of(app) as client:
        assert (await client.get("/ready")).json()["status"] == "not_open"


async def test_a_start_up_that_is_cancelled_leaves_no_backend_open() -> None:
    backend = SlowToOpen()
    kv_routes = KvRoutes(runtime_over(backend))
    app = app_of(kv_routes)

    async def start() -> None:
        async with kv_routes.lifespan(app):
            pytest.fail("the app must not start")

    starting = asyncio.ensure_future(start())
    async with client_of(app) as client:
        await reached(backend.reached)
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
        backend.let_go.set()
        await until(lambda: backend.fake.closed)
        assert (await client.get("/ready")).json()["status"] == "not_open"


async def test_an_app_that_fails_closes_the_runtime() -> None:
    kv = new_runtime()
    kv_routes = KvRoutes(kv)
    with pytest.raises(ZeroDivisionError):
        async with kv_routes.lifespan(Starlette()):
            granted(kv, prompt(1)).release()
            raise ZeroDivisionError
    assert not kv.collector.standing().is_accepting


async def test_a_shut_down_that_is_cancelled_still_drains() -> None:
    backend = FakeBackend(manual=True)
    kv = new_runtime(backend=backend)
    kv_routes = KvRoutes(kv)
    shutting_down = asyncio.Event()

    async def run() -> None:
        async with kv_routes.lifespan(Starlette()):
            lease = granted(kv, prompt(2))
            lease.confirm(lease.num_tokens)
            await until(lambda: bool(backend.pending))
            lease.release()
            shutting_down.set()

    running = asyncio.ensure_future(run())
    await shutting_down.wait()
    await turns(2)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    backend.complete_all()
    await kv.aclose()
    assert backend.closed


async def test_the_lifespan_nests_in_that_of_the_host() -> None:
    kv = new_runtime()
    kv_routes = KvRoutes(kv)
    order = []
    async with kv_routes.lifespan(Starlette()):
        order.append(kv.collector.standing().is_accepting)
    order.append(kv.collector.standing().is_accepting)
    assert order == [True, False]
