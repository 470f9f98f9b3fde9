"""Requests on the runtime: each is a task that awaits its lease, computes nothing, and holds it until it has to end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Protocol, Self, TypeVar, final

from aiokv import Hit, KVRuntime, Lease
from aiokv.cli.bench.hold import HoldMeter, Metered
from aiokv.cli.bench.replay.prompts import Prompt, Tokens
from aiokv.cli.bench.replay.settings import GROUP

__all__ = ["Calls", "MeteredCalls", "PlainCalls", "Player"]

T = TypeVar("T")


class Calls(Protocol):
    """How the runtime is called."""

    def call(self, function: Callable[..., T], *args: object) -> T:
        """Call a method of it."""
        ...

    def step(self, coroutine: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Await a coroutine of it."""
        ...


@final
class PlainCalls:
    """As any host calls it."""

    __slots__ = ()

    def call(self, function: Callable[..., T], *args: object) -> T:
        """See `Calls`."""
        return function(*args)

    def step(self, coroutine: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """See `Calls`."""
        return coroutine


@final
class MeteredCalls:
    """Each call, and each stretch of a coroutine, is timed: that takes some microseconds of its own."""

    __slots__ = ("_meter",)

    def __init__(self, meter: HoldMeter) -> None:
        self._meter = meter

    def call(self, function: Callable[..., T], *args: object) -> T:
        """See `Calls`."""
        return self._meter.call(function, *args)

    def step(self, coroutine: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """See `Calls`."""
        return Metered(self._meter, coroutine)


@final
class _Running:
    """One request in flight."""

    __slots__ = ("computed", "may_end", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.computed: asyncio.Future[None] = loop.create_future()
        self.may_end: asyncio.Future[None] = loop.create_future()
        self.task: asyncio.Task[None] | None = None


@final
class Player:
    """Serves prompts one after the other and keeps those in flight between slices. An async context manager."""

    __slots__ = ("_calls", "_kv", "_running", "_tasks", "hits")

    def __init__(self, kv: KVRuntime, *, calls: Calls) -> None:
        self._kv = kv
        self._calls = calls
        self._tasks = asyncio.TaskGroup()
        self._running: deque[_Running] = deque()
        self.hits: list[Hit] = []
        """What each request was given, in order."""

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._tasks.__aexit__(*exc_info)  # type: ignore[arg-type]  # passed on as it is

    async def play(self, prompts: Iterable[Prompt]) -> None:
        """Serve them in order; back when nothing is left to be stored, so that no work of theirs runs later."""
        loop = asyncio.get_running_loop()
        for prompt in prompts:
            for _ in range(prompt.ends):
                await self._end_oldest()
            running = _Running(loop)
            running.task = self._tasks.create_task(self._serve(prompt, running))
            self._running.append(running)
            await running.computed
        await self._kv.drain()

    async def end_all(self) -> None:
        """End every request that still runs."""
        while self._running:
            await self._end_oldest()
        await self._kv.drain()

    def tokens_by_source(self) -> dict[str, int]:
        """Prompt tokens of all requests so far, as each was told."""
        return {
            "gpu": sum(hit.gpu_tokens for hit in self.hits),
            "cpu": sum(hit.cpu_tokens for hit in self.hits),
            "compute": sum(hit.compute_tokens for hit in self.hits),
        }

    async def _end_oldest(self) -> None:
        running = self._running.popleft()
        running.may_end.set_result(None)
        if running.task is not None:
            await running.task

    async def _serve(self, prompt: Prompt, running: _Running) -> None:
        calls = self._calls
        lease = await calls.step(self._kv.acquire(str(prompt.index), prompt.tokens))
        try:
            calls.call(lease.block_ids, GROUP)  # what the kernels are told
            calls.call(lease.confirm, len(prompt.tokens))
            self.hits.append(lease.delivered)
            running.computed.set_result(None)
            await running.may_end
            await self._write_output(lease, prompt.outputs)
            calls.call(lease.finish)
        finally:
            lease.release()

    async def _write_output(self, lease: Lease, outputs: Tokens) -> None:
        """All of it in one step. The KV of the last token is never written: nothing is computed after it."""
        if not len(outputs):
            return
        calls = self._calls
        calls.call(lease.append, outputs)
        written = lease.num_tokens - 1
        if (missing := written - lease.capacity_tokens) > 0:
            await calls.step(lease.extend(missing))
            calls.call(lease.block_ids, GROUP)
        calls.call(lease.confirm, written)
