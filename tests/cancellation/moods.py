"""How requests of a storm end: by themselves, or within a random number of turns in one of the ways from outside."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar, final

import anyio

from aiokv import AcquireTimeout

__all__ = ["Moods", "OwnError", "assert_enough", "find_lacking", "in_turns", "within_turns"]

T = TypeVar("T")

_MOODS: Final = ("task", "task twice", "scope", "timeout", "patient", "patient", "patient")


class OwnError(Exception):
    """What a request's body fails with on purpose."""


def find_lacking(seen: Counter[str], least: dict[str, int]) -> dict[str, int]:
    """What was tried less than `least` often, and how often."""
    return {what: seen[what] for what in least if seen[what] < least[what]}


def assert_enough(seen: Counter[str], least: dict[str, int]) -> None:
    """A storm that tried less than this has shown nothing."""
    assert not find_lacking(seen, least), seen


@final
class Moods:
    """Runs requests and ends some of them early; what is no cancellation, timeout or `OwnError` comes out."""

    def __init__(self, chance: random.Random, *, seen: Counter[str], within: int) -> None:
        self._random = chance
        self._seen = seen
        self._within = within

    async def run(self, request: Coroutine[Any, Any, None]) -> None:
        """Run a request in a mood of its own."""
        mood, after = self._random.choice(_MOODS), self._random.randrange(self._within)
        try:
            await self._run(request, mood=mood, after=after)
        except (asyncio.CancelledError, AcquireTimeout, TimeoutError, OwnError) as error:
            self._seen[type(error).__name__] += 1
        self._seen["ended"] += 1

    async def _run(self, request: Coroutine[Any, Any, None], *, mood: str, after: int) -> None:
        if mood == "scope":
            with anyio.CancelScope() as scope:
                in_turns(after, scope.cancel)
                await request
            self._seen["cancelled by scope"] += scope.cancelled_caught
        elif mood == "timeout":
            await within_turns(after, request)
        else:
            task = asyncio.create_task(request)
            if mood != "patient":
                in_turns(after, task.cancel)
            if mood == "task twice":
                in_turns(after + 1, task.cancel)
            await task


async def within_turns(count: int, awaited: Awaitable[T]) -> T:
    """The result, or `TimeoutError` once the loop has turned so often: no clock decides."""
    async with asyncio.timeout(None) as timeout:
        in_turns(count, partial(_expire, timeout))
        return await awaited


def in_turns(count: int, action: Callable[[], object]) -> None:
    """Do something in a later turn of the loop, whatever the tasks do."""
    if count:
        asyncio.get_running_loop().call_soon(in_turns, count - 1, action)
    else:
        action()


def _expire(timeout: asyncio.Timeout) -> None:
    with suppress(RuntimeError):  # it has ended before
        timeout.reschedule(asyncio.get_running_loop().time())
