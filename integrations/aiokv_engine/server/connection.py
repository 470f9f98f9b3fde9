"""A connection to a client: uvicorn's HTTP/1.1, with bounds on how long it waits for one that says or reads nothing.

By itself uvicorn waits for the head of a request, and for a client that reads nothing, as long as the client likes. And
it stops reading once bytes of a next request are there, so that it does not see the client leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["HEAD_SECONDS", "STALL_SECONDS", "Connection"]

HEAD_SECONDS: Final = 30.0
"""How long the head of a request may take to come; that long may also take what is left of a refused body."""
STALL_SECONDS: Final = 60.0
"""How long a client may leave unread what does not fit into buffers any more."""
_AHEAD_BYTES: Final = 65_536
"""How much of next requests is read while one is answered."""


@final
class Connection(H11Protocol):
    """One connection. It is cut when its client takes too long: then the request ends as if the client had left."""

    def __init__(self, **given: Any) -> None:  # noqa: ANN401  # uvicorn's own
        super().__init__(**given)
        self._head = _Deadline(self._cut, seconds=HEAD_SECONDS)
        self._reader = _Deadline(self._cut, seconds=STALL_SECONDS)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Waits for the first head."""
        super().connection_made(transport)
        self._head.start()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits for nothing any more."""
        self._head.stop()
        self._reader.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes what has come, and goes on reading while a request is answered, to see its client leave."""
        super().data_received(data)
        if self._is_answering():
            self._head.stop()
            if not self.cycle.more_body and len(self.conn.trailing_data[0]) <= _AHEAD_BYTES:
                self.flow.resume_reading()
        elif not self.transport.is_closing():
            self._head.start()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is sent to."""
        super().pause_writing()
        self._reader.start()

    def resume_writing(self) -> None:
        """The client has read on."""
        self._reader.stop()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What has come is no HTTP. An answer that has begun, or has been given already, cannot become another one."""
        if self._is_answering():  # nothing can be sent behind the refusal
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self._cut()

    def on_response_complete(self) -> None:
        """The last byte was written, though maybe not read: if the connection ends with it, it ends in time."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._reader.start()

    def timeout_keep_alive_handler(self) -> None:
        """No next request came: the connection ends when everything was read, or soon."""
        super().timeout_keep_alive_handler()
        self._reader.start()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _cut(self) -> None:
        self.transport.abort()


@final
class _Deadline:
    """Calls `missed` unless it is stopped in time. To start it twice changes nothing."""

    __slots__ = ("_missed", "_seconds", "_timer")

    def __init__(self, missed: Callable[[], None], *, seconds: float) -> None:
        self._missed = missed
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins to count."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._missed)

    def stop(self) -> None:
        """It was met."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
