"""How often blocks were seen lately, in bounded memory: what the selective store policy asks.

Duty: answer "was this hash seen at least n times?" for batches of hashes. A block that was seen n times within the last
window of sightings is never answered with less; a rarer one is answered with more about once in thirty times, which
costs a copy and nothing else.

Rules: memory is fixed at the start and no call costs more than its own batch. Hashes are uniform already, so that their
words are the hash functions.

State: two generations of counters (a count-min sketch of three rows in one array, updated conservatively); when the
young one has taken a window of them it becomes the old one, and what the old one knew is forgotten.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from aiokv.model.ids import DigestArray

__all__ = ["MAX_COUNT", "Sightings"]

MAX_COUNT: Final = 255
"""Counters end here."""

_ROWS: Final = 3
_CELLS_PER_SIGHTING: Final = 8
_LEAST_WINDOW: Final = 1 << 12
_LARGEST_WINDOW: Final = 1 << 19
"""4 MiB per generation: more would be felt when a generation is dropped."""


@final
class Sightings:
    """Counts of hashes."""

    __slots__ = ("_mask", "_old", "_taken", "_window", "_young")

    def __init__(self, blocks: int) -> None:
        """`blocks` are the slots of all tiers: the window is at least as large, within 4,096 and 524,288 sightings."""
        wanted = min(max(blocks, _LEAST_WINDOW), _LARGEST_WINDOW)
        self._window = 1 << (wanted - 1).bit_length()
        cells = _CELLS_PER_SIGHTING * self._window
        self._mask = np.uint64(cells - 1)
        self._young: NDArray[np.uint8] = np.zeros(cells, np.uint8)
        self._old: NDArray[np.uint8] = np.zeros(cells, np.uint8)
        self._taken = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the counters, in bytes; it never changes."""
        return self._young.nbytes + self._old.nbytes

    def count(self, digests: DigestArray) -> NDArray[np.int64]:
        """Each of `digests` (distinct, shape `[n, 4]`) was seen once more: how often that is lately."""
        if self._taken >= self._window:
            self._old, self._young = self._young, np.zeros_like(self._young)
            self._taken = 0
        self._taken += len(digests)
        cells = (digests[:, :_ROWS] & self._mask).astype(np.int64)
        young = self._young[cells].astype(np.int64)
        raised: NDArray[np.int64] = np.minimum(young.min(axis=1) + 1, MAX_COUNT)
        np.maximum.at(self._young, cells, raised[:, None].astype(np.uint8))
        raised += self._old[cells].min(axis=1)
        return raised
