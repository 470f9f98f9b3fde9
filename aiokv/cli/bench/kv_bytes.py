"""The KV memory of a model that computes nothing: every byte follows from the tokens before it and can be judged.

What a token leaves in a layer depends on the tenant, on all tokens up to and including it, on group, layer and place,
as in a real model; and not on any hash of aiokv. Tokens are written one by one, so half filled and edited blocks are
real too. Whatever is reserved is poisoned before it is computed: old bytes of the same content cannot look right.

Recurrent groups keep one state per slot. It is advanced in place, so a wrong byte in it is wrong ever after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

from aiokv.model.ids import NULL_SLOT, SlotArray
from aiokv.model.spec import CacheGeometry, ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow

__all__ = ["Codes", "HostMemory", "KvBytes", "Memory", "Verdict", "codes_of"]

Codes = NDArray[np.uint64]
"""One word per token, shape `[tokens]`: what tenant and prefix make of it."""
_Words = NDArray[np.uint64]
_Slots = NDArray[np.int32]
_Table = Sequence[int] | _Slots

_MOST_PLANES: Final = 3
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


class Memory(Protocol):
    """Where the tensors are."""

    def zeros(self, *shape: int) -> Any:  # noqa: ANN401  # what `KVRuntime` takes for a tensor
        """A tensor of words."""

    def plane(self, tensor: Any, index: int) -> Any:  # noqa: ANN401
        """`tensor[index]` as a view that is indexed by slots, and by slots and places in them."""


@final
class HostMemory:
    """Arrays in the memory of this process."""

    def zeros(self, *shape: int) -> _Words:
        """See `Memory`."""
        return np.zeros(shape, np.uint64)

    def plane(self, tensor: _Words, index: int) -> _Words:
        """See `Memory`."""
        plane: _Words = tensor[index]
        return plane


@final
class KvBytes:
    """The GPU tensors of all groups, `token_words` words a token.

    A group that keeps KV by position has two layers, the first with K and V outermost. A recurrent group has one layer
    of two tensors, which hold one state: `token_words` words and three times as many.
    """

    __slots__ = ("_blocks", "_planes", "arenas", "geometry", "positional", "recurrent")

    def __init__(
        self, geometry: CacheGeometry, *, gpu_blocks: int, token_words: int, memory: Memory | None = None
    ) -> None:
        where = memory or HostMemory()
        self.geometry = geometry
        self.recurrent = tuple(group for group in geometry.groups if isinstance(group, RecurrentState))
        """The groups that keep a state."""
        self.positional = tuple(group for group in geometry.groups if not isinstance(group, RecurrentState))
        """The groups that keep KV by position."""
        self._blocks = {group.name: group.block_size for group in geometry.groups}
        self._planes: dict[str, tuple[_Words, ...]] = {}
        self.arenas: dict[str, list[Any]] = {}
        """As `KVRuntime` takes them."""
        for group in self.positional:
            shape = (gpu_blocks, group.block_size, token_words)
            pair, single = where.zeros(2, *shape), where.zeros(*shape)
            self.arenas[group.name] = [pair, single]
            self._planes[group.name] = (where.plane(pair, 0), where.plane(pair, 1), single)
        for group in self.recurrent:
            parts = tuple(where.zeros(gpu_blocks, times * token_words) for times in (1, 3))
            self.arenas[group.name] = [list(parts)]
            self._planes[group.name] = parts

    # KV by position.

    def write(self, group: str, table: _Table, *, codes: Codes, start: int, stop: int) -> int:
        """Compute tokens `[start, stop)`; returns how many of them have no block to be written to."""
        tokens, slots = self._places(group, table, start=start, stop=stop)
        has_slot = slots != NULL_SLOT
        tokens, slots = tokens[has_slot], slots[has_slot]
        for plane, memory in enumerate(self._planes[group]):
            memory[slots, tokens % self._blocks[group]] = self._expected(group, plane, codes=codes[tokens])
        return stop - start - len(tokens)

    def poison(self, group: str, table: _Table, *, start: int, stop: int) -> None:
        """Spoil the places of tokens `[start, stop)`, as far as they have a block."""
        tokens, slots = self._places(group, table, start=start, stop=stop)
        has_slot = slots != NULL_SLOT
        for memory in self._planes[group]:
            memory[slots[has_slot], tokens[has_slot] % self._blocks[group]] = _POISON

    def poison_slots(self, group: str, slots: SlotArray) -> None:
        """Spoil whole blocks, or whole states."""
        for memory in self._planes[group]:
            memory[slots] = _POISON

    def compare(self, group: GroupSpec, table: _Table, *, codes: Codes, length: int) -> Verdict:
        """Every block of the table that holds tokens before `length`; one that the next query reads must be there."""
        block = group.block_size
        tokens, slots = self._places(group.name, table, start=0, stop=length)
        missing = (slots == NULL_SLOT) & (tokens >= first_token_read(group, length=length))
        held = slots != NULL_SLOT
        wrong = np.zeros(length, np.bool_)
        for plane, memory in enumerate(self._planes[group.name]):
            found = memory[slots[held], tokens[held] % block]
            wrong[held] |= (found != self._expected(group.name, plane, codes=codes[:length][held])).any(axis=1)
        wrong |= missing
        return Verdict(compared=len(np.unique(tokens[held] // block)), wrong=len(np.unique(tokens[wrong] // block)))

    # Recurrent states.

    def begin_state(self, group: str, slot: int) -> None:  # group and its slot
        """The state before the first token."""
        for memory in self._planes[group]:
            memory[slot] = 0

    def copy_state(self, group: str, *, source: int, target: int) -> None:
        """Byte for byte."""
        for memory in self._planes[group]:
            memory[target] = memory[source]

    def advance_state(self, group: str, slot: int, *, codes: Codes, start: int, stop: int) -> None:
        """Take tokens `[start, stop)` into the state in `slot`; what was wrong in it is as wrong afterwards."""
        for plane, memory in enumerate(self._planes[group]):
            before = self._expected_state(group, plane, codes=codes, length=start)
            memory[slot] ^= before ^ self._expected_state(group, plane, codes=codes, length=stop)

    def is_state(self, group: str, slot: int, *, codes: Codes, length: int) -> bool:
        """Whether `slot` holds the state after exactly `length` tokens."""
        return slot != NULL_SLOT and all(
            np.array_equal(memory[slot], self._expected_state(group, plane, codes=codes, length=length))
            for plane, memory in enumerate(self._planes[group])
        )

    def _expected_state(self, group: str, plane: int, *, codes: Codes, length: int) -> _Words:
        if not length:
            return np.zeros(self._planes[group][plane].shape[-1], np.uint64)
        state: _Words = self._expected(group, plane, codes=codes[length - 1 : length])[0]
        return state

    def _places(self, group: str, table: _Table, *, start: int, stop: int) -> tuple[NDArray[np.int64], _Slots]:
        tokens = np.arange(start, stop, dtype=np.int64)
        return tokens, np.asarray(table, np.int32)[tokens // self._blocks[group]]

    def _expected(self, group: str, plane: int, *, codes: Codes) -> _Words:
        memory = self._planes[group][plane]
        index = self.geometry.group_index(group) * _MOST_PLANES + plane
        words = _mixed(np.arange(1, memory.shape[-1] + 1, dtype=np.uint64)) | np.uint64(1)
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
