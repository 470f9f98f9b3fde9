"""`aiokv.run`: an event loop for a program that has none yet; uvloop where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["run"]

T = TypeVar("T")


def run(main: Callable[[], Coroutine[Any, Any, T]] | Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run `main` (a coroutine, or a function that makes one) to its end on the recommended loop."""
    coroutine = main() if callable(main) else main
    with asyncio.Runner(debug=debug, loop_factory=_loop_factory()) as runner:
        return runner.run(coroutine)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop
