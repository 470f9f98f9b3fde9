"""Which blocks a group needs for a prefix of L tokens, in absolute block positions.

Rules: pure arithmetic on whole arrays of candidate lengths; no relative positions anywhere (law 6). The table is that
of the contract: a group needs a block iff some query at a position >= L may still read a token of it below L.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never, cast

import numpy as np

from aiokv.model.ids import IntArray
from aiokv.model.spec import CacheGeometry, ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow

__all__ = ["Coverage", "coverage", "coverage_start", "covered_range"]

_Kind = FullAttention | SlidingWindow | ChunkedLocal | RecurrentState


@dataclass(frozen=True, slots=True)
class Coverage:
    """Half-open ranges `[start[i], stop[i])` of block positions, one per candidate length."""

    start: IntArray
    stop: IntArray


def coverage(geometry: CacheGeometry, index: int, lengths: IntArray) -> Coverage:  # noqa: PLR0917  # "of group i for L"
    """The covered blocks of group `index` for each of `lengths` (tokens, multiples of its effective block size)."""
    block = geometry.effective_block_size(index)
    stop = lengths // block
    return Coverage(np.minimum(_start(geometry.groups[index], lengths, block=block), stop), stop)


def covered_range(geometry: CacheGeometry, index: int, length: int) -> range:  # noqa: PLR0917  # like `coverage`
    """The covered blocks of group `index` for a prefix of `length` tokens (a multiple of its effective block size)."""
    stop = length // geometry.block_sizes[index]
    if index in geometry.full_groups:
        return range(stop)
    return range(min(coverage_start(geometry, index, length), stop), stop)


def coverage_start(geometry: CacheGeometry, index: int, length: int) -> int:  # noqa: PLR0917  # like `coverage`
    """The first block that queries at positions >= `length` may still read; `length` need not be aligned."""
    block = geometry.block_sizes[index]
    kind = cast("_Kind", geometry.groups[index])
    match kind:
        case FullAttention():
            return 0
        case SlidingWindow(window=window):
            return max(length - window + 1, 0) // block
        case ChunkedLocal(chunk=chunk):
            return length // chunk * chunk // block
        case RecurrentState():
            return max(length // block - 1, 0)
        case _:
            assert_never(kind)


def _start(group: GroupSpec, lengths: IntArray, *, block: int) -> IntArray:
    kind = cast("_Kind", group)
    match kind:
        case FullAttention():
            return np.zeros_like(lengths)
        case SlidingWindow(window=window):
            return np.maximum(lengths - window + 1, 0) // block
        case ChunkedLocal(chunk=chunk):
            return lengths // chunk * chunk // block
        case RecurrentState():
            return np.maximum(lengths // block - 1, 0)
        case _:
            assert_never(kind)
