"""The engine: one coroutine per request, which leases its blocks from aiokv and has its steps computed in turns.

A request's life: admitted (blocks pinned and reserved), its loads awaited, its missing tokens computed in chunks cut at
absolute multiples of `CHUNK`, then one token per step beside the other requests. What it publishes for reuse are
complete prompt chunks only, because those are the same bit for bit whoever computes them.
"""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Self, TypeVar, final

import torch
from torch import Tensor

from aiokv import Hit, KVRuntime, Lease, UsageError
from aiokv_engine.llama import CHUNK, LlamaModel
from aiokv_engine.paged_attention import DecodeRow
from aiokv_engine.sampling import Chooser, Sampling, choose_likeliest, make_chooser
from aiokv_engine.steps import PrefillChunk, StepQueue, Token
from aiokv_engine.torch_worker import TorchWorker

__all__ = ["GROUP", "Answer", "Engine", "Ready", "Request"]

GROUP: Final = "full"  # the one attention group of a Llama model

T = TypeVar("T")

_GREEDY: Final = Sampling()


def _ignore(_: object) -> None:
    """Observes nothing."""


def _never() -> bool:
    """Has never had enough."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A request whose blocks are all on the GPU tier, before its first step. `load_s` is how long it awaited loads."""

    lease: Lease
    hit: Hit
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to generate. `salt` keeps its blocks apart from other salts'; `on_ready` is called once, before computing.

    Generation is greedy unless `sampling` says otherwise. It ends after `max_new_tokens`, with a token of `stop_ids`,
    which is part of the answer, or as soon as `is_enough`, asked after every token, says so.
    """

    request_id: str
    token_ids: Sequence[int]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    is_enough: Callable[[], bool] = _never
    sampling: Sampling = _GREEDY
    salt: str | None = None
    priority: int = 0
    timeout: float | None = None
    on_ready: Callable[[Ready], None] = _ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request got. `hit` says where its prompt's tokens came from; times are in seconds from the call on."""

    tokens: tuple[Token, ...]
    hit: Hit
    first_token_s: float
    load_s: float

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The answer's tokens, the one that ended it included."""
        return tuple(token.token_id for token in self.tokens)


@final
class Engine:
    """Generates text for any number of concurrent requests over one KV runtime. Use as an async context manager.

    `arenas` are the tensors of the runtime's group `GROUP`, one per layer. Leaving the context takes no more steps and
    waits for the one that runs; requests that are still there end with `EngineClosed`.
    """

    __slots__ = ("_kv", "_model", "_steps", "_worker")

    def __init__(self, model: LlamaModel, *, kv: KVRuntime, arenas: Sequence[Tensor], torch_threads: int = 1) -> None:
        self._model = model
        self._kv = kv
        self._worker = TorchWorker(torch_threads=torch_threads)
        self._steps = StepQueue(model, arenas=arenas, worker=self._worker)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._steps.close()
        try:
            await self._steps.wait_idle()
        finally:
            self._worker.close()

    async def generate(self, request: Request) -> Answer:
        """Returns the whole answer to `request`; raises `UsageError` on a bad one, else what `acquire` raises."""
        started = time.perf_counter()
        ready: list[Ready] = []

        def note(found: Ready) -> None:
            ready.append(found)
            request.on_ready(found)

        tokens: list[Token] = []
        first_token_s = 0.0
        async with aclosing(self.stream(replace(request, on_ready=note))) as stream:
            async for token in stream:
                first_token_s = first_token_s or time.perf_counter() - started
                tokens.append(token)
        return Answer(tokens=tuple(tokens), hit=ready[0].hit, first_token_s=first_token_s, load_s=ready[0].load_s)

    async def stream(self, request: Request) -> AsyncGenerator[Token, None]:
        """Yields the tokens of the answer to `request` as they are computed; close it to leave early."""
        self._check(request)
        started = time.perf_counter()
        lease = await self._kv.admit(
            request.request_id,
            request.token_ids,
            salt=request.salt,
            reserve_tokens=request.max_new_tokens,
            align=CHUNK,
            priority=request.priority,
            timeout=request.timeout,
        )
        give_back: Callable[[], None] = lease.release
        try:
            admitted = time.perf_counter()
            await lease.ready(timeout=_remaining(request.timeout, since=started))
            request.on_ready(Ready(lease=lease, hit=lease.delivered, load_s=time.perf_counter() - admitted))
            blocks = torch.tensor(lease.block_ids(GROUP))
            choose = make_chooser(request.sampling)
            token = await self._prefill(request, lease=lease, blocks=blocks, choose=choose)
            yield token
            length = len(request.token_ids)
            for position in range(length, length + request.max_new_tokens - 1):
                if token.token_id in request.stop_ids or request.is_enough():
                    break
                lease.append([token.token_id])
                row = DecodeRow(token_id=token.token_id, position=position, blocks=blocks)
                token = await self._steps.compute(row, owner=lease, choose=choose)
                lease.confirm(position + 1, publish_to=_last_cut(length))
                yield token
            give_back = lease.finish
        finally:
            self._steps.leave(lease, give_back=give_back)

    async def wait_idle(self) -> None:
        """Waits until no step runs; requests that have left have given their blocks back by then."""
        await self._steps.wait_idle()

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work` in the engine's torch thread, between two steps, and returns what it returns."""
        return await self._worker.run(work)

    async def _prefill(self, request: Request, *, lease: Lease, blocks: Tensor, choose: Chooser) -> Token:
        """Computes what the prompt's hit has left; returns the first token of the answer."""
        length = len(request.token_ids)
        cuts = [*range(lease.prefix_tokens, length, CHUNK), length]
        for start, stop in pairwise(cuts):
            chunk = PrefillChunk(token_ids=request.token_ids[start:stop], start=start, blocks=blocks)
            last = choose if stop == length else choose_likeliest  # nothing is drawn within a prompt
            token = await self._steps.compute(chunk, owner=lease, choose=last)
            lease.confirm(stop, publish_to=_last_cut(stop))
        return token

    def _check(self, request: Request) -> None:
        """Refuses what the model cannot compute, before anything is reserved."""
        config = self._model.config
        if not request.token_ids or min(request.token_ids) < 0 or max(request.token_ids) >= config.vocab_size:
            raise UsageError(f"a prompt has at least one token, each in [0, {config.vocab_size})")
        if request.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
        length = len(request.token_ids) + request.max_new_tokens
        if length > config.max_positions:
            raise UsageError(f"prompt and answer have {length} tokens, the model holds {config.max_positions}")


def _last_cut(tokens: int) -> int:
    """Returns where the last complete chunk of `tokens` ends."""
    return tokens // CHUNK * CHUNK


def _remaining(timeout: float | None, *, since: float) -> float | None:
    """Returns what is left of `timeout` seconds that began at `since`; without a timeout, none."""
    return None if timeout is None else max(0.0, timeout - (time.perf_counter() - since))
