"""The keys of an index that found all their buckets full: next to none, unless keys are chosen to collide."""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from aiokv.model.ids import IntArray

__all__ = ["Stash"]

_WORD_BYTES: Final = 8


@final
class Stash:
    """A dict from key (digest and owner, as bytes) to node, with the sorted first words to pass misses by."""

    __slots__ = ("_words", "nodes")

    def __init__(self) -> None:
        self.nodes: dict[bytes, int] = {}
        """Read it, never write."""
        self._words: NDArray[np.uint64] = np.empty(0, np.uint64)

    def find_candidates(self, words: NDArray[np.uint64]) -> IntArray:
        """Where among the first words of keys those are that a stashed key has, too."""
        nearest = self._words.take(self._words.searchsorted(words), mode="clip")
        candidates: IntArray = (nearest == words).nonzero()[0]
        return candidates

    def put(self, keys: list[bytes], nodes: list[int]) -> list[int]:
        """Stash keys. Returns the nodes of those that are stashed already, which keep the node that they have."""
        repeated = [node for key, node in zip(keys, nodes, strict=True) if self.nodes.setdefault(key, node) != node]
        self._sort()
        return repeated

    def move(self, key: bytes, *, node: int) -> None:
        """A stashed key has another node now."""
        self.nodes[key] = node

    def remove(self, keys: list[bytes]) -> None:
        """Take stashed keys out."""
        for key in keys:
            del self.nodes[key]
        self._sort()

    def _sort(self) -> None:
        words = b"".join([key[:_WORD_BYTES] for key in self.nodes])
        self._words = np.sort(np.frombuffer(words, np.uint64))
