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
        message = f"the body of a request is JSON: send the header Content-Type: {_JSON}"
        raise ApiError(message, status=415, headers={"Connection": "close"})
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
        raise _explain(error.errors(include_url=False, include_input=False)[0]) from None


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
            place, reason = _place(first), _reason(first)
            if param is not None and param in _EXPLANATIONS:
                place, reason = param, _EXPLANATIONS[param]
            return ApiError(f"{place}: {reason}"[:_LONGEST_MESSAGE], param=param, code="invalid_parameter")


def _reason(first: ErrorDetails) -> str:
    """Returns what is wrong in words of ours: pydantic's speak of checks, as `schema` writes them."""
    if "content" in first["loc"]:
        return _CONTENT
    return _REASONS.get(first["type"], "is not valid").format_map(first.get("ctx", {}))


def _place(first: ErrorDetails) -> str:
    """Returns where the fault is, such as `messages.3.role`; never the name of a field that only the client knows."""
    path = first["loc"][:-1] if first["type"] == "extra_forbidden" else first["loc"]
    return ".".join(str(part) for part in path if part not in _KINDS and "[" not in str(part)) or "the body"


_KINDS: Final = ("str", "constrained-str")  # what pydantic calls the alternatives of a union
_EXPLANATIONS: Final[Mapping[str, str]] = {
    "prompt": "must be a string, an array of token ids, or an array of at most 128 of either; none may be empty",
    "stop": "must be a string or an array of at most 4; each has 1 to 256 characters",
    "metadata": "must be an object of strings",
    "n": "only 1 is supported",
    "best_of": "only 1 is supported",
    "presence_penalty": "is not supported",
    "frequency_penalty": "is not supported",
    "logit_bias": "is not supported",
    "store": "is not supported",
    "echo": "is not supported",
    "suffix": "is not supported",
    "logprobs": "is not supported",
    "top_logprobs": "is not supported",
    "tools": "is not supported",
    "tool_choice": 'is not supported, but for "none"',
    "response_format": 'is not supported, but for {"type": "text"}',
}
"""What is wrong with a parameter, whatever it is; a value that asks for nothing is taken."""
_CONTENT: Final = 'must be a string or an array of parts {"type": "text", "text": string}'
_REASONS: Final[Mapping[str, str]] = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "extra_forbidden": "has a field that is unknown or not supported",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "is too large",
    "int_type": "must be a whole number",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be an array",
    "literal_error": "must be {expected}",
    "model_type": "must be an object",
    "none_required": "is not supported",
    "string_too_long": "has at most {max_length} characters",
    "string_too_short": "must not be empty",
    "string_type": "must be a string",
    "string_unicode": "must be Unicode",
    "too_long": "has at most {max_length} elements",
    "too_short": "must not be empty",
}
"""By pydantic's name of a fault. What is filled in are limits of `schema`, nothing that a client has sent."""
