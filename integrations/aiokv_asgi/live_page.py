"""`GET /live`, a page that shows the runtime at work, and `GET /live.json`, what the page draws.

Rules: the page is one file and asks nobody but us; its policy lets no other script run in it, whatever a request is
called. However many people watch, the state is taken a few times a second at most, in a thread.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from functools import cache
from importlib.resources import files
from typing import Final, final

import anyio
from starlette.requests import Request
from starlette.responses import Response

from aiokv import KVRuntime, UsageError
from aiokv_asgi.answers import SECURE_HEADERS, Workers, answer_json, encode_json

__all__ = ["LivePage"]

_CELLS: Final = 1024
"""Cells of each map: the page draws them as 16 rows of 64."""
_MAX_AGE_S: Final = 0.25
_INLINE: Final = r"<{0}>(.*?)</{0}>"


@final
class LivePage:
    """Shows one runtime."""

    __slots__ = ("_body", "_kv", "_lock", "_taken_at", "_workers")

    def __init__(self, kv: KVRuntime, *, workers: Workers) -> None:
        self._kv = kv
        self._workers = workers
        self._lock = anyio.Lock()
        self._body = b""
        self._taken_at = 0.0

    async def show_page(self, request: Request) -> Response:
        """The page itself; it is the same for every runtime."""
        page = await self._workers.run(_read_page)
        headers = {**SECURE_HEADERS, "Content-Security-Policy": await self._workers.run(_make_policy)}
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    async def show_state(self, request: Request) -> Response:
        """`LiveState` as JSON, of this moment or of a quarter of a second ago; 503 before the runtime is open."""
        try:
            async with self._lock:
                await self._refresh()
        except UsageError as error:
            return answer_json({"error": str(error)}, status=503)
        return Response(self._body, media_type="application/json", headers=SECURE_HEADERS)

    async def _refresh(self) -> None:
        now = time.monotonic()
        if not self._body or now - self._taken_at >= _MAX_AGE_S:
            self._body = await self._workers.run(self._take)
            self._taken_at = now

    def _take(self) -> bytes:
        return encode_json(self._kv.collector.live(cells=_CELLS).as_json())


@cache
def _read_page() -> str:
    return files("aiokv_asgi").joinpath("live.html").read_text(encoding="utf-8")


@cache
def _make_policy() -> str:
    """Nothing but the page's own style and script, and requests to where it came from."""
    page = _read_page()
    return "; ".join((
        "default-src 'none'",
        f"script-src {_hash_inline(page, 'script')}",
        f"style-src {_hash_inline(page, 'style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ))  # fmt: skip


def _hash_inline(page: str, tag: str) -> str:
    contents = re.findall(_INLINE.format(tag), page, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in contents)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
