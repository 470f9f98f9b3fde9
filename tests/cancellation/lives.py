"""A request's whole life, step by step at random: confirm, generate, extend, truncate, fork, be preempted, resume.

Whatever it was doing when it is cancelled, it gives back what it holds by plain calls. What its blocks must hold is the
engine's business: `Engine.check` is called after every step in which something could have gone wrong.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Final, Protocol, final

from aiokv import AcquireTimeout, Deferred, KVRuntime, Lease, Preempted, UsageError
from aiokv.core.fences import Fence
from tests.cancellation.moods import OwnError, within_turns
from tests.runtime.support import BLOCK, prompt, turns

__all__ = ["FAMILIES", "LONGEST", "Engine", "Life"]

FAMILIES: Final = 5
LONGEST: Final = 6
_PATIENCE: Final = 12
"""Turns of the loop. Leases that hold blocks wait no longer for more: they might wait for each other for ever."""


class Engine(Protocol):
    """Stands for the model: writes KV and knows what it should be."""

    def compute(self, lease: Lease, stop: int) -> Fence | None:
        """Write the KV of the tokens from `lease.confirmed_tokens` to `stop`; they are confirmed behind the answer."""
        ...

    def check(self, lease: Lease) -> None:
        """What is confirmed, and held, is the KV of these tokens; nobody else writes where this lease does."""
        ...


@final
class Life:
    """One request after its admission. `run` ends with everything given back."""

    def __init__(self, kv: KVRuntime, engine: Engine, *, chance: random.Random, seen: Counter[str]) -> None:
        self._kv = kv
        self._engine = engine
        self._random = chance
        self._seen = seen

    async def run(self, number: int) -> None:
        """Ask for a prompt of some family, live, leave."""
        family, blocks = self._random.randrange(FAMILIES), self._random.randrange(1, LONGEST + 1)
        token_ids = prompt(blocks, seed=family, extra=self._random.randrange(1, BLOCK))
        timeout = self._random.choice((None, None, 30.0, 0.0))
        priority = self._random.randrange(3)  # forks go before who waits with a higher number
        lease = await self._kv.acquire(f"request {number}", token_ids, timeout=timeout, priority=priority)
        self._seen["granted"] += 1
        self._seen["loaded"] += lease.delivered.cpu_tokens > 0
        self._seen["planned again"] += lease.delivered != lease.hit
        await self._live(lease, steps=self._random.randrange(2, 9))

    async def _live(self, lease: Lease, *, steps: int) -> None:
        """Steps of one lease, and then of the one it resumes with."""
        preempted: Preempted | None = None
        with _Held(lease, self._random) as held:
            self._engine.check(lease)
            for step in range(steps):
                if self._random.random() < 0.08:
                    preempted = held.preempt()
                    break
                await self._step(lease, steps - step)
                self._engine.check(lease)
            if self._random.random() < 0.05:
                raise OwnError
        if preempted is not None:
            await self._go_on(preempted, steps=steps // 2)

    async def _go_on(self, preempted: Preempted, *, steps: int) -> None:
        self._seen["preempted"] += 1
        await turns(self._random.randrange(4))
        try:
            lease = await preempted.resume(timeout=self._random.choice((None, 30.0, 0.0)))
        except AcquireTimeout:
            preempted.close()
            return
        self._seen["resumed"] += 1
        self._seen["resumed with loads"] += lease.delivered.cpu_tokens > 0
        await self._live(lease, steps=steps)

    async def _step(self, lease: Lease, steps: int) -> None:
        step = self._random.choice((self._confirm, self._confirm, self._generate, self._truncate, self._fork, _idle))
        await step(lease, steps)

    async def _confirm(self, lease: Lease, _: int) -> None:
        known = min(lease.num_tokens, lease.capacity_tokens)
        if known > lease.confirmed_tokens:
            stop = self._random.randrange(lease.confirmed_tokens, known + 1)
            fence = self._engine.compute(lease, stop)
            lease.confirm(stop, after=fence)
            self._seen["confirmed"] += 1

    async def _generate(self, lease: Lease, steps: int) -> None:
        """Tokens of this lease's own, or of its family: then others may have computed the same."""
        start = lease.num_tokens if self._random.random() < 0.5 else self._random.randrange(1 << 30)
        lease.append(list(range(start, start + self._random.randrange(1, 2 * BLOCK))))
        missing = lease.num_tokens - lease.capacity_tokens
        if missing > 0:
            try:
                await within_turns(_PATIENCE, lease.extend(missing))
            except TimeoutError:
                self._seen["no room"] += 1
                return
            self._seen["extended"] += 1
        await self._confirm(lease, steps)

    async def _truncate(self, lease: Lease, _: int) -> None:
        kept = self._random.randrange(max(lease.prefix_tokens, 1), lease.num_tokens + 1)
        try:
            confirmed = lease.truncate(kept)
        except UsageError:  # of a window: what would be read has been given back
            self._seen["not truncated"] += 1
            return
        self._seen["truncated"] += not isinstance(confirmed, Deferred)

    async def _fork(self, lease: Lease, steps: int) -> None:
        if not lease.confirmed_tokens:
            return
        try:
            at = self._random.choice((None, self._random.randrange(1, lease.num_tokens + 1)))
            fork = lease.try_fork("fork", at=at)
        except UsageError:  # after a reset
            self._seen["not forked"] += 1
            return
        if not isinstance(fork, Deferred):
            self._seen["forked"] += 1
            self._seen["shared by a fork"] += fork.prefix_tokens > 0
            await self._live_a_while(fork, steps)
            self._engine.check(lease)

    async def _live_a_while(self, fork: Lease, steps: int) -> None:
        """A fork does what its parent does, and leaves before it."""
        with _Held(fork, self._random):
            self._engine.check(fork)
            for _ in range(steps // 2):
                await self._step(fork, 0)
                self._engine.check(fork)


async def _idle(lease: Lease, _: int) -> None:
    await turns(1 + lease.num_tokens % 3)


@final
class _Held:
    """Gives a lease back by a plain call: finished or released at random, released after an exception."""

    def __init__(self, lease: Lease, chance: random.Random) -> None:
        self._lease = lease
        self._finishes = chance.random() < 0.7

    def __enter__(self) -> _Held:
        return self

    def preempt(self) -> Preempted:
        return self._lease.preempt()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._finishes:
            self._lease.finish()
        else:
            self._lease.release()
