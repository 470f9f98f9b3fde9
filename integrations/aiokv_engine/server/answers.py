"""What is sent of an answer: one JSON document, or server-sent events, for completions and for chats.

Beside OpenAI's `cached_tokens` there are `gpu_cached_tokens` and `cpu_cached_tokens`, which sum to it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias, final

from aiokv_engine.server.choices import Piece, Usage
from aiokv_engine.server.errors import ApiError
from aiokv_engine.server.schema import UsageReport

__all__ = ["DONE", "ChatWire", "CompletionWire", "Heading", "Whole", "Wire", "encode", "failed", "usage_as_json"]

Json: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What every document about one answer begins with. `usage_report` is for streams."""

    request_id: str
    model: str
    choices: int
    usage_report: UsageReport = UsageReport.NEVER
    created: int = field(default_factory=lambda: int(time.time()))


class Wire(Protocol):
    """One kind of answer, as bytes."""

    def begin(self, usage: Usage) -> bytes:
        """What a stream begins with; `usage` is that so far, here and below."""

    def events(self, pieces: Sequence[Piece], *, usage: Usage) -> bytes:
        """Some pieces of a stream."""

    def end(self, usage: Usage) -> bytes:
        """What a complete stream ends with."""

    def document(self, whole: Whole) -> bytes:
        """The answer as one document."""


@final
class Whole:
    """Collects the choices of an answer that is sent at once."""

    __slots__ = ("_finishes", "_texts", "usage")

    def __init__(self, *, choices: int) -> None:
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._finishes: list[str | None] = [None] * choices
        self.usage = Usage(prompt_tokens=0, completion_tokens=0, hits=())

    def add(self, pieces: Sequence[Piece]) -> int:
        """Adds some pieces; returns how many choices have ended with them."""
        for piece in pieces:
            self._texts[piece.index].append(piece.text)
            self._finishes[piece.index] = piece.finish
        return sum(piece.finish is not None for piece in pieces)

    def choices(self) -> list[tuple[str, str | None]]:
        """Returns text and reason of each choice."""
        return [("".join(texts), finish) for texts, finish in zip(self._texts, self._finishes, strict=True)]


@final
class CompletionWire:
    """Completions: the object `text_completion`, whole and in pieces."""

    __slots__ = ("_heading",)

    def __init__(self, heading: Heading) -> None:
        self._heading = heading

    def begin(self, usage: Usage) -> bytes:
        """Nothing comes before the text."""
        return b""

    def events(self, pieces: Sequence[Piece], *, usage: Usage) -> bytes:
        """One event per piece that says something."""
        said = [piece for piece in pieces if piece.text or piece.finish]
        choices = [_completion_choice(piece.index, text=piece.text, finish=piece.finish) for piece in said]
        return _events(self._heading, kind=_COMPLETION, choices=choices, usage=usage)

    def end(self, usage: Usage) -> bytes:
        """The usage, if it was asked for, and the end."""
        return _end(self._heading, kind=_COMPLETION, usage=usage)

    def document(self, whole: Whole) -> bytes:
        """The answer as one document."""
        said = enumerate(whole.choices())
        choices = [_completion_choice(index, text=text, finish=finish) for index, (text, finish) in said]
        return encode(_document(self._heading, kind=_COMPLETION, choices=choices, usage=whole.usage))


@final
class ChatWire:
    """Chat completions: the objects `chat.completion` and `chat.completion.chunk`."""

    __slots__ = ("_heading",)

    def __init__(self, heading: Heading) -> None:
        self._heading = heading

    def begin(self, usage: Usage) -> bytes:
        """Whose turn it is."""
        choice = _delta_choice(0, delta={"role": "assistant", "content": ""}, finish=None)
        return _events(self._heading, kind=_CHUNK, choices=[choice], usage=usage)

    def events(self, pieces: Sequence[Piece], *, usage: Usage) -> bytes:
        """One event per piece that says something."""
        choices = [
            _delta_choice(piece.index, delta={"content": piece.text} if piece.text else {}, finish=piece.finish)
            for piece in pieces
            if piece.text or piece.finish
        ]
        return _events(self._heading, kind=_CHUNK, choices=choices, usage=usage)

    def end(self, usage: Usage) -> bytes:
        """The usage, if it was asked for, and the end."""
        return _end(self._heading, kind=_CHUNK, usage=usage)

    def document(self, whole: Whole) -> bytes:
        """The answer as one document."""
        choices = [
            _message_choice(index, text=text, finish=finish) for index, (text, finish) in enumerate(whole.choices())
        ]
        return encode(_document(self._heading, kind=_CHAT, choices=choices, usage=whole.usage))


def usage_as_json(usage: Usage) -> Json:
    """Returns the usage as both kinds of answers give it."""
    gpu = sum(hit.gpu_tokens for hit in usage.hits)
    cpu = sum(hit.cpu_tokens for hit in usage.hits)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": gpu + cpu,
            "gpu_cached_tokens": gpu,
            "cpu_cached_tokens": cpu,
        },
    }


def encode(document: Json) -> bytes:
    """Returns the document as JSON."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _as_event(document: Json) -> bytes:
    """Returns the document as one server-sent event."""
    return b"data: " + encode(document) + b"\n\n"


def failed(error: ApiError) -> bytes:
    """Returns what a stream ends with that cannot be completed."""
    return _as_event(error.as_json())


def _completion_choice(index: int, *, text: str, finish: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def _message_choice(index: int, *, text: str, finish: str | None) -> Json:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}


def _delta_choice(index: int, *, delta: Json, finish: str | None) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def _document(heading: Heading, *, kind: str, choices: Sequence[Json], usage: Usage) -> Json:
    return {
        "id": heading.request_id,
        "object": kind,
        "created": heading.created,
        "model": heading.model,
        "choices": choices,
        "usage": usage_as_json(usage),
    }


def _events(heading: Heading, *, kind: str, choices: Sequence[Json], usage: Usage) -> bytes:
    """Returns an event for each of `choices`, with as much of the usage as was asked for."""
    extra: Json = {} if heading.usage_report is UsageReport.NEVER else {"usage": None}
    if heading.usage_report is UsageReport.ALWAYS:
        extra = {"usage": usage_as_json(usage)}
    heads = {"id": heading.request_id, "object": kind, "created": heading.created, "model": heading.model}
    return b"".join(_as_event({**heads, "choices": [choice], **extra}) for choice in choices)


def _end(heading: Heading, *, kind: str, usage: Usage) -> bytes:
    if heading.usage_report is UsageReport.NEVER:
        return DONE
    return _as_event(_document(heading, kind=kind, choices=(), usage=usage)) + DONE


DONE: Final = b"data: [DONE]\n\n"
_COMPLETION: Final = "text_completion"
_CHAT: Final = "chat.completion"
_CHUNK: Final = "chat.completion.chunk"
