"""Tokens made from hash ids: an id always stands for the same 512 tokens, no two ids for the same.

Output is not part of the trace: each request's is a stream of its own, so that no later prompt hits it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aiokv.cli.bench.replay.schedule import Arrival
from aiokv.cli.bench.replay.settings import TokenForm
from aiokv.cli.bench.replay.trace import CHUNK_TOKENS, MAX_HASH_ID

__all__ = ["Prompt", "Tokens", "make_prompt"]

_VOCABULARY: Final = 128_000
_STREAM_BITS: Final = 20
_FIRST_OUTPUT_STREAM: Final = 2 * MAX_HASH_ID


Tokens = list[int] | NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One arrival with its tokens."""

    index: int
    ends: int
    tokens: Tokens
    outputs: Tokens


def make_prompt(arrival: Arrival, *, form: TokenForm) -> Prompt:
    """The tokens of one arrival, in this form."""
    request = arrival.request
    chunks = [
        _tokens(chunk, min(CHUNK_TOKENS, request.input_length - place * CHUNK_TOKENS))
        for place, chunk in enumerate(request.hash_ids)
    ]
    return Prompt(
        index=arrival.index,
        ends=arrival.ends,
        tokens=_as(np.concatenate(chunks), form),
        outputs=_as(_tokens(_FIRST_OUTPUT_STREAM + arrival.index, request.output_length), form),
    )


def _tokens(stream: int, count: int) -> NDArray[np.uint64]:
    """The first tokens of a stream: the finaliser of SplitMix64 over counters that no other stream has."""
    mixed = np.arange(count, dtype=np.uint64) + np.uint64(stream << _STREAM_BITS)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) % np.uint64(_VOCABULARY)


def _as(tokens: NDArray[np.uint64], form: TokenForm) -> Tokens:
    return tokens.astype(np.int32) if form is TokenForm.ARRAY else tokens.tolist()
