"""Who is answered: only requests that name a host we are known under.

A page of another site may point its own name at our address (DNS rebinding), and its script then reads what we answer
as if it came from its own site. Its requests still name that site as their host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv6Address
from typing import Final

from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from aiokv import ConfigError

__all__ = ["LOOPBACK_HOSTS", "check_host"]

LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
"""What a browser or a probe on the same machine calls it."""
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def check_host(allowed_hosts: Sequence[str]) -> Middleware:
    """Answer 400 to requests for any other host. `ConfigError` for patterns that are none."""
    if isinstance(allowed_hosts, str) or not allowed_hosts:
        raise ConfigError(f"allowed_hosts must list host names, not be {allowed_hosts!r}")
    hosts = [_write_as_header(pattern) for pattern in allowed_hosts]
    return Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)


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
