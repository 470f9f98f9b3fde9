"""The server as a process: a socket, signals, and an end that leaves nothing behind.

The first SIGTERM or SIGINT ends intake: `/ready` and new requests get 503, while the socket stays open so that they can
be told so. What runs has the grace to finish and is cut off afterwards. Then the runtime is audited: whoever still
holds blocks is reported. A second signal ends the process at once, by the signal's own default.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final, final

import anyio
import uvicorn

from aiokv import ConfigError
from aiokv.core.audit import Audit, Holding
from aiokv_engine.model_file import LoadedModel
from aiokv_engine.server.app import Access, ServerApp, make_app
from aiokv_engine.server.connection import Connection
from aiokv_engine.server.defaults import GRACE_S, MAX_QUEUE
from aiokv_engine.server.log_limit import limited_logs
from aiokv_engine.server.service import make_service
from aiokv_engine.serving import Serving

__all__ = ["Draining", "Leaks", "Listening", "ServeOptions", "listening", "open_socket", "serve"]

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_LONGEST_GRACE_S: Final = 86_400
_LAST_BYTES_S: Final = 2  # for what is in the buffers of connections
_LAST_COPIES_S: Final = 10
_BACKLOG: Final = 2048
_HEADER_BYTES: Final = 65_536
"""The longest request line and headers."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How to serve. `grace_s` is how long running requests may go on after the first signal."""

    name: str | None = None
    access: Access = field(default_factory=Access)
    max_queue: int = MAX_QUEUE
    grace_s: float = GRACE_S

    def __post_init__(self) -> None:
        """Refuse what no server could wait for; raises `ConfigError`."""
        if not 0.0 <= self.grace_s <= _LONGEST_GRACE_S:
            raise ConfigError(f"the grace must be between 0 and {_LONGEST_GRACE_S} seconds, not {self.grace_s}")
        if self.max_queue < 1:
            raise ConfigError(f"at least one prompt must be able to wait, not {self.max_queue}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Leaks:
    """What was still held when every request had ended; `lines` are for people, none if nothing was."""

    lines: tuple[str, ...]
    cut_off: int = 0
    """Requests that did not end within the grace."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """What is served, and where."""

    url: str
    model: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """How many requests are being answered when the first signal comes, and how many seconds they have."""

    running: int
    grace_s: float


def open_socket(host: str, *, port: int) -> socket.socket:
    """Returns a listening socket; port 0 takes a free one. Raises `ConfigError`."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # names that no name server is asked for are the latter
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"cannot listen on {host}: {reason}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from error
    listener.settimeout(0)
    return listener


async def serve(
    serving: Serving,
    *,
    loaded: LoadedModel,
    listener: socket.socket,
    options: ServeOptions,
    tell: Callable[[Listening | Draining], None],
) -> Leaks:
    """Serves an open engine until a signal comes; returns what was left behind. Needs the main thread.

    `tell` is called on the loop, once each when requests are answered and when a signal has come.
    """
    service = make_service(serving, loaded=loaded, name=options.name, max_queue=options.max_queue)
    server_app = make_app(service, access=options.access, created=int(time.time()))
    async with listening(server_app, listener=listener):
        with _first_signal() as asked_to_end:
            tell(Listening(url=_url(listener), model=service.name))
            await asked_to_end
        server_app.start_draining()
        tell(Draining(running=service.gate.being_answered, grace_s=options.grace_s))
        cut_off = await _drain(server_app, grace_s=options.grace_s)
    with anyio.move_on_after(_LAST_COPIES_S):  # what is then still running is in the audit
        await service.gate.wait_idle()
        await serving.engine.wait_idle()
        await serving.kv.drain()
    return Leaks(lines=_find_leaks(serving.kv.audit()), cut_off=cut_off)


@asynccontextmanager
async def listening(server_app: ServerApp, *, listener: socket.socket) -> AsyncIterator[None]:
    """Accepts connections inside; afterwards they are closed. Raises `ConfigError` if somebody else came first."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:  # both were bound before one has listened
        raise ConfigError(f"cannot listen on {_url(listener)}: {error.strerror or error}") from error
    config = uvicorn.Config(
        server_app.app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        timeout_graceful_shutdown=_LAST_BYTES_S,
    )
    server = _Server(config)
    with limited_logs():
        running = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        try:
            await asyncio.wait({running, server.accepts}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            yield
        finally:
            server.should_exit = True
            await running


@final
class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would close the socket at the first one, and raise it again at its end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepts: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends when connections are accepted."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections."""
        await super().startup(sockets=sockets)
        self.accepts.set_result(None)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


@contextmanager
def _first_signal() -> Iterator[asyncio.Future[signal.Signals]]:
    """Gives a future of the first signal; from then on signals do what they do by default, which ends the process."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        for each in _SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        if not came.done():
            came.set_result(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, note, number)
    try:
        yield came
    finally:
        if not came.done():
            came.cancel()
            for number in _SIGNALS:
                loop.remove_signal_handler(number)


async def _drain(server_app: ServerApp, *, grace_s: float) -> int:
    """Waits until every request has ended; cuts off what has not by then, and returns how many those were."""
    gate = server_app.service.gate
    with anyio.move_on_after(grace_s):
        await gate.wait_idle()
        return 0
    cut_off = gate.cut_off()
    with anyio.move_on_after(_LAST_BYTES_S):  # clients that do not read: closing the connections ends them
        await gate.wait_idle()
    return cut_off


def _find_leaks(audit: Audit) -> tuple[str, ...]:
    return (
        *(f"lease {lease.request_id}: {lease.gpu_blocks} blocks, {lease.state}" for lease in audit.leases),
        *(f"pins of {_holder(pin)}: {pin.blocks} {pin.tier.value} blocks" for pin in audit.pins),
        *(f"reservations of {_holder(held)}: {held.blocks} {held.tier.value} blocks" for held in audit.reservations),
        *(f"violated: {violation}" for violation in audit.violations),
    )


def _holder(holding: Holding) -> str:
    return f"{holding.kind.value} {holding.request_id or holding.holder_id}"


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ip_address(host).version == 6 else f"http://{host}:{port}"
