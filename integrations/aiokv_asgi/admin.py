"""`/kv`: what an operator may see and do, with a token: `GET /kv/snapshot`, `GET /kv/audit`, `POST /kv/reset`.

Rules: nothing here holds the event loop; lists are cut to `?limit=`; one audit runs at a time, the next one waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, final

import anyio
from starlette.requests import Request
from starlette.responses import Response

from aiokv import KVRuntime, Tier, UsageError
from aiokv_asgi.answers import Workers, answer_json
from aiokv_asgi.views import show_audit, take_snapshot

__all__ = ["Admin"]

_DEFAULT_LIMIT: Final = 100
_MAX_LIMIT: Final = 1000
_ALL_TIERS: Final = "all"

Endpoint = Callable[[Request], Awaitable[Response]]


@final
class _BadQuery(Exception):
    """A parameter that cannot be used; the message is for the client."""


@final
class Admin:
    """Answers operators about one runtime."""

    __slots__ = ("_audits", "_kv", "_workers")

    def __init__(self, kv: KVRuntime, *, workers: Workers) -> None:
        self._kv = kv
        self._workers = workers
        self._audits = anyio.CapacityLimiter(1)

    async def show_snapshot(self, request: Request) -> Response:
        """What is held and copied now."""
        return await _answer(self._take_snapshot, request)

    async def show_audit(self, request: Request) -> Response:
        """Who holds what, and what is wrong; looks at every slot, a slice a turn."""
        return await _answer(self._take_audit, request)

    async def reset(self, request: Request) -> Response:
        """Forget the blocks of `?tier=gpu`, `cpu` or `all`; answers once the slots are swept."""
        return await _answer(self._reset, request)

    async def _take_snapshot(self, request: Request) -> Response:
        snapshot = await take_snapshot(self._kv, limit=_read_limit(request))
        return await self._workers.answer_json(lambda: snapshot)

    async def _take_audit(self, request: Request) -> Response:
        limit = _read_limit(request)
        async with self._audits:
            audit = await self._kv.audit_sliced()
        return await self._workers.answer_json(partial(show_audit, audit, limit=limit))

    async def _reset(self, request: Request) -> Response:
        tiers = _read_tiers(request, configured=tuple(self._kv.core.pools()))
        await self._kv.reset(tiers[0] if len(tiers) == 1 else None)
        return answer_json({"reset": [tier.value for tier in tiers]})


async def _answer(endpoint: Endpoint, request: Request) -> Response:
    try:
        return await endpoint(request)
    except _BadQuery as error:
        return answer_json({"error": str(error)}, status=400)
    except UsageError as error:  # not open yet, or closed
        return answer_json({"error": str(error)}, status=503)


def _read_limit(request: Request) -> int:
    text = request.query_params.get("limit", str(_DEFAULT_LIMIT))
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(_MAX_LIMIT)) and 0 < int(text) <= _MAX_LIMIT):
        raise _BadQuery(f"limit is a whole number from 1 to {_MAX_LIMIT}")
    return int(text)


def _read_tiers(request: Request, *, configured: tuple[Tier, ...]) -> tuple[Tier, ...]:
    names = {tier.value: (tier,) for tier in configured} | {_ALL_TIERS: configured}
    given = request.query_params.getlist("tier")
    if len(given) != 1 or given[0] not in names:
        raise _BadQuery(f"tier is one of {', '.join(sorted(names))}")
    return names[given[0]]
