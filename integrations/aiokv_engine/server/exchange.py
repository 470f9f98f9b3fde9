"""One request to generate, from its body to the last byte of its answer.

Life cycle: let in, read, checked, seated, tokenised, generated, answered. From the moment the body is there a client
that leaves ends all of it, streaming or not: its tasks are cancelled and its blocks are given back. However a request
ends, it is counted once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Generic, TypeVar, final
from uuid import uuid4

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aiokv import Hit
from aiokv_engine.server.answers import Heading, Whole, Wire, failed
from aiokv_engine.server.body import parse, read_body
from aiokv_engine.server.choices import Choices, Generation
from aiokv_engine.server.errors import ApiError, RequestOutcome
from aiokv_engine.server.prompts import ChoicePlan
from aiokv_engine.server.schema import CompletionRequest, GenerationRequest
from aiokv_engine.server.service import Service

__all__ = ["Exchange", "Kind"]

_EVENTS: Final = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
_DOCUMENT: Final = {"content-type": "application/json"}

_log = logging.getLogger(__name__)

R = TypeVar("R", bound=GenerationRequest)


@final
class Kind(Generic[R]):
    """One kind of requests: what they say, how their prompts are made, and how their answers are sent."""

    __slots__ = ("make_wire", "plan", "prefix", "request_type")

    def __init__(
        self,
        request_type: type[R],
        *,
        plan: Callable[[R], Awaitable[list[ChoicePlan]]],
        make_wire: Callable[[Heading], Wire],
        prefix: str,
    ) -> None:
        self.request_type = request_type
        self.plan = plan
        self.make_wire = make_wire
        self.prefix = prefix


@final
class Exchange(Response, Generic[R]):
    """A response that reads its request itself, so that it sees the client leave. An `ApiError` that it raises before
    the first byte was sent becomes the answer.
    """

    def __init__(self, service: Service, *, kind: Kind[R]) -> None:
        super().__init__()
        self._service = service
        self._kind = kind
        self._started = time.perf_counter()
        self._has_token = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: PLR0917  # as ASGI has it
        """Answers one request."""
        with _counted(self._service):
            said = await self._read(Request(scope, receive))
            if said.model is not None:
                self._service.check_model(said.model)
            async with _while_connected(receive):
                await self._answer(said, send=send)

    async def _read(self, request: Request) -> R:
        """Returns what the request says; once the server takes no more requests, it waits for no more of it."""
        gate = self._service.gate
        gate.check_room()
        with anyio.CancelScope() as reading, gate.reading(reading.cancel):
            return await parse(await read_body(request), as_type=self._kind.request_type)
        raise ApiError.draining()

    async def _answer(self, said: R, *, send: Send) -> None:
        service = self._service
        prompts = len(said.prompts) if isinstance(said, CompletionRequest) else 1
        if prompts > service.gate.max_queue:
            message = f"prompt: at most {service.gate.max_queue} prompts fit into the queue"
            raise ApiError(message, param="prompt", code="invalid_parameter")
        seats = service.gate.take_seats(prompts)
        try:
            plans = await self._plan(said)
        except BaseException:  # nobody will sit there
            for seat in seats:
                seat.leave()
            raise
        choices, heading = self._begin(said, plans=plans)
        with service.gate.answering(choices.cut_off), choices.generating(seats):
            wire = self._kind.make_wire(heading)
            reply = self._stream if said.stream else self._reply_at_once
            await reply(choices, wire=wire, count=len(plans), send=send)

    async def _plan(self, said: R) -> list[ChoicePlan]:
        with anyio.CancelScope() as planning, self._service.gate.answering(planning.cancel):
            return await self._kind.plan(said)
        raise ApiError.cut_off()

    def _begin(self, said: R, *, plans: list[ChoicePlan]) -> tuple[Choices, Heading]:
        service = self._service
        request_id = f"{self._kind.prefix}-{uuid4().hex}"
        tokenizer = service.loaded.tokenizer
        generation = Generation(
            request_id=request_id,
            stops=said.stops,
            stop_ids=frozenset() if said.ignore_eos else tokenizer.stop_ids,
            sampling=said.sampling,
            salt=said.cache_salt,
            on_token=self._note_token,
        )
        choices = Choices(service.serving.engine, tokenizer=tokenizer, plans=plans, generation=generation)
        return choices, Heading(
            request_id=request_id, model=service.name, choices=len(plans), usage_report=said.usage_report
        )

    def _note_token(self, hit: Hit) -> None:
        metrics = self._service.metrics
        metrics.count_token()
        if not self._has_token:
            self._has_token = True
            metrics.observe_first_token(hit, seconds=time.perf_counter() - self._started)

    async def _reply_at_once(self, choices: Choices, *, wire: Wire, count: int, send: Send) -> None:
        whole = Whole(choices=count)
        left = count
        while left:
            left -= whole.add(await choices.next_pieces())
        whole.usage = choices.usage
        body = wire.document(whole)
        headers = _DOCUMENT | {"content-length": str(len(body))}
        await send({"type": "http.response.start", "status": 200, "headers": _raw(headers)})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, choices: Choices, *, wire: Wire, count: int, send: Send) -> None:
        """Sends whatever there is at once: of a client that reads slowly the next events become larger."""
        await send({"type": "http.response.start", "status": 200, "headers": _raw(_EVENTS)})
        await send({"type": "http.response.body", "body": wire.begin(choices.usage), "more_body": True})
        left = count
        try:
            while left:
                pieces = await choices.next_pieces()
                left -= sum(piece.finish is not None for piece in pieces)
                await send(
                    {"type": "http.response.body", "body": wire.events(pieces, usage=choices.usage), "more_body": True}
                )
        except ApiError as error:
            await send({"type": "http.response.body", "body": failed(error)})
            raise _Told(error) from error
        await send({"type": "http.response.body", "body": wire.end(choices.usage)})


class _Told(Exception):
    """A fault that the client has been told of already."""

    def __init__(self, error: ApiError) -> None:
        super().__init__()
        self.outcome = error.outcome


class _Left(Exception):
    """The client is not there any more."""


@contextmanager
def _counted(service: Service) -> Iterator[None]:
    """Counts the request inside by how it ends; who has been answered, or has left, needs no error any more."""
    outcome = RequestOutcome.FAILED
    try:
        yield
        outcome = RequestOutcome.OK
    except (_Left, ClientDisconnect, asyncio.CancelledError) as error:
        outcome = RequestOutcome.CANCELLED
        if isinstance(error, asyncio.CancelledError):
            raise
    except _Told as told:
        outcome = told.outcome
    except ApiError as error:
        outcome = error.outcome
        raise
    except Exception as error:  # the last frame of ours: what is above would log everything there is
        _log.error("a request has failed: %s", type(error).__name__)
        raise ApiError.internal() from None
    finally:
        service.metrics.count_request(outcome)


@asynccontextmanager
async def _while_connected(receive: Receive) -> AsyncIterator[None]:
    """Ends what is inside as soon as the client leaves, and raises `_Left` then."""
    with anyio.CancelScope() as scope:
        watcher = asyncio.get_running_loop().create_task(_watch(receive, scope=scope))
        try:
            yield
        finally:
            watcher.cancel()
    if scope.cancelled_caught:
        raise _Left


async def _watch(receive: Receive, *, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]
