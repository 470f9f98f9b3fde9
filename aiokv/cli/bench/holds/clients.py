"""One client: a request at a time over its own conversation, every step of aiokv's timed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final, ParamSpec, TypeVar, final

import numpy as np

from aiokv import BlockKeys, Deferred, KVRuntime, Lease, Tier
from aiokv.cli.bench.hold import HoldMeter, Metered
from aiokv.cli.bench.holds.settings import BLOCK, GROUP, HoldSettings, Turn
from aiokv.errors import UsageError
from aiokv.model.tokens import TokenArray
from aiokv.testing import evict

__all__ = ["Client"]

P = ParamSpec("P")
T = TypeVar("T")

_VOCABULARY: Final = 50_000
_CHUNK_TOKENS: Final = 8192
_PATIENCE_S: Final = 0.002
_FIRST_LOOK_S: Final = 0.05


@final
class Client:
    """Asks, computes nothing, confirms, leaves."""

    __slots__ = ("_kv", "_meter", "_name", "_source", "_tally", "_tokens", "_wanted")

    def __init__(
        self, number: int, *, kv: KVRuntime, meter: HoldMeter, settings: HoldSettings, tally: Counter[str]
    ) -> None:
        self._name = f"client {number}"
        self._source = np.random.default_rng(number)
        self._kv = kv
        self._meter = meter
        self._wanted = settings
        self._tally = tally
        self._tokens = self._fresh(settings.tokens)

    async def ask(self, turn: Turn) -> None:
        """One request, from its arrival to its end."""
        await self._prepare(turn)
        lease = await self._acquire(turn)
        self._count(lease, turn)
        self._call(lease.block_ids, GROUP)
        await self._compute(lease, turn)
        if turn is Turn.GPU:
            self._call(lease.release)
        else:
            self._call(lease.finish)

    async def _prepare(self, turn: Turn) -> None:
        """Bring the prompt to where the turn wants it; the host's own doing."""
        if turn is Turn.COLD:
            self._tokens = self._fresh(self._wanted.tokens)
        elif turn is Turn.GROWING:
            self._tokens = np.concatenate((self._tokens, self._fresh(self._wanted.grown_tokens)))
        elif turn is not Turn.GPU:
            keys = await self._await(self._kv.prepare_keys(self._tokens))
            await self._evict(keys, every=1 if turn is Turn.CPU else 2)

    async def _evict(self, keys: BlockKeys, *, every: int) -> None:
        """As pressure would, once the copies that are being made of them have ended; to look for it takes long."""
        patience = _FIRST_LOOK_S
        while True:
            found = self._kv.core.find_blocks(keys, group=0, tier=Tier.GPU).present
            found &= self._kv.core.find_blocks(keys, group=0, tier=Tier.CPU).present
            try:
                evict(self._kv, keys, {GROUP: np.flatnonzero(found)[::every].tolist()})
            except UsageError:  # some are pinned
                await asyncio.sleep(patience)
                patience *= 2
            else:
                return

    async def _acquire(self, turn: Turn) -> Lease:
        """By tokens, by keys, or by polling with keys, as the hosts of this library do."""
        reserve = self._wanted.generated_tokens if turn is Turn.GROWING else 0
        if turn in (Turn.COLD, Turn.GPU):
            return await self._await(self._kv.acquire(self._name, self._tokens))
        keys = await self._await(self._kv.prepare_keys(self._tokens))
        if turn is not Turn.INTERLEAVED:
            return await self._await(self._kv.acquire(self._name, keys, reserve_tokens=reserve))
        while isinstance(lease := self._call(self._kv.try_acquire, self._name, keys), Deferred):  # noqa: ASYNC110
            await asyncio.sleep(_PATIENCE_S)
        await self._await(lease.ready())
        return lease

    async def _compute(self, lease: Lease, turn: Turn) -> None:
        """The whole prompt at once where it is resident, by chunks where it is new, then token by token."""
        if turn in (Turn.COLD, Turn.GROWING):
            for length in range(lease.prefix_tokens + _CHUNK_TOKENS, lease.num_tokens, _CHUNK_TOKENS):
                self._call(lease.confirm, length)
                await asyncio.sleep(0)
        self._call(lease.confirm, lease.num_tokens)
        if turn is Turn.GROWING:
            await self._generate(lease)

    async def _generate(self, lease: Lease) -> None:
        start = lease.num_tokens
        for number in range(self._wanted.generated_tokens + BLOCK):
            if number == self._wanted.generated_tokens:
                await self._await(lease.extend(BLOCK))
            self._call(lease.append, [number])
            self._call(lease.confirm, start + number + 1)
            await asyncio.sleep(0)

    def _count(self, lease: Lease, turn: Turn) -> None:
        hit = lease.delivered
        self._tally["requests"] += 1
        self._tally[turn.value] += 1
        self._tally["gpu_tokens"] += hit.gpu_tokens
        self._tally["cpu_tokens"] += hit.cpu_tokens
        self._tally["compute_tokens"] += hit.compute_tokens

    def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._meter.call(function, *args, **kwargs)

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> Metered[T]:
        return Metered(self._meter, coroutine)

    def _fresh(self, tokens: int) -> TokenArray:
        return self._source.integers(_VOCABULARY, size=tokens, dtype=np.int32)
