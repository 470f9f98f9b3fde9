"""Every way a coroutine is ended from outside, at a moment of the test's choosing.

A moment is the k-th suspension of the coroutine: `Suspensions` counts them. Each way asserts that the cancellation
arrived where it belongs and nowhere else: a coroutine that swallows it, or turns it into something else, breaks the
scopes and task groups around it. Scopes deliver in a later turn, when the coroutine may have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping
from typing import Any, Final, final

import anyio

__all__ = ["WAYS", "Suspensions", "Way"]


@final
class Suspensions(Coroutine[Any, Any, object]):
    """Runs a coroutine and calls `strike()` at its `at`-th suspension, in the step that suspends."""

    def __init__(self, coroutine: Coroutine[Any, Any, object], *, at: int) -> None:
        self._coroutine = coroutine
        self._at = at
        self._count = 0
        self.strike: Callable[[], object] = _do_nothing

    @property
    def struck(self) -> bool:
        """Whether the moment came."""
        return self._count >= self._at

    def send(self, value: object) -> object:
        return self._suspended(self._coroutine.send(value))

    def throw(self, *args: Any) -> object:  # noqa: ANN401  # the three forms that coroutines take
        return self._suspended(self._coroutine.throw(*args))

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, object]:
        value = None
        try:
            suspended = self.send(value)
            while True:
                try:
                    value = yield suspended
                except BaseException as error:
                    suspended = self.throw(error)
                else:
                    suspended = self.send(value)
        except StopIteration as end:
            return end.value

    def _suspended(self, yielded: object) -> object:
        self._count += 1
        if self._count == self._at:
            self.strike()
        return yielded


Way = Callable[[Suspensions], Coroutine[Any, Any, None]]


async def by_task_cancel(run: Suspensions) -> None:
    task = asyncio.create_task(_consume(run))
    run.strike = task.cancel
    await _ended(task, cancelled=run)


async def by_task_cancel_one_turn_later(run: Suspensions) -> None:
    task = asyncio.create_task(_consume(run))
    run.strike = lambda: asyncio.get_running_loop().call_soon(task.cancel)
    await asyncio.wait([task])
    assert task.cancelled() <= run.struck
    if not task.cancelled():
        task.result()


async def by_task_cancel_twice(run: Suspensions) -> None:
    task = asyncio.create_task(_consume(run))

    def strike() -> None:
        task.cancel()
        task.cancel()
        asyncio.get_running_loop().call_soon(task.cancel)

    run.strike = strike
    await _ended(task, cancelled=run)


async def by_anyio_scope(run: Suspensions) -> None:
    with anyio.CancelScope() as scope:
        run.strike = scope.cancel
        await run
    assert scope.cancelled_caught <= run.struck


async def by_anyio_move_on(run: Suspensions) -> None:
    with anyio.move_on_after(3600) as scope:

        def strike() -> None:
            scope.deadline = anyio.current_time()

        run.strike = strike
        await run
    assert scope.cancelled_caught <= run.struck


async def by_anyio_task_group(run: Suspensions) -> None:
    async with anyio.create_task_group() as group:
        run.strike = group.cancel_scope.cancel
        group.start_soon(_consume, run)
    assert group.cancel_scope.cancel_called is run.struck


async def by_asyncio_timeout(run: Suspensions) -> None:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as scope:
            run.strike = lambda: scope.reschedule(loop.time())
            await run
    except TimeoutError as error:
        assert type(error) is TimeoutError, "a cancellation became an AcquireTimeout"
    assert scope.expired() <= run.struck


async def by_failing_sibling(run: Suspensions) -> None:
    trigger = asyncio.get_running_loop().create_future()

    async def fail() -> None:
        await trigger
        raise _SiblingError

    async def watch() -> None:
        await _consume(run)
        sibling.cancel()

    run.strike = lambda: trigger.set_result(None)
    failed = False
    try:
        async with asyncio.TaskGroup() as group:
            sibling = group.create_task(fail())
            group.create_task(watch())
    except* _SiblingError:
        failed = True
    assert failed <= run.struck


WAYS: Final[Mapping[str, Way]] = {
    way.__name__: way
    for way in (
        by_task_cancel,
        by_task_cancel_one_turn_later,
        by_task_cancel_twice,
        by_anyio_scope,
        by_anyio_move_on,
        by_anyio_task_group,
        by_asyncio_timeout,
        by_failing_sibling,
    )
}


class _SiblingError(Exception):
    """What a sibling in a task group fails with."""


async def _consume(run: Suspensions) -> None:
    await run


async def _ended(task: asyncio.Task[None], *, cancelled: Suspensions) -> None:
    await asyncio.wait([task])
    assert task.cancelled() is cancelled.struck
    if not task.cancelled():
        task.result()


def _do_nothing() -> None:
    """Nothing is ended from outside."""
