"""Runs forward steps one at a time, taking turns between prefill chunks and batches of decoded tokens.

A step owns the blocks it writes. A request that leaves while a step of its own runs keeps its blocks until the step
ends, whatever happens to the request's task meanwhile: what gives them back is called by the step's completion, on the
loop, not by the task. Everything here happens in plain calls on the loop; only the computing is in the thread.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TypeAlias, final

from torch import Tensor

from aiokv.errors import UsageError
from aiokv_engine.llama import LlamaModel
from aiokv_engine.paged_attention import DECODE_ROWS, DecodeRow
from aiokv_engine.sampling import Chooser, choose_likeliest
from aiokv_engine.torch_worker import TorchWorker, deliver

__all__ = ["EngineClosed", "PrefillChunk", "StepQueue", "Token", "Work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Consecutive prompt tokens of one sequence, at positions from `start` on; `blocks` is its block table."""

    token_ids: Sequence[int]
    start: int
    blocks: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """The token a step chose. `logits` are float32, `[vocab_size]`."""

    token_id: int
    logits: Tensor


Work: TypeAlias = PrefillChunk | DecodeRow


@final
class StepQueue:
    """The steps that wait and the one that runs. An `owner` is whatever stands for a request; it has one step at most.

    When a step ends, the tasks it wakes ask for their next steps before the next one starts, one turn of the loop
    later: so the sequences that decode together stay together.
    """

    __slots__ = (
        "_arenas", "_closed", "_decodes", "_idle", "_leaving", "_loop", "_model", "_prefilled", "_prefills", "_running",
        "_start_is_due", "_worker",
    )  # fmt: skip

    def __init__(self, model: LlamaModel, *, arenas: Sequence[Tensor], worker: TorchWorker) -> None:
        self._model = model
        self._arenas = arenas
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._prefills: deque[_Job] = deque()
        self._decodes: deque[_Job] = deque()
        self._running: tuple[_Job, ...] = ()
        self._prefilled = False
        self._start_is_due = False
        self._leaving: dict[object, Callable[[], None]] = {}
        self._idle: list[asyncio.Future[None]] = []
        self._closed = False

    async def compute(self, work: Work, *, owner: object, choose: Chooser = choose_likeliest) -> Token:
        """Waits for its turn, computes `work`, and returns the token after it; raises what the step raised.

        `choose` is called in the worker's thread.
        """
        if self._closed:
            raise EngineClosed
        job = _Job(owner=owner, work=work, choose=choose, waiter=self._loop.create_future())
        (self._prefills if isinstance(work, PrefillChunk) else self._decodes).append(job)
        self._start_soon()
        return await job.waiter

    def leave(self, owner: object, *, give_back: Callable[[], None]) -> None:
        """Drops the owner's waiting step and calls `give_back` as soon as no step touches its blocks: mostly now."""
        for waiting in (self._prefills, self._decodes):
            for job in [job for job in waiting if job.owner is owner]:
                waiting.remove(job)
        if any(job.owner is owner for job in self._running):
            self._leaving[owner] = give_back
        else:
            give_back()

    def close(self) -> None:
        """Takes no more steps and fails those that wait; the one that runs goes on to its end."""
        self._closed = True
        for job in (*self._prefills, *self._decodes):
            if not job.waiter.done():
                job.waiter.set_exception(EngineClosed())
        self._prefills.clear()
        self._decodes.clear()

    async def wait_idle(self) -> None:
        """Waits until no step runs. When cancelled it stops waiting, and the step runs on."""
        if self._running:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._idle.append(waiter)
            await waiter

    def _start_soon(self) -> None:
        if not (self._running or self._start_is_due):
            self._start_is_due = True
            self._loop.call_soon(self._start)

    def _start(self) -> None:
        """Starts a step if one waits: after a prefill chunk it is decoding's turn, and the other way round."""
        self._start_is_due = False
        self._prefilled = bool(self._prefills) and not (self._decodes and self._prefilled)
        waiting, limit = (self._prefills, 1) if self._prefilled else (self._decodes, DECODE_ROWS)
        self._running = tuple(waiting.popleft() for _ in range(min(limit, len(waiting))))
        if self._running:
            step = partial(_compute, self._model, jobs=self._running, arenas=self._arenas)
            self._worker.start(step, done=self._end)

    def _end(self, outcome: Future[list[Token]]) -> None:
        """Gives back the blocks of requests that have left, then tells the others; the step has ended, well or not."""
        ended, self._running = self._running, ()
        for job in ended:
            give_back = self._leaving.pop(job.owner, None)
            if give_back is not None:
                give_back()
        for place, job in enumerate(ended):
            deliver(outcome, to=job.waiter, pick=itemgetter(place))
        for waiter in self._idle:
            if not waiter.done():
                waiter.set_result(None)
        self._idle.clear()
        self._start_soon()


class EngineClosed(UsageError):
    """The engine takes no more requests."""

    def __init__(self) -> None:
        super().__init__("the engine is closed")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Job:
    """One request's next step; `waiter` is awaited by the request's task and by nobody else."""

    owner: object
    work: Work
    choose: Chooser
    waiter: asyncio.Future[Token]


def _compute(model: LlamaModel, *, jobs: Sequence[_Job], arenas: Sequence[Tensor]) -> list[Token]:
    """Computes one step, in the worker's thread; returns one token per job."""
    first = jobs[0].work
    if isinstance(first, PrefillChunk):
        logits = model.prefill(first.token_ids, start=first.start, blocks=first.blocks, arenas=arenas)[None]
    else:
        logits = model.decode([job.work for job in jobs if isinstance(job.work, DecodeRow)], arenas=arenas)
    return [Token(token_id=job.choose(row), logits=row) for job, row in zip(jobs, logits, strict=True)]
