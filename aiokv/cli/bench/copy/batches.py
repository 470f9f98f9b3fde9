"""What is copied at once, in RAM and on a device: one transfer, whose slots lie as a case wants them."""

from __future__ import annotations

from typing import Final, final

import numpy as np

from aiokv.cli.bench.copy.settings import Adjacency
from aiokv.model.ids import Direction, SlotArray
from aiokv.model.plan import CopyBatch
from aiokv.model.spec import CacheGeometry, FullAttention

__all__ = ["GEOMETRY", "GROUP", "ROOM", "Batches"]

GROUP: Final = "full"
GEOMETRY: Final = CacheGeometry(groups=(FullAttention(GROUP, block_size=16),), hash_block_size=16)
ROOM: Final = 4
"""The arenas are so many times as large as what a round copies, so that it is not in the processor's caches."""


@final
class Batches:
    """Transfers of `blocks` blocks between two pools of `slots` slots each; no slot is the null block."""

    __slots__ = ("_blocks", "_random", "_slots")

    def __init__(self, *, blocks: int, slots: int, random: np.random.Generator) -> None:
        self._blocks = blocks
        self._slots = slots
        self._random = random

    def draw(self, direction: Direction, adjacency: Adjacency) -> CopyBatch:
        """One whose slots lie so."""
        gpu = self._adjacent() if adjacency is Adjacency.ADJACENT else self._anywhere()
        cpu = self._anywhere() if adjacency is Adjacency.SCATTERED else self._adjacent()
        source, target = (gpu, cpu) if direction is Direction.STORE else (cpu, gpu)
        return CopyBatch(direction=direction, group=GROUP, source_blocks=source, target_blocks=target)

    def _adjacent(self) -> SlotArray:
        first = int(self._random.integers(1, self._slots - self._blocks + 1))
        return np.arange(first, first + self._blocks, dtype=np.int64)

    def _anywhere(self) -> SlotArray:
        return (1 + self._random.permutation(self._slots - 1)[: self._blocks]).astype(np.int64)
