"""Cache events: what became findable, what stopped being findable, and what a slow subscriber missed.

Rule (law 9): an event about blocks is a dense run. `BlockStored` cannot be built unless its tokens are exactly those
of its hashes, in one group and one tier, with one parent; `dense_runs` and, for blocks without a request,
`chained_runs` are the only places that cut a registration into runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aiokv.model.ids import DIGEST_BYTES, BoolArray, DigestArray, IntArray, Tier
from aiokv.model.keys import BlockKeys

__all__ = [
    "BlockRemoved",
    "BlockStored",
    "CacheEvent",
    "EventsDropped",
    "TierCleared",
    "chained_runs",
    "dense_runs",
    "hashes_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A run of adjacent blocks of one group became findable in one tier.

    `token_ids` are the tokens of exactly these blocks, `block_size` tokens each; `parent_hash` is the hash of the block
    before the run, `None` only for a run that starts at position 0.
    """

    tier: Tier
    group: str
    parent_hash: bytes | None
    block_hashes: tuple[bytes, ...]
    token_ids: tuple[int, ...]
    block_size: int

    def __post_init__(self) -> None:
        if not self.block_hashes or len(self.token_ids) != len(self.block_hashes) * self.block_size:
            hashes, tokens = len(self.block_hashes), len(self.token_ids)
            raise ValueError(f"{hashes} hashes of {self.block_size} tokens are no dense run of {tokens} tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks of one group stopped being findable in one tier."""

    tier: Tier
    group: str
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCleared:
    """Nothing is findable in this tier any more."""

    tier: Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsDropped:
    """The subscriber was too slow: so many events are missing at this place. Its picture is no longer complete."""

    count: int


CacheEvent = BlockStored | BlockRemoved | TierCleared | EventsDropped


def dense_runs(
    keys: BlockKeys, *, tier: Tier, group: str, block_size: int, positions: IntArray
) -> Iterator[BlockStored]:
    """One event per run of adjacent blocks among ascending `positions` (block positions of `block_size` tokens)."""
    step = block_size // keys.hash_block_size
    for run in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
        if not len(run):
            continue
        first, stop = int(run[0]), int(run[-1]) + 1
        hashes = hashes_of(keys.digests(step, max(first - 1, 0), stop))
        yield BlockStored(
            tier=tier,
            group=group,
            parent_hash=hashes[0] if first else None,
            block_hashes=hashes[1:] if first else hashes,
            token_ids=tuple(keys.tokens(first * block_size, stop * block_size).tolist()),
            block_size=block_size,
        )


def chained_runs(
    hashes: DigestArray,
    *,
    tier: Tier,
    group: str,
    parents: DigestArray,
    is_first: BoolArray,
    tokens: NDArray[np.int32],
) -> Iterator[BlockStored]:
    """One event per run of blocks each of which is the parent of the next: known by hash, parent's hash and tokens.

    `parents[i]` has no meaning where `is_first[i]`; `tokens` has shape `[n, block size]`.
    """
    continues = (parents[1:] == hashes[:-1]).all(axis=1) & ~is_first[1:]
    for run in np.split(np.arange(len(hashes)), np.flatnonzero(~continues) + 1):
        if not len(run):
            continue
        first, stop = int(run[0]), int(run[-1]) + 1
        yield BlockStored(
            tier=tier,
            group=group,
            parent_hash=None if is_first[first] else parents[first].tobytes(),
            block_hashes=hashes_of(hashes[first:stop]),
            token_ids=tuple(tokens[first:stop].ravel().tolist()),
            block_size=tokens.shape[1],
        )


def hashes_of(digests: DigestArray) -> tuple[bytes, ...]:
    """Rows of a digest array as bytes."""
    flat = digests.tobytes()
    return tuple(flat[i : i + DIGEST_BYTES] for i in range(0, len(flat), DIGEST_BYTES))
