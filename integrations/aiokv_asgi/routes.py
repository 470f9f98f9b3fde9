"""`KvRoutes`: what an app mounts to embed one runtime.

    kv_routes = KvRoutes(kv)
    app = Starlette(routes=kv_routes.routes, lifespan=kv_routes.lifespan)

In FastAPI: `app.router.routes.extend(kv_routes.routes)`, which keeps them out of its OpenAPI document.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import final

from prometheus_client import CollectorRegistry
from starlette.routing import BaseRoute, Route

from aiokv import KVRuntime
from aiokv_asgi.admin import Admin
from aiokv_asgi.answers import Workers
from aiokv_asgi.exposition import Exposition
from aiokv_asgi.guards import LOOPBACK_HOSTS, check_bearer, check_host
from aiokv_asgi.live_page import LivePage
from aiokv_asgi.probes import Probes

__all__ = ["KvRoutes"]


@final
class KvRoutes:
    """Routes and lifespan of one runtime, which may be not open yet.

    Without a `registry` the metrics are those of the runtime; a registry that is given has to show them itself, with
    `kv.collector` or, for several runtimes, with an `aiokv.observe.pools.PoolsCollector`. `allowed_hosts` names the
    hosts that requests may be for, without ports: `*.example.com` stands for all below it, `*` for any. `/kv/*` are
    there only with an `admin_token`, `/live` and `/live.json` only with `live`.
    """

    __slots__ = ("_kv", "_probes", "routes")

    def __init__(
        self,
        kv: KVRuntime,
        *,
        registry: CollectorRegistry | None = None,
        admin_token: str | None = None,
        allowed_hosts: Sequence[str] = LOOPBACK_HOSTS,
        live: bool = True,
    ) -> None:
        if registry is None:
            registry = CollectorRegistry()
            registry.register(kv.collector)
        self._kv = kv
        self._probes = Probes(kv)
        workers = Workers()
        get = partial(Route, methods=["GET"], middleware=[check_host(allowed_hosts)])
        self.routes: list[BaseRoute] = [
            get("/metrics", Exposition(registry, workers=workers).show),
            get("/health", self._probes.show_health),
            get("/ready", self._probes.show_ready),
        ]
        if live:
            page = LivePage(kv, workers=workers)
            self.routes += [get("/live", page.show_page), get("/live.json", page.show_state)]
        if admin_token is not None:
            admin = Admin(kv, workers=workers)
            guards = [check_host(allowed_hosts), check_bearer(admin_token)]
            self.routes += [
                Route("/kv/snapshot", admin.show_snapshot, methods=["GET"], middleware=guards),
                Route("/kv/audit", admin.show_audit, methods=["GET"], middleware=guards),
                Route("/kv/reset", admin.reset, methods=["POST"], middleware=guards),
            ]

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Open the runtime with the app and close it with it; requests are served while its arena is still pinned."""
        async with self._kv:
            try:
                yield
            finally:
                self.start_draining()

    def start_draining(self) -> None:
        """From now on `/ready` answers 503 `draining`, so that no new requests are sent here. Idempotent."""
        self._probes.start_draining()
