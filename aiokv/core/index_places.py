"""Where new keys go in the index: the first empty way of the emptiest of the four buckets of each. Pure.

Rules: nothing here knows slots; keys of one batch may be given the same place, the index settles who gets it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiokv.model.ids import IntArray

__all__ = ["AT_ONCE", "EMPTY_TAG", "LOG_WAYS", "WAYS", "Places", "choose_places"]

WAYS: Final = 4
"""Places of a bucket, and buckets of a key."""

AT_ONCE: Final = 2048
"""Keys probed in one go: their arrays stay in the processor's nearer caches."""

# Zero-dimensional arrays: numpy would convert a Python number anew at each call, which costs as much as a short pass.
EMPTY_TAG: Final = np.array(0, np.uint16)
LOG_WAYS: Final = np.array(2)
_BYTE_SUM: Final = np.array(0x01010101, np.uint32)
_BYTE_BITS: Final = np.array(0x01020408, np.uint32)
"""A factor that gathers four bytes of 0 or 1 as four bits of the top byte."""
_TOP_BYTE: Final = np.array(24, np.uint32)
_FIRST_BIT: Final[IntArray] = np.array([0, *((bits & -bits).bit_length() - 1 for bits in range(1, 16))])
_ROW_STARTS: Final = np.arange(0, WAYS * AT_ONCE, WAYS)


class Places(NamedTuple):
    """A place for each key of a batch."""

    entries: IntArray
    """`bucket * WAYS + way`; without meaning where there is no room."""
    tags: NDArray[np.uint16]
    """What is to be written there."""
    ways: NDArray[np.uint32]
    """The empty ways of the bucket, as bits; 0 where none of the four buckets has one."""


def choose_places(buckets: IntArray, tags: NDArray[np.uint64], *, held: NDArray[np.uint64]) -> Places:
    """A place for each of up to `AT_ONCE` keys: its buckets, its tags and what the buckets hold, each `[n, 4]`."""
    empty = (held.view(np.uint16) == EMPTY_TAG).view(np.uint32)  # a byte for each way
    room = empty * _BYTE_SUM
    room >>= _TOP_BYTE
    choice = room.argmax(axis=1)
    choice += _ROW_STARTS[: len(choice)]
    ways = empty.ravel().take(choice)
    entries = buckets.ravel().take(choice)
    entries <<= LOG_WAYS
    ways *= _BYTE_BITS
    ways >>= _TOP_BYTE
    entries += _FIRST_BIT.take(ways)
    return Places(entries, tags.ravel().take(choice).astype(np.uint16), ways)
