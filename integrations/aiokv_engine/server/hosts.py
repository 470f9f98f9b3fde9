"""Which requests are answered by the host they name: `aiokv_asgi`'s check, with OpenAI's shape of errors.

It stands before every path, those that do not exist as well.
"""

from __future__ import annotations

from typing import Final, final

from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aiokv_engine.server.errors import ApiError

__all__ = ["HostCheck"]

_KNOWN: Final = 204


@final
class HostCheck:
    """Lets requests through to `app` that pass `check`, which is asked about their heads alone."""

    __slots__ = ("_app", "_check")

    def __init__(self, app: ASGIApp, *, check: Middleware) -> None:
        self._app = app
        self._check: ASGIApp = check.cls(Response(status_code=_KNOWN), *check.args, **check.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: PLR0917  # as ASGI has it
        """Answers the request, or refuses it."""
        app = self._app if scope["type"] != "http" or await self._is_known(scope, receive=receive) else _refusal()
        await app(scope, receive, send)

    async def _is_known(self, scope: Scope, *, receive: Receive) -> bool:
        statuses: list[int] = []

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await self._check(scope, receive, note)
        return statuses == [_KNOWN]


def _refusal() -> Response:
    error = ApiError("requests for this host are not answered here", code="unknown_host")
    return JSONResponse(error.as_json(), status_code=error.status)
