"""Where new keys go in the index: the first empty way of the emptiest of the four buckets of each. Pure.

Rules: nothing here knows slots; keys of one batch may be given the same place, the index settles who gets it.

How: the sixteen ways of a key, empty or not, are sixteen bits, and a table says for each pattern which way to take.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiokv.model.ids import IntArray

__all__ = ["AT_ONCE", "EMPTY_TAG", "LOG_WAYS", "WAYS", "WAY_MASK", "Places", "choose_places"]

WAYS: Final = 4
"""Places of a bucket, and buckets of a key."""

AT_ONCE: Final = 2048
"""Keys probed in one go: their arrays stay in the processor's nearer caches."""

# Zero-dimensional arrays: numpy would convert a Python number anew at each call, which costs as much as a short pass.
EMPTY_TAG: Final = np.array(0, np.uint16)
LOG_WAYS: Final = np.array(2)
WAY_MASK: Final = np.array(3)
_PATTERN: Final = np.dtype("<u2")
_ROW_STARTS: Final = np.arange(0, WAYS * AT_ONCE, WAYS)


class Places(NamedTuple):
    """A place for each key of a batch."""

    entries: IntArray
    """`bucket * WAYS + way`."""
    tags: NDArray[np.uint16]
    """What is to be written there."""
    empty: NDArray[np.uint16]
    """The empty ways of the four buckets, as bits; where there is none, the place has no meaning."""


def choose_places(buckets: IntArray, tags: NDArray[np.uint64], *, held: NDArray[np.uint64]) -> Places:
    """A place for each of up to `AT_ONCE` keys: its buckets, its tags and what the buckets hold, each `[n, 4]`."""
    empty = np.packbits(held.view(np.uint16) == EMPTY_TAG, bitorder="little").view(_PATTERN)
    ways = _CHOICE.take(empty).astype(np.int64)
    which = ways >> LOG_WAYS
    which += _ROW_STARTS[: len(which)]
    entries = buckets.ravel().take(which)
    entries <<= LOG_WAYS
    entries |= ways & WAY_MASK
    return Places(entries, tags.ravel().take(which).astype(np.uint16), empty)


def _make_choice() -> NDArray[np.uint8]:
    """Per pattern of sixteen ways, bits that are 1 where one is empty: the first empty one of the emptiest bucket."""
    counts, firsts = np.zeros((2, 1 << WAYS), np.uint8)
    for bits in range(1, 1 << WAYS):
        counts[bits], firsts[bits] = bits.bit_count(), (bits & -bits).bit_length() - 1
    patterns = np.arange(1 << WAYS * WAYS, dtype=np.uint16)
    buckets = np.stack([patterns >> shift & 0xF for shift in range(0, WAYS * WAYS, WAYS)])
    emptiest = counts[buckets].argmax(axis=0)
    ways = firsts[np.take_along_axis(buckets, emptiest[None], axis=0)[0]]
    choice: NDArray[np.uint8] = (emptiest * WAYS + ways).astype(np.uint8)
    return choice


_CHOICE: Final = _make_choice()
