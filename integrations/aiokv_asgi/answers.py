"""The answers that all routes give: never stored, never guessed at, JSON made in a thread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar, final

from starlette.responses import Response

__all__ = ["SECURE_HEADERS", "Workers", "answer_json", "encode_json"]

SECURE_HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_THREADS: Final = 4
"""So many answers are made at once; who comes later waits for its turn, and the host's own threads stay free."""

T = TypeVar("T")


@final
class Workers:
    """Threads in which answers are made that would hold the event loop."""

    __slots__ = ("_pool",)

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="aiokv answers")

    async def run(self, make: Callable[[], T]) -> T:
        """What `make` answers. Whoever is cancelled leaves at once: `make` only reads, and ends by itself.

        Until it has ended its thread makes no other answer: however many leave, there are no more threads.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, make)

    async def answer_json(self, make: Callable[[], object], *, status: int = 200) -> Response:
        """What `make` answers, as JSON, encoded in the same thread."""
        return _wrap_json(await self.run(partial(_make_and_encode, make)), status=status)


def answer_json(value: object, *, status: int = 200) -> Response:
    """A short value as JSON."""
    return _wrap_json(encode_json(value), status=status)


def encode_json(value: object) -> bytes:
    """Compact, in UTF-8."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _make_and_encode(make: Callable[[], object]) -> bytes:
    return encode_json(make())


def _wrap_json(body: bytes, *, status: int) -> Response:
    return Response(body, status_code=status, media_type="application/json", headers=SECURE_HEADERS)
