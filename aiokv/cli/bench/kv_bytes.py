"""The KV memory of a model that computes nothing: every byte follows from the tokens before it and can be judged.

What a token leaves in a layer depends on the tenant, on all tokens up to and including it, on group, layer and place,
as in a real model; and not on any hash of aiokv. Tokens are written one by one, so half filled and edited blocks are
real too. Whatever is reserved is poisoned before it is computed: old bytes of the same content cannot look right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from aiokv.model.ids import NULL_SLOT
from aiokv.model.spec import CacheGeometry, ChunkedLocal, FullAttention, GroupSpec, SlidingWindow

__all__ = ["Codes", "KvBytes", "Verdict", "codes_of"]

Codes = NDArray[np.uint64]
"""One word per token, shape `[tokens]`: what tenant and prefix make of it."""
_Words = NDArray[np.uint64]
_Table = Sequence[int] | NDArray[np.int32]

_POISON: Final = np.uint64(0xDEADBEEFDEADBEEF)
_FACTOR: Final = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_INVERSE: Final = pow(_FACTOR, -1, 2**64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a comparison found, in blocks."""

    compared: int
    wrong: int


def codes_of(tenant: int, token_ids: Sequence[int]) -> Codes:
    """The word of each token. A polynomial in the tokens before it, modulo 2**64, so that it takes no loop."""
    tokens = _mixed(np.asarray(token_ids, np.uint64) ^ _mixed(np.full(1, tenant, np.uint64)))
    powers, inverses = _powers(_FACTOR, len(tokens)), _powers(_INVERSE, len(tokens))
    return _mixed(powers * np.cumsum(tokens * inverses, dtype=np.uint64))


@final
class KvBytes:
    """The GPU tensors of all groups: two layers each, `token_words` words a token; the first has K and V outermost."""

    __slots__ = ("_block", "_planes", "arenas", "geometry")

    def __init__(self, geometry: CacheGeometry, *, gpu_blocks: int, token_words: int) -> None:
        self.geometry = geometry
        self._block = geometry.hash_block_size
        shape = (gpu_blocks, self._block, token_words)
        pairs = {group.name: np.zeros((2, *shape), np.uint64) for group in geometry.groups}
        singles = {group.name: np.zeros(shape, np.uint64) for group in geometry.groups}
        self.arenas = {name: [pairs[name], singles[name]] for name in pairs}
        """As `KVRuntime` takes them."""
        self._planes = {name: (pairs[name][0], pairs[name][1], singles[name]) for name in pairs}

    def write(self, group: str, table: _Table, *, codes: Codes, start: int, stop: int) -> int:
        """Compute tokens `[start, stop)`; returns how many of them have no block to be written to."""
        tokens, slots = self._places(table, start=start, stop=stop)
        has_slot = slots != NULL_SLOT
        tokens, slots = tokens[has_slot], slots[has_slot]
        for plane, memory in enumerate(self._planes[group]):
            memory[slots, tokens % self._block] = self._expected(group, plane, codes=codes[tokens])
        return stop - start - len(tokens)

    def poison(self, group: str, table: _Table, *, start: int, stop: int) -> None:
        """Spoil the places of tokens `[start, stop)`, as far as they have a block."""
        tokens, slots = self._places(table, start=start, stop=stop)
        has_slot = slots != NULL_SLOT
        for memory in self._planes[group]:
            memory[slots[has_slot], tokens[has_slot] % self._block] = _POISON

    def poison_slots(self, group: str, slots: NDArray[np.int32]) -> None:
        """Spoil whole blocks."""
        for memory in self._planes[group]:
            memory[slots] = _POISON

    def compare(self, group: GroupSpec, table: _Table, *, codes: Codes, length: int) -> Verdict:
        """Every block of the table that holds tokens before `length`; one that the next query reads must be there."""
        tokens, slots = self._places(table, start=0, stop=length)
        missing = (slots == NULL_SLOT) & (tokens >= first_token_read(group, length=length))
        held = slots != NULL_SLOT
        wrong = np.zeros(length, np.bool_)
        for plane, memory in enumerate(self._planes[group.name]):
            found = memory[slots[held], tokens[held] % self._block]
            wrong[held] |= (found != self._expected(group.name, plane, codes=codes[:length][held])).any(axis=1)
        wrong |= missing
        return Verdict(
            compared=len(np.unique(tokens[held] // self._block)), wrong=len(np.unique(tokens[wrong] // self._block))
        )

    def _places(self, table: _Table, *, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        tokens = np.arange(start, stop, dtype=np.int64)
        return tokens, np.asarray(table, np.int32)[tokens // self._block]

    def _expected(self, group: str, plane: int, *, codes: Codes) -> _Words:
        memory = self._planes[group][plane]
        index = self.geometry.group_index(group) * len(self._planes[group]) + plane
        words = _mixed(np.arange(1, memory.shape[2] + 1, dtype=np.uint64)) | np.uint64(1)
        return _mixed(codes ^ _mixed(np.full(1, index, np.uint64)))[:, None] * words


def first_token_read(group: GroupSpec, *, length: int) -> int:
    """The first position that the query at position `length` reads, by the masks of attention."""
    match group:
        case FullAttention():
            return 0
        case SlidingWindow(window=window):
            return max(0, length - window + 1)
        case ChunkedLocal(chunk=chunk):
            return length - length % chunk
        case _:
            raise ValueError(f"group {group.name!r} keeps no KV by position")


def _powers(base: int, count: int) -> _Words:
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _mixed(words: _Words) -> _Words:
    """The finaliser of splitmix64: every bit depends on every bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
