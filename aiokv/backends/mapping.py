"""Memory of exactly the bytes that were asked for: one anonymous mapping, never rounded up, not inherited by forks."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import ConfigError

__all__ = ["Bytes", "Pages", "address_of", "map_bytes", "touch"]

Bytes = NDArray[np.uint8]
"""One-dimensional."""

_TOUCH_STEP: Final = 64 << 20
"""Some 30 to 120 ms: whoever wants the touching to end waits no longer."""


class Pages(Enum):
    """Which pages to ask the system for; the mapping has the same length with both."""

    SMALL = "small"
    HUGE = "huge"
    """Transparent huge pages, where the system has them: scattered small blocks copy up to a third faster."""


def map_bytes(num_bytes: int, *, pages: Pages = Pages.HUGE) -> Bytes:
    """Map so many zeros, none of them touched; freed with the last reference to the array or a view of it.

    Raises `ConfigError` where the system refuses.
    """
    if num_bytes == 0:
        return np.empty(0, dtype=np.uint8)
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot map {num_bytes} bytes for the CPU tier: {error}") from error
    if hasattr(mmap, "MADV_DONTFORK"):
        mapping.madvise(mmap.MADV_DONTFORK)
    advice = "MADV_HUGEPAGE" if pages is Pages.HUGE else "MADV_NOHUGEPAGE"
    if hasattr(mmap, advice):
        with contextlib.suppress(OSError):  # a kernel built without huge pages
            mapping.madvise(getattr(mmap, advice))
    return np.frombuffer(mapping, dtype=np.uint8)


def address_of(memory: NDArray[Any]) -> int:
    """Where the first byte of an array lies."""
    address: int = memory.__array_interface__["data"][0]
    return address


def touch(memory: Bytes) -> Iterator[None]:
    """Have every page of fresh memory given by the system, a step at a time. It is zero and stays so."""
    for start in range(0, len(memory), _TOUCH_STEP):
        memory[start : start + _TOUCH_STEP : mmap.PAGESIZE] = 0
        yield
