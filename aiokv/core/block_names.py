"""What the blocks of a batch are called: by the keys of a request, or by their hashes alone.

Rules: values, taken down when a batch is planned; they name the same blocks whatever becomes of the request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aiokv.core.origins import Origins
from aiokv.model.ids import DIGEST_WORDS, BoolArray, DigestArray, IntArray
from aiokv.model.keys import BlockKeys

__all__ = ["BlockNames", "HashedBlocks", "KeyedBlocks", "digests_at"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyedBlocks:
    """Blocks of one group at ascending block positions of a request's keys: its tokens are known."""

    keys: BlockKeys
    group: int
    positions: IntArray

    def __len__(self) -> int:
        return len(self.positions)

    def digests(self, step: int) -> DigestArray:
        """Their hashes, blocks of `step` hash blocks each."""
        return digests_at(self.keys, step=step, positions=self.positions)

    def select(self, which: slice | BoolArray | IntArray) -> KeyedBlocks:
        """Some of them; the order stays ascending."""
        return KeyedBlocks(keys=self.keys, group=self.group, positions=self.positions[which])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HashedBlocks:
    """Blocks of one group by their hashes: no request need hold them. Their tokens are known where `origins` say so."""

    group: int
    hashes: DigestArray
    origins: Origins

    def __post_init__(self) -> None:
        if len(self.hashes) != len(self.origins):
            raise ValueError(f"{len(self.hashes)} hashes but {len(self.origins)} origins")

    def __len__(self) -> int:
        return len(self.hashes)

    def digests(self, step: int) -> DigestArray:
        """Their hashes: those of whole blocks, whatever `step` is."""
        del step
        return self.hashes

    def select(self, which: slice | BoolArray | IntArray) -> HashedBlocks:
        """Some of them, in the order of `which`."""
        return HashedBlocks(group=self.group, hashes=self.hashes[which], origins=self.origins.select(which))


BlockNames = KeyedBlocks | HashedBlocks


def digests_at(keys: BlockKeys, *, step: int, positions: IntArray) -> DigestArray:
    """Hashes of the blocks at ascending `positions`, blocks of `step` hash blocks each."""
    if not len(positions):
        return np.zeros((0, DIGEST_WORDS), np.uint64)
    first = int(positions[0])
    rows = keys.digests(step, first, int(positions[-1]) + 1)
    return rows if len(rows) == len(positions) else rows.take(positions - first, axis=0)
