"""Who is answered: requests that name a host we are known under; by admin routes, those that know the token.

A page of another site may point its own name at our address (DNS rebinding), and its script then reads what we answer
as if it came from its own site. Its requests still name that site as their host.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from ipaddress import IPv6Address
from typing import Final, final

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aiokv import ConfigError
from aiokv_asgi.answers import answer_json
from aiokv_asgi.secret import check_token

__all__ = ["LOOPBACK_HOSTS", "check_bearer", "check_host"]

LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
"""What a browser or a probe on the same machine calls it."""
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def check_host(allowed_hosts: Sequence[str], *, refusal: ASGIApp | None = None) -> Middleware:
    """Answer 400, or with `refusal`, to requests for any other host. `ConfigError` for patterns that are none."""
    if isinstance(allowed_hosts, str) or not allowed_hosts:
        raise ConfigError(f"allowed_hosts must list host names, not be {allowed_hosts!r}")
    hosts = [_write_as_header(pattern) for pattern in allowed_hosts]
    error = "the Host header names no host that is allowed here"
    return Middleware(_HostCheck, hosts=hosts, refusal=refusal or answer_json({"error": error}, status=400))


def check_bearer(token: str) -> Middleware:
    """Answer 401 to requests without `Authorization: Bearer` and this token. `ConfigError` for a token that is none."""
    return Middleware(_BearerCheck, token=check_token(token, origin="admin_token").encode("ascii"))


@final
class _HostCheck:
    """Lets requests through to `app` that are for one of the hosts: Starlette decides, but does not answer."""

    __slots__ = ("_app", "_hosts", "_refusal")

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str], refusal: ASGIApp) -> None:
        self._app = app
        self._hosts = hosts
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: PLR0917  # as ASGI has it
        let_in: list[Scope] = []

        async def note(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: PLR0917  # as ASGI has it
            let_in.append(scope)

        async def drop(message: Message) -> None:
            """Of a refusal in plain text."""

        await TrustedHostMiddleware(note, allowed_hosts=self._hosts, www_redirect=False)(scope, receive, drop)
        await (self._app if let_in else self._refusal)(scope, receive, send)


@final
class _BearerCheck:
    """Lets requests through to `app` that know the token."""

    __slots__ = ("_app", "_token")

    def __init__(self, app: ASGIApp, *, token: bytes) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: PLR0917  # as ASGI has it
        if self._is_known(Headers(scope=scope).getlist("authorization")):
            await self._app(scope, receive, send)
            return
        refusal = answer_json({"error": "no bearer token, or a wrong one"}, status=401)
        refusal.headers["WWW-Authenticate"] = 'Bearer realm="aiokv"'
        await refusal(scope, receive, send)

    def _is_known(self, given: list[str]) -> bool:
        """Whether exactly one credential was given, and it is ours; the comparison takes as long wherever they differ.

        Bytes, as they came: text outside ASCII cannot be compared so.
        """
        scheme, _, credential = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        is_ours = hmac.compare_digest(credential.strip(" ").encode("latin-1"), self._token)
        return is_ours and scheme.lower() == "bearer"


def _write_as_header(pattern: str) -> str:
    """How a request names such a host, its port left out."""
    if ":" in pattern:
        return f"[{_check_address(pattern)}]"
    name = pattern.removeprefix("*.")
    if pattern != "*" and not _HOST_NAME.fullmatch(name):
        raise ConfigError(f"allowed_hosts: {pattern!r} is no host name without a port, '*.example.com' or '*'")
    return pattern


def _check_address(address: str) -> str:
    try:
        return str(IPv6Address(address))
    except ValueError:
        raise ConfigError(f"allowed_hosts: {address!r} is no IPv6 address; ports are not named") from None
