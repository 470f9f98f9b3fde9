"""Reads the body of a request under a limit, and makes a checked value of it.

Both are bounded before they cost anything: bytes are counted while they come, JSON is read by pydantic's own reader
(which bounds nesting and refuses bytes that are no UTF-8), and a large body is checked in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from aiokv_engine.server.errors import ApiError
from aiokv_engine.server.schema import GenerationRequest

__all__ = ["MAX_BODY_BYTES", "READ_SECONDS", "parse", "read_body"]

MAX_BODY_BYTES: Final = 2**20
READ_SECONDS: Final = 60.0
"""How long the whole body may take to come."""
_PARSED_ON_THE_LOOP: Final = 4096  # bytes; under 0.1 ms
_MOST_FAULTS: Final = 1000  # of one body that are looked at
_LONGEST_MESSAGE: Final = 300  # characters
_LONGEST_NAME: Final = 64  # characters
_JSON: Final = "application/json"

R = TypeVar("R", bound=GenerationRequest)


async def read_body(request: Request) -> bytes:
    """Returns the body; raises `ApiError` if it is no JSON by its header, too large, or does not come.

    Raises starlette's `ClientDisconnect` if the client leaves first.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _JSON:
        raise ApiError(f"the body of a request is {_JSON}", status=415, headers={"Connection": "close"})
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > MAX_BODY_BYTES:
        raise ApiError.too_large(limit=MAX_BODY_BYTES)
    try:
        async with asyncio.timeout(READ_SECONDS):
            return await _read(request)
    except TimeoutError:
        raise ApiError(
            "the body of the request did not come in time", status=408, headers={"Connection": "close"}
        ) from None


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise ApiError.too_large(limit=MAX_BODY_BYTES)
    return bytes(body)


async def parse(body: bytes, *, as_type: type[R]) -> R:
    """Returns what `body` says; raises `ApiError` that names the first parameter at fault."""
    if len(body) <= _PARSED_ON_THE_LOOP:
        return _parse(body, as_type=as_type)
    return await asyncio.to_thread(_parse, body, as_type=as_type)


def _parse(body: bytes, *, as_type: type[R]) -> R:
    try:
        return as_type.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > _MOST_FAULTS:
            raise ApiError("the request has too many faults to name one", code="invalid_parameter") from None
        raise _explain(error.errors(include_url=False, include_context=False, include_input=False)[0]) from None


def _explain(first: ErrorDetails) -> ApiError:
    """Returns the error for a client; what it has sent is not in it, but for the name of an unknown parameter."""
    param = str(first["loc"][0])[:_LONGEST_NAME] if first["loc"] else None
    match first["type"]:
        case "json_invalid":
            return ApiError("the body is not valid JSON", code="invalid_json")
        case "extra_forbidden" if len(first["loc"]) == 1:
            return ApiError("unknown or unsupported parameter", param=param, code="unknown_parameter")
        case "missing":
            return ApiError(f"{_place(first)} is required", param=param, code="missing_parameter")
        case _:
            place, reason = _place(first), first["msg"][0].lower() + first["msg"][1:]
            if param is not None and param in _EXPLANATIONS:
                place, reason = param, _EXPLANATIONS[param]
            return ApiError(f"{place}: {reason}"[:_LONGEST_MESSAGE], param=param, code="invalid_parameter")


def _place(first: ErrorDetails) -> str:
    """Returns where the fault is, such as `messages.3.role`; never the name of a field that only the client knows."""
    path = first["loc"][:-1] if first["type"] == "extra_forbidden" else first["loc"]
    return ".".join(str(part) for part in path if part not in _KINDS and "[" not in str(part)) or "the body"


_KINDS: Final = ("str", "constrained-str")  # what pydantic calls the alternatives of a union
_EXPLANATIONS: Final[Mapping[str, str]] = {
    "prompt": "must be a text, an array of token ids, or an array of at most 128 of either; none may be empty",
    "stop": "must be a text or an array of at most 4; each has 1 to 256 characters",
    "n": "must be 1",
    "best_of": "must be 1",
    "tools": "tools are not supported",
    "metadata": "must be an object of texts",
    "logit_bias": "is not supported",
    "logprobs": "log probabilities are not supported",
    "suffix": "is not supported",
    "echo": "is not supported",
}
