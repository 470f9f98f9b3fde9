"""Memory for what is kept per slot: touched a small page at a time, and not before it is used.

numpy asks the system for huge pages where an array is large. The first touch of each then clears 2 MiB in one hold,
0.5 to 3 ms of the loop's thread in the midst of a call that writes a few bytes (law 8), and a pool that is hardly used
takes whole huge pages of every array. Small pages cost a batch of 1,024 slots some microseconds when it is used first.
What is read at random, the buckets of the index, keeps huge pages and is touched beforehand.
"""

from __future__ import annotations

import mmap
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["zeros"]

_HUGE_PAGE: Final = 1 << 21


def zeros(size: int, dtype: type[np.generic]) -> NDArray[Any]:
    """An array of so many zeros, as `np.zeros`; writable, one-dimensional."""
    num_bytes = size * np.dtype(dtype).itemsize
    if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(size, dtype)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    except OSError:  # a kernel that has none, or no room: then numpy says so as it does elsewhere, by a MemoryError
        return np.zeros(size, dtype)
    return np.frombuffer(memory, dtype)
