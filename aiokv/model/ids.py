"""Names of places: tiers, directions and the array types in which slots and digests travel.

A slot is an `int` in `[0, capacity)` of one pool. GPU slot 0 is the *null block*: never allocated, zero-filled,
and what a block table holds at a skipped position. Digests are 32 bytes, kept as rows of four `uint64`.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DIGEST_BYTES",
    "DIGEST_WORDS",
    "NULL_SLOT",
    "BoolArray",
    "DigestArray",
    "Direction",
    "IntArray",
    "KeyEnum",
    "SlotArray",
    "TableArray",
    "Tier",
]

NULL_SLOT: Final = 0
DIGEST_BYTES: Final = 32
DIGEST_WORDS: Final = 4

SlotArray = NDArray[np.int32] | NDArray[np.int64]
"""Slots, shape `[n]`. The core uses `int64`, which saves numpy a conversion at each gather and scatter."""
TableArray = NDArray[np.int32]
"""Slots at rest, in block tables and in what is kept per slot, shape `[n]`: half the memory."""
IntArray = NDArray[np.int64]
"""Positions or lengths, shape `[n]`."""
BoolArray = NDArray[np.bool_]
DigestArray = NDArray[np.uint64]
"""Block hashes, shape `[n, 4]`: 32 bytes a row, in the machine's byte order."""


class KeyEnum(Enum):
    """An enumeration whose members are keys of dictionaries on hot paths.

    They hash as objects do, in C: `Enum.__hash__` is a Python function of the name and costs more than the look-up.
    """

    __hash__ = object.__hash__


class Tier(KeyEnum):
    """Where a block lives."""

    GPU = "gpu"
    CPU = "cpu"


class Direction(KeyEnum):
    """Which way a transfer copies: a load is CPU to GPU, a store is GPU to CPU."""

    LOAD = "load"
    STORE = "store"

    @property
    def source_tier(self) -> Tier:
        """Where it reads."""
        return Tier.CPU if self is Direction.LOAD else Tier.GPU

    @property
    def target_tier(self) -> Tier:
        """Where it writes."""
        return Tier.GPU if self is Direction.LOAD else Tier.CPU
