"""`GET /health` and `GET /ready`: for whoever restarts the process, and for whoever sends it requests.

Alive says only that the event loop turns. Ready says that requests are let in and the arenas are as they will be; a
runtime that is degraded (unpinned, without its backend) still serves, and is ready.
"""

from __future__ import annotations

from enum import Enum
from typing import final

from starlette.requests import Request
from starlette.responses import Response

from aiokv import KVRuntime
from aiokv_asgi.answers import answer_json

__all__ = ["Probes", "Readiness"]


class Readiness(Enum):
    """Whether requests should be sent here; all but READY are answered with 503."""

    READY = "ready"
    NOT_OPEN = "not_open"
    """The runtime has not been opened yet."""
    PINNING = "pinning"
    """The CPU arena is being registered with the device: until then nothing is stored."""
    DRAINING = "draining"
    """The host wants no more requests: it is about to close."""
    CLOSED = "closed"
    """The runtime is closing or closed."""


@final
class Probes:
    """Answers probes about one runtime."""

    __slots__ = ("_is_draining", "_kv")

    def __init__(self, kv: KVRuntime) -> None:
        self._kv = kv
        self._is_draining = False

    def start_draining(self) -> None:
        """Be not ready from now on. Idempotent."""
        self._is_draining = True

    async def show_health(self, request: Request) -> Response:
        """200 as long as the loop turns."""
        return answer_json({"status": "alive"})

    async def show_ready(self, request: Request) -> Response:
        """200, or 503 and why."""
        readiness = self.find_readiness()
        body = {"status": readiness.value, "degraded": list(self._kv.collector.standing().degraded)}
        return answer_json(body, status=200 if readiness is Readiness.READY else 503)

    def find_readiness(self) -> Readiness:
        """Where the runtime stands; what is final comes first."""
        standing = self._kv.collector.standing()
        if standing.is_open and not standing.is_accepting:
            return Readiness.CLOSED
        if self._is_draining:
            return Readiness.DRAINING
        if not standing.is_open:
            return Readiness.NOT_OPEN
        return Readiness.READY if standing.pinning.is_settled else Readiness.PINNING
