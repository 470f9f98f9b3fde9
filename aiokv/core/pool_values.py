"""What a pool takes and answers with: groups, epochs, evicted keys, named slots, counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiokv.model.ids import DigestArray, IntArray, KeyEnum

__all__ = ["NOTHING_EVICTED", "Epochs", "Evicted", "GroupArray", "NamedSlots", "PoolCounts", "SlotState", "take_joined"]

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

    def by_group(self) -> Iterator[tuple[int, DigestArray]]:
        """The keys of each group that there are any of; most often all are of one."""
        if len(self) and np.count_nonzero(self.groups == self.groups[0]) == len(self):
            yield int(self.groups[0]), self.keys
            return
        for group in np.unique(self.groups).tolist():
            yield group, self.keys[self.groups == group]


def take_joined(batches: deque[Evicted], *, limit: int) -> Evicted:
    """Take the oldest batches, one at least, and as many as have `limit` keys together, as one."""
    taken = [batches.popleft()]
    size = len(taken[0])
    while batches and size + len(batches[0]) <= limit:
        size += len(batches[0])
        taken.append(batches.popleft())
    if len(taken) == 1:
        return taken[0]
    return Evicted(np.concatenate([b.keys for b in taken]), np.concatenate([b.groups for b in taken]))


NOTHING_EVICTED: Final = Evicted(np.empty((0, 4), np.uint64), np.empty(0, np.int16))


class NamedSlots(NamedTuple):
    """Claims turned into reserved slots, each pinned once, and the keys that were evicted for them."""

    slots: IntArray
    evicted: Evicted


class SlotState(KeyEnum):
    """What a slot is; each is in one state. Each is a metric label."""

    FREE = "free"
    RESERVED = "reserved"
    RESIDENT = "resident"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """How many slots are in each state; the first four sum to the capacity."""

    free: int
    reserved: int
    resident: int
    quarantined: int
    evictable: int
    claimed: int

    def by_state(self) -> dict[SlotState, int]:
        """Slots by the state they are in."""
        return {
            SlotState.FREE: self.free,
            SlotState.RESERVED: self.reserved,
            SlotState.RESIDENT: self.resident,
            SlotState.QUARANTINED: self.quarantined,
        }
