"""Generates the choices of one request, each in a task of its own, into one queue.

Generation never waits for a client that reads slowly: what is queued is bounded by the tokens that were asked for, and
the blocks are given back as soon as the last token is there. Whoever leaves early cancels the tasks, and the engine
gives their blocks back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import final

from aiokv import Hit
from aiokv_engine.sampling import Sampling
from aiokv_engine.scheduler import Engine, Ready, Request
from aiokv_engine.server.errors import ApiError
from aiokv_engine.server.gate import Seat
from aiokv_engine.server.prompts import ChoicePlan
from aiokv_engine.server.stop_text import AnswerText
from aiokv_engine.steps import EngineClosed
from aiokv_engine.tokenizer import GgufTokenizer

__all__ = ["Choices", "FinishReason", "Generation", "Piece", "Usage"]

_log = logging.getLogger(__name__)


class FinishReason(StrEnum):
    """Why a choice has ended."""

    STOP = "stop"
    """The model has ended it, or a stop string was met."""
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one token has added to one choice; `finish` is there in its last piece."""

    index: int
    text: str
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a whole request. `hits` says per prompt that was admitted where its tokens came from."""

    prompt_tokens: int
    completion_tokens: int
    hits: tuple[Hit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How all choices of one request are generated. `on_token` hears of every token, with its prompt's hit."""

    request_id: str
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    sampling: Sampling
    salt: str | None
    on_token: Callable[[Hit], None]


@final
class Choices:
    """The choices of one request while they are generated; use `generating` once, and read `next_pieces` inside."""

    __slots__ = ("_engine", "_fault", "_generation", "_hits", "_plans", "_queue", "_tasks", "_tokenizer", "_tokens")

    def __init__(
        self, engine: Engine, *, tokenizer: GgufTokenizer, plans: Sequence[ChoicePlan], generation: Generation
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._plans = plans
        self._generation = generation
        self._queue: asyncio.Queue[Piece | ApiError] = asyncio.Queue()
        self._fault: ApiError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._hits: dict[int, Hit] = {}
        self._tokens = 0

    @contextmanager
    def generating(self, seats: Sequence[Seat]) -> Iterator[None]:
        """Generates inside; leaving ends what still runs. Each prompt leaves its seat when it has ended."""
        for index, seat in enumerate(seats):
            task = asyncio.get_running_loop().create_task(self._generate(index, seat=seat))
            task.add_done_callback(partial(_leave, seat))
            self._tasks.append(task)
        try:
            yield
        finally:
            self._cancel()

    async def next_pieces(self) -> list[Piece]:
        """Waits for more and returns all there is, in order; raises the `ApiError` that a choice has ended with."""
        pieces: list[Piece] = []
        while self._fault is None and not (pieces and self._queue.empty()):
            item = await self._queue.get()
            if isinstance(item, ApiError):
                self._fault = item
            else:
                pieces.append(item)
        if self._fault is not None and not pieces:
            raise self._fault
        return pieces

    def cut_off(self) -> None:
        """Ends the request early: whoever reads gets what there is, and then the reason."""
        self._queue.put_nowait(ApiError.cut_off())
        self._cancel()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    @property
    def usage(self) -> Usage:
        """What has been used so far."""
        prompt_tokens = sum(len(plan.token_ids) for plan in self._plans)
        hits = tuple(self._hits[index] for index in sorted(self._hits))
        return Usage(prompt_tokens=prompt_tokens, completion_tokens=self._tokens, hits=hits)

    async def _generate(self, index: int, *, seat: Seat) -> None:
        try:
            self._queue.put_nowait(await self._run(index, seat=seat))
        except EngineClosed:
            self._queue.put_nowait(ApiError.cut_off())
        except Exception as error:  # the last frame of this choice: the client gets a status, the log what it was
            _log.error("a request has failed: %s", type(error).__name__)
            self._queue.put_nowait(ApiError.internal())

    async def _run(self, index: int, *, seat: Seat) -> Piece:
        """Queues a piece for every token; returns the last one."""
        generation = self._generation
        text = AnswerText(self._tokenizer, stops=generation.stops)
        finish = FinishReason.LENGTH

        def note(ready: Ready) -> None:
            self._hits[index] = ready.hit
            seat.start()

        request = Request(
            request_id=f"{generation.request_id}-{index}",
            token_ids=self._plans[index].token_ids,
            max_new_tokens=self._plans[index].max_new_tokens,
            stop_ids=generation.stop_ids,
            is_enough=lambda: text.is_stopped,
            sampling=generation.sampling,
            salt=generation.salt,
            on_ready=note,
        )
        async with aclosing(self._engine.stream(request)) as stream:
            async for token in stream:
                self._tokens += 1
                generation.on_token(self._hits[index])
                piece = Piece(index=index, text=text.push(token.token_id))
                if token.token_id in generation.stop_ids or text.is_stopped:
                    finish = FinishReason.STOP
                self._queue.put_nowait(piece)
        rest = text.finish()  # which may complete a stop string
        return Piece(index=index, text=rest, finish=FinishReason.STOP if text.is_stopped else finish)


def _leave(seat: Seat, _: object) -> None:
    seat.leave()
