"""When keys came into an index, roughly: what was missing at some moment and has not come since is missing still.

Duty: spare a search for keys that were searched for in vain a short while ago.

Rules: it may say of a key that has not come that it may have, never the other way round. Nothing is kept before the
first moment is asked for. Nothing grows.

State: the moment, and by some bits of a key the moment in which the last such key came.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from aiokv.core.slot_memory import zeros
from aiokv.model.ids import BoolArray, DigestArray, IntArray

__all__ = ["Arrivals"]

_MOST_PLACES: Final = 1 << 16
"""512 KiB, which stay in the processor's caches. While 8,192 keys come, one key in nine is held to be one of them."""
_WORD: Final = 1
"""The index takes its buckets from the low bits of all words: this one's are as good as any other's."""


@final
class Arrivals:
    """Moments in which keys came."""

    __slots__ = ("_at", "_mask", "_now")

    def __init__(self, capacity: int) -> None:
        """`capacity` is that of the index."""
        places = min(_MOST_PLACES, 1 << capacity.bit_length())
        self._mask: NDArray[np.uint64] = np.array(places - 1, np.uint64)
        self._at: IntArray = np.empty(0, np.int64)
        self._now = 0

    def begin_moment(self) -> int:
        """The moment that ends now: whatever comes from here on comes after it."""
        if not self._now:
            self._at = zeros(int(self._mask) + 1, np.int64)
        self._now += 1
        return self._now - 1

    def note(self, keys: DigestArray) -> None:
        """These come, or are there already."""
        if self._now:
            self._at[self._places(keys)] = self._now

    def may_have_come(self, keys: DigestArray, *, since: int) -> BoolArray:
        """Which of `keys` may have come since that moment."""
        return np.greater(self._at.take(self._places(keys)), since)

    def _places(self, keys: DigestArray) -> IntArray:
        places: IntArray = (keys[:, _WORD] & self._mask).view(np.int64)
        return places
