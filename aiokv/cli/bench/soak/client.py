"""One client: conversations of one tenant, a request a turn, each request ended in its own way.

What a request does depends on seed, client and number alone, so that a cancellation changes nothing for the next one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, final

import anyio

from aiokv import AcquireTimeout, BlockKeys, Deferred, Lease
from aiokv.cli.bench.soak.session import Session
from aiokv.cli.bench.soak.settings import BLOCK, LONGEST_TOKENS
from aiokv.cli.bench.soak.world import Tenant, World
from aiokv.runtime.acquire import RequestOptions

__all__ = ["Client"]

_MOODS: Final = ("patient",) * 8 + ("cancel", "cancel twice", "scope", "timeout")
_POLLS: Final = 200
_VOCABULARY: Final = 50_000
_LONGEST_WAIT_S: Final = 3.0


class _OwnError(Exception):
    """What a request's body fails with on purpose."""


@final
class Client:
    """Talks until the world is over."""

    __slots__ = ("_history", "_name", "_random", "_seed", "_tenant", "_world")

    def __init__(self, world: World, *, seed: int, number: int) -> None:
        self._world = world
        self._seed = seed
        self._name = f"client {number}"
        self._random = random.Random()
        self._tenant = world.tenants[number % len(world.tenants)]
        self._history: list[int] = []

    @property
    def tenant(self) -> Tenant:
        """Whose conversations these are."""
        return self._tenant

    @property
    def history(self) -> tuple[int, ...]:
        """What has been said in the conversation of this moment."""
        return tuple(self._history)

    async def run(self) -> None:
        """One request after the other."""
        number = 0
        while not self._world.is_over:
            self._random = random.Random(f"{self._seed}/{self._name}/{number}")
            await self._one(number)
            number += 1

    async def _one(self, number: int) -> None:
        seen = self._world.seen
        seen["requests"] += 1
        try:
            await self._in_mood(self._random.choice(_MOODS), self._request(f"{self._name}, {number}"))
        except asyncio.CancelledError:
            seen["cancelled"] += 1
        except TimeoutError as error:
            seen["timed_out" if isinstance(error, AcquireTimeout) else "expired"] += 1
        except _OwnError:
            seen["failed_by_themselves"] += 1
        except Exception as error:  # counted and told: the run goes on and fails at its end
            self._world.note_error(error)

    async def _in_mood(self, mood: str, request: Coroutine[Any, Any, None]) -> None:
        """Run the request; within a random number of turns or milliseconds it is ended in one of the ways."""
        if mood == "scope":
            with anyio.CancelScope() as scope:
                self._soon(scope.cancel)
                await request
            self._world.seen["scopes_cancelled"] += scope.cancelled_caught
        elif mood == "timeout":
            async with asyncio.timeout(None) as timeout:
                self._soon(lambda: _expire(timeout))
                await request
        else:
            task = asyncio.create_task(request)
            if mood != "patient":
                self._soon(task.cancel)
            if mood == "cancel twice":
                self._soon(task.cancel)
            await task

    def _soon(self, action: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()
        if self._random.random() < 0.5:
            _in_turns(loop, self._random.randrange(60), action=action)
        else:
            loop.call_later(self._random.random() * 0.05, action)

    # A request.

    async def _request(self, name: str) -> None:
        if not self._history or len(self._history) > LONGEST_TOKENS - 3 * BLOCK or self._random.random() < 0.15:
            self._history = list(self._random.choice(self._tenant.openings))
        question = [self._random.randrange(_VOCABULARY) for _ in range(self._random.randrange(1, 50))]
        prompt = (self._history + question)[: LONGEST_TOKENS - BLOCK]
        async with self._leased(name, prompt) as session:
            self._world.seen["granted"] += 1
            session.arrive()
            await session.prefill()
            for _ in range(self._random.randrange(5)):
                await self._act(session)
            session.compare()
            if self._random.random() < 0.05:
                raise _OwnError
            self._history = session.tokens[: session.lease.confirmed_tokens]

    async def _act(self, session: Session) -> None:
        drawn = self._random.random()
        if drawn < 0.55:
            await session.generate()
        elif drawn < 0.70:
            await session.edit()
        elif drawn < 0.80:
            await session.fork()
        elif drawn < 0.90:
            await session.step_back()
        else:
            await asyncio.sleep(self._random.random() * 0.004)

    @asynccontextmanager
    async def _leased(self, name: str, prompt: list[int]) -> AsyncIterator[Session]:
        """A lease, let in by one of the ways, given back by one of the ways."""
        drawn = self._random.random()
        if drawn < 0.4:
            async with self._acquired(name, prompt) as lease, self._session(lease, prompt) as session:
                yield session
            return
        lease = await (self._admitted(name, prompt) if drawn < 0.75 else self._polled(name, prompt))
        async with self._session(lease, prompt) as session:
            await self._world.wait(session.lease.ready(timeout=_LONGEST_WAIT_S))
            yield session

    @asynccontextmanager
    async def _session(self, lease: Lease, prompt: list[int]) -> AsyncIterator[Session]:
        """Gives back the lease that the session ends with: after a preemption it is another one."""
        session = Session(self._world, lease=lease, tenant=self._tenant, tokens=prompt, source=self._random)
        try:
            yield session
        except BaseException:
            self._world.call(session.lease.release)
            raise
        self._world.call(self._random.choice((session.lease.finish, session.lease.finish, session.lease.release)))

    @asynccontextmanager
    async def _acquired(self, name: str, prompt: list[int]) -> AsyncIterator[Lease]:
        options: RequestOptions = {**self._tenant.identity, **self._options()}
        call = self._world.kv.acquire(name, prompt, timeout=self._patience(), **options)
        async with self._world.entered(call) as lease:
            yield lease

    async def _admitted(self, name: str, prompt: list[int]) -> Lease:
        keys = await self._prepared(prompt)
        call = self._world.kv.admit(name, keys, timeout=self._patience(), **self._options())
        return await self._world.wait(call)

    async def _polled(self, name: str, prompt: list[int]) -> Lease:
        """As a scheduler does that asks at every step; in the end it gives up like one whose time has passed."""
        keys = await self._prepared(prompt)
        options = self._options()
        for _ in range(_POLLS):
            lease = self._world.call(self._world.kv.try_acquire, name, keys, **options)
            if not isinstance(lease, Deferred):
                self._world.seen["granted_to_pollers"] += 1
                return lease
            await asyncio.sleep(0.002)
        raise AcquireTimeout(name, timeout=_POLLS * 0.002)

    async def _prepared(self, prompt: list[int]) -> BlockKeys:
        return await self._world.wait(self._world.kv.prepare_keys(prompt, **self._tenant.identity))

    def _options(self) -> RequestOptions:
        return {
            "priority": self._random.randrange(3),
            "reserve_tokens": self._random.choice((0, 0, BLOCK)),
            "first_chunk": self._random.choice((None, None, 2 * BLOCK)),
            "align": self._random.choice((1, 1, 1, 4 * BLOCK)),
        }

    def _patience(self) -> float:
        return self._random.choice((_LONGEST_WAIT_S, _LONGEST_WAIT_S, _LONGEST_WAIT_S, 0.02, 0.0))


def _expire(timeout: asyncio.Timeout) -> None:
    with suppress(RuntimeError):  # the request has ended before
        timeout.reschedule(asyncio.get_running_loop().time())


def _in_turns(loop: asyncio.AbstractEventLoop, count: int, *, action: Callable[[], object]) -> None:
    if count:
        loop.call_soon(lambda: _in_turns(loop, count - 1, action=action))
    else:
        action()
