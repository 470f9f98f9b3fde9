"""Prompts of benchmarks: random tokens that follow from a number, and keys in buffers of their own."""

from __future__ import annotations

from itertools import count
from typing import Final, final

import numpy as np

from aiokv.cli.bench.cases import BLOCK
from aiokv.model.keys import BlockKeys
from aiokv.model.tokens import TokenArray

__all__ = ["Prompts", "hashed_keys"]

_VOCABULARY: Final = 150_000


@final
class Prompts:
    """Makes tokens. Equal numbers are equal prompts; a new number is a prompt that was never seen."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers = count(1)

    def new_number(self) -> int:
        """The number of a prompt that was never seen."""
        return next(self._numbers)

    def tokens(self, number: int, *, length: int) -> TokenArray:
        """The first `length` tokens of this prompt."""
        return np.random.default_rng(number).integers(0, _VOCABULARY, length, np.int32)

    def keys(self, number: int, *, length: int) -> BlockKeys:
        """The first `length` tokens of this prompt and their hashes, in buffers that no cache of the processor holds
        because of an earlier use."""
        return hashed_keys(self.tokens(number, length=length))


def hashed_keys(tokens: TokenArray) -> BlockKeys:
    """Keys of these tokens, hashed."""
    keys = BlockKeys(tokens, hash_block_size=BLOCK)
    keys.hash_more(keys.num_blocks)
    return keys
