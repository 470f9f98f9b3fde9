"""What stands for a group in the index: its owner number, and the constant that its keys are mixed with."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import UsageError

__all__ = ["Marks", "marks_of"]

_MAX_GROUP: Final = (1 << 15) - 2


class Marks(NamedTuple):
    """Both as arrays of no dimension, which numpy need not convert at each call."""

    owner: NDArray[np.int16]
    constant: NDArray[np.uint64]


def marks_of(group: int) -> Marks:
    """The constant is splitmix64 of the group, so that one digest lies elsewhere in each; group 0 does without."""
    if not 0 <= group <= _MAX_GROUP:
        raise UsageError(f"group {group} is not in [0, {_MAX_GROUP}]")
    word = group * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return Marks(np.array(group + 1, np.int16), np.array(word ^ word >> 31, np.uint64))
