"""Embeds an aiokv runtime in a Starlette or FastAPI app: lifespan, metrics, probes, admin routes, live page."""

from aiokv_asgi.guards import LOOPBACK_HOSTS
from aiokv_asgi.routes import KvRoutes
from aiokv_asgi.secret import read_token

__all__ = ["LOOPBACK_HOSTS", "KvRoutes", "read_token"]
