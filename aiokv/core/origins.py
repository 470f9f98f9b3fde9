"""Which tokens the blocks in GPU slots stand for, so that a block can be published when no request names it any more.

Rules
- Kept only while somebody listens to cache events: 4 bytes per token and 37 per slot, allocated when first needed.
- A block that was registered while nobody listened has no origin: its tokens are unknown until it is registered again.

State: per GPU slot the tokens of the block registered there last, the hash before it, and in which round of listening.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from aiokv.core.slot_memory import zeros
from aiokv.model.ids import DIGEST_WORDS, BoolArray, DigestArray, IntArray, SlotArray

__all__ = ["OriginTable", "Origins"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origins:
    """Per block, where `is_known`: its tokens (a row of at least a block), and the parent's hash unless `is_first`."""

    is_known: BoolArray
    is_first: BoolArray
    parents: DigestArray
    tokens: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.is_known)

    def select(self, which: slice | BoolArray | IntArray) -> Origins:
        """Some of them, in the order of `which`."""
        return Origins(
            is_known=self.is_known[which],
            is_first=self.is_first[which],
            parents=self.parents[which],
            tokens=self.tokens[which],
        )


@final
class OriginTable:
    """Origins by GPU slot; `block_tokens` is the size of the largest block."""

    __slots__ = ("_block_tokens", "_is_first", "_is_listening", "_parents", "_round", "_rounds", "_slots", "_tokens")

    def __init__(self, *, slots: int, block_tokens: int) -> None:
        self._slots = slots
        self._block_tokens = block_tokens
        self._round = 0
        self._is_listening = False
        self._allocate(0)

    def start(self) -> None:
        """Somebody listens: note origins from now on. What was noted in an earlier round is forgotten, in O(1)."""
        self._is_listening = True
        self._round += 1
        if not len(self._rounds):
            self._allocate(self._slots)

    def stop(self) -> None:
        """Nobody listens any more."""
        self._is_listening = False

    def note(self, slots: SlotArray, *, is_first: BoolArray, parents: DigestArray, tokens: NDArray[np.int32]) -> None:
        """These blocks have just been registered in `slots`; `tokens` has one row for each."""
        self._rounds[slots] = self._round
        self._is_first[slots] = is_first
        self._parents[slots] = parents
        self._tokens[slots, : tokens.shape[1]] = tokens

    def find(self, slots: SlotArray) -> Origins:
        """What is known of the blocks that are registered in `slots` now."""
        if not self._is_listening:
            return _unknown(len(slots))
        return Origins(
            is_known=self._rounds[slots] == self._round,
            is_first=self._is_first[slots],
            parents=self._parents[slots],
            tokens=self._tokens[slots],
        )

    def _allocate(self, slots: int) -> None:
        self._rounds: NDArray[np.int32] = zeros(slots, np.int32)
        self._is_first: BoolArray = zeros(slots, np.bool_)
        self._parents: DigestArray = zeros(slots * DIGEST_WORDS, np.uint64).reshape(slots, DIGEST_WORDS)
        self._tokens: NDArray[np.int32] = zeros(slots * self._block_tokens, np.int32).reshape(slots, self._block_tokens)


def _unknown(count: int) -> Origins:
    return Origins(
        is_known=np.zeros(count, np.bool_),
        is_first=np.zeros(count, np.bool_),
        parents=np.zeros((count, DIGEST_WORDS), np.uint64),
        tokens=np.zeros((count, 0), np.int32),
    )
