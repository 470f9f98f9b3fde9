"""What all clients of a soak share: the runtime, the memory behind it, the tenants' texts, and the counts."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec, TypeVar, final

from aiokv import KVRuntime, Lease
from aiokv.cli.bench.hold import HoldMeter, Metered
from aiokv.cli.bench.kv_bytes import KvBytes
from aiokv.cli.bench.soak.watchdog import LoopHeldError
from aiokv.runtime.entry import AcquireCall
from aiokv.runtime.hashing import KeyOptions

__all__ = ["Tenant", "World", "tenants_of", "turns"]

P = ParamSpec("P")
T = TypeVar("T")

_TENANTS: Final = 5
_DOCUMENTS: Final = 6
_VOCABULARY: Final = 50_000
_NOTES_KEPT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whose cache it is: tenants share texts but never blocks."""

    number: int
    salt: str | None
    adapter: str | None
    openings: tuple[tuple[int, ...], ...]
    """What a conversation may begin with: a system prompt, and mostly a document after it."""

    @property
    def identity(self) -> KeyOptions:
        """What its hashes depend on beside the tokens."""
        return {"salt": self.salt, "adapter": self.adapter}


@final
@dataclass(slots=True, kw_only=True, eq=False)
class World:
    """One run."""

    kv: KVRuntime
    memory: KvBytes
    meter: HoldMeter
    tenants: tuple[Tenant, ...]
    seen: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    """The first few faults, in words."""
    is_over: bool = False

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A synchronous public call, timed."""
        return self.meter.call(function, *args, **kwargs)

    async def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """A public coroutine, timed."""
        return await Metered(self.meter, coroutine)

    @asynccontextmanager
    async def entered(self, call: AcquireCall) -> AsyncIterator[Lease]:
        """An `acquire` or `resume` as a context manager, timed."""
        lease = await self.wait(call.__aenter__())
        try:
            yield lease
        except BaseException as error:
            await self.wait(call.__aexit__(type(error), error, error.__traceback__))
            raise
        await self.wait(call.__aexit__(None, None, None))

    def note_error(self, error: BaseException) -> None:
        """Count an exception that should not have been raised."""
        self.seen["errors"] += 1
        if isinstance(error, LoopHeldError):
            self.is_over = True  # there will be no end to it
        self._note("error", f"{type(error).__name__}: {error}")

    def note_violations(self, violations: Sequence[str]) -> None:
        """Count what an audit has found."""
        self.seen["violations"] += len(violations)
        for violation in violations:
            self._note("violation", violation)

    def note_corrupt(self, blocks: int, *, where: str) -> None:
        """Count blocks that do not hold what they must."""
        self.seen["corrupt"] += blocks
        if blocks:
            self._note("corrupt", where)

    def _note(self, kind: str, text: str) -> None:
        if len(self.notes) < _NOTES_KEPT:
            self.notes.append(f"{kind}: {text}")


def tenants_of(seed: int) -> tuple[Tenant, ...]:
    """Tenants that talk about the same documents, each under an identity of its own."""
    source = random.Random(f"{seed}/texts")
    documents = [_text(source, source.randrange(60, 260)) for _ in range(_DOCUMENTS)]
    greetings = [_text(source, source.randrange(30, 90)) for _ in range(2)]
    return tuple(
        Tenant(
            number=number,
            salt=None if number == 0 else f"tenant {number // 2}",
            adapter=f"adapter {number}" if number % 2 else None,
            openings=tuple(greetings[number % 2] + document for document in ((), *documents)),
        )
        for number in range(_TENANTS)
    )


async def turns(count: int) -> None:
    """Let the loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


def _text(source: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(source.randrange(_VOCABULARY) for _ in range(tokens))
