"""A trace in the format of Mooncake's: one JSON object a line, checked before anything is replayed.

`hash_ids` has one id per 512 tokens of the input, a partial tail included; equal ids stand for equal whole prefixes.
Requests are taken in the order of the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from aiokv.errors import ConfigError
from aiokv.model.numbers import is_whole

__all__ = ["CHUNK_TOKENS", "MAX_HASH_ID", "TraceRequest", "read_trace"]

CHUNK_TOKENS: Final = 512
"""Tokens that one hash id stands for."""
MAX_HASH_ID: Final = 2**40
_MAX_TOKENS: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One line; lengths in tokens."""

    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_whole("input_length", self.input_length, least=1, below=_MAX_TOKENS)
        _check_whole("output_length", self.output_length, least=0, below=_MAX_TOKENS)
        for chunk in self.hash_ids:
            _check_whole("each of hash_ids", chunk, least=0, below=MAX_HASH_ID)
        if len(self.hash_ids) != -(-self.input_length // CHUNK_TOKENS):
            raise ConfigError(
                f"input_length {self.input_length} needs {-(-self.input_length // CHUNK_TOKENS)} hash_ids "
                f"(one per {CHUNK_TOKENS} tokens), not {len(self.hash_ids)}"
            )


def read_trace(path: Path, *, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests, or all; `ConfigError` says which line cannot be used and why. Blank lines do not
    count.
    """
    try:
        with path.open(encoding="utf-8") as file:
            requests = list(islice(_requests_of(file, path=path), limit))
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the trace {path}: it is not UTF-8 text") from error
    if not requests:
        raise ConfigError(f"the trace {path} has no requests")
    return requests


def _requests_of(lines: Iterator[str], *, path: Path) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield _request_of(json.loads(line))
            except (ConfigError, ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error


def _request_of(document: Any) -> TraceRequest:  # noqa: ANN401  # whatever the line holds
    if not isinstance(document, dict):
        raise ConfigError("not a JSON object")
    missing = [name for name in ("input_length", "output_length", "hash_ids") if name not in document]
    if missing:
        raise ConfigError(f"{', '.join(missing)} missing")
    if not isinstance(document["hash_ids"], list):
        raise ConfigError(f"hash_ids must be a list, not {document['hash_ids']!r}")
    return TraceRequest(
        input_length=document["input_length"],
        output_length=document["output_length"],
        hash_ids=tuple(document["hash_ids"]),
    )


def _check_whole(name: str, value: object, *, least: int, below: int) -> None:
    if not is_whole(value) or not least <= value < below:
        raise ConfigError(f"{name} must be an integer from {least} to {below - 1}, not {value!r}")
