"""`GET /metrics`: a registry in the format that the scraper asks for, rendered in a thread.

A registry of 10,000 series holds whoever renders it for a quarter of a second: that must not be the event loop.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import partial
from typing import Final, final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from aiokv_asgi.answers import SECURE_HEADERS, Workers

__all__ = ["Exposition"]

_GZIP_LEVEL: Final = 4


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    body: bytes
    headers: dict[str, str]


@final
class Exposition:
    """Shows one registry."""

    __slots__ = ("_registry", "_workers")

    def __init__(self, registry: CollectorRegistry, *, workers: Workers) -> None:
        self._registry = registry
        self._workers = workers

    async def show(self, request: Request) -> Response:
        """All families, or those of `?name[]=`; text or OpenMetrics by `Accept`, gzip by `Accept-Encoding`."""
        render = partial(
            _render,
            self._registry,
            accept=",".join(request.headers.getlist("accept")),
            encodings=",".join(request.headers.getlist("accept-encoding")),
            names=request.query_params.getlist("name[]"),
        )
        page = await self._workers.run(render)
        return Response(page.body, headers={**SECURE_HEADERS, **page.headers})


def _render(registry: CollectorRegistry, *, accept: str, encodings: str, names: list[str]) -> _Page:
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # versions that are no numbers: what cannot be read asks for nothing
        encode, content_type = choose_encoder("")
    body = encode(registry.restricted_registry(names) if names else registry)  # type: ignore[no-untyped-call, unused-ignore]  # typed since 0.23
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    if _takes_gzip(encodings):
        return _Page(body=gzip.compress(body, _GZIP_LEVEL), headers={**headers, "Content-Encoding": "gzip"})
    return _Page(body=body, headers=headers)


def _takes_gzip(encodings: str) -> bool:
    for encoding in encodings.lower().split(","):
        name, _, weight = encoding.partition(";")
        if name.strip() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
