"""What the modules of the CUDA backend share: points in streams, and whether the context still answers.

`EventPool` keeps the driver's events, `CudaFence` is a point of the engine's stream, `stream_handle` tells what is one;
`Health` is where whoever calls the driver notes that it is lost.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from typing import Any, final

from aiokv.errors import UsageError

__all__ = ["CudaFence", "EventPool", "Health", "stream_handle"]


@final
class Health:
    """Whether the context still answers. Shared by all that call it; once lost, for ever."""

    __slots__ = ("lost",)

    def __init__(self) -> None:
        self.lost = ""
        """Why nothing can be copied any more; empty while all is well."""

    def lose(self, why: str) -> None:
        """Note the first reason."""
        self.lost = self.lost or why


@final
class EventPool:
    """Handles of events that are used again and again. Any thread may take and give; a finaliser may give."""

    __slots__ = ("_create", "_free", "_made")

    def __init__(self, create: Callable[[], int]) -> None:
        self._create = create
        self._free: deque[int] = deque()
        self._made: deque[int] = deque()

    def take(self) -> int:
        """An event that nobody else has, recorded before perhaps. Call it with the context current."""
        try:
            return self._free.popleft()
        except IndexError:
            event = self._create()
            self._made.append(event)
            return event

    def give(self, event: int) -> None:
        """Back to the others. What waits for it already waits for what it was then."""
        self._free.append(event)

    def drain(self) -> list[int]:
        """All that were ever made, to be destroyed."""
        made = list(self._made)
        self._made.clear()
        self._free.clear()
        return made


@final
class CudaFence:
    """A point of a stream that others can be made to wait for. Its event goes back when nobody holds it any more."""

    __slots__ = ("event", "pool")

    def __init__(self, event: int, *, pool: EventPool) -> None:
        self.event = event
        """The handle."""
        self.pool = pool

    def __del__(self) -> None:
        self.pool.give(self.event)


def stream_handle(stream: object) -> int:
    """The handle of a stream: an `int`, a torch stream, or what has a `__cuda_stream__`; `UsageError` for others."""
    try:
        handle = operator.index(_find_handle(stream))
    except TypeError:
        kind = type(stream).__name__
        raise UsageError(f"a CUDA stream is needed: a handle, a torch stream, or __cuda_stream__, not {kind}") from None
    if handle < 0 or isinstance(stream, bool):
        raise UsageError(f"{stream!r} is no handle of a CUDA stream")
    return handle


def _find_handle(stream: object) -> Any:  # noqa: ANN401  # whatever says that it is a stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        answer = protocol() if callable(protocol) else protocol
        return answer[1] if isinstance(answer, tuple) and len(answer) == 2 else None
    return getattr(stream, "cuda_stream", stream)  # torch's
