"""What a pool takes and answers with: slots, epochs, evicted keys, named slots, counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiokv.model.ids import DigestArray, IntArray

__all__ = ["NOTHING_EVICTED", "Epochs", "Evicted", "GroupArray", "NamedSlots", "PoolCounts"]

GroupArray = NDArray[np.int16]
"""Group indices, shape `[n]`."""


@dataclass(frozen=True, slots=True)
class Epochs:
    """How often the pool of each tier was reset, at one moment: when a lease was admitted, or a store was planned."""

    gpu: int
    cpu: int


@dataclass(frozen=True, slots=True, eq=False)
class Evicted:
    """Keys that stopped being findable: `keys[i]` (shape `[k, 4]`) of group `groups[i]`."""

    keys: DigestArray
    groups: GroupArray

    def __len__(self) -> int:
        return len(self.groups)


NOTHING_EVICTED: Final = Evicted(np.empty((0, 4), np.uint64), np.empty(0, np.int16))


class NamedSlots(NamedTuple):
    """Claims turned into reserved slots, each pinned once, and the keys that were evicted for them."""

    slots: IntArray
    evicted: Evicted


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """How many slots are in each state; the first four sum to the capacity."""

    free: int
    reserved: int
    resident: int
    quarantined: int
    evictable: int
    claimed: int

    def by_state(self) -> dict[str, int]:
        """The four states that every slot is in one of."""
        return {
            "free": self.free,
            "reserved": self.reserved,
            "resident": self.resident,
            "quarantined": self.quarantined,
        }
