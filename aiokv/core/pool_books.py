"""A full recount of a pool, beside the pool: what its parts say, compared with each other and with its counts.

Duty: find what is wrong with a pool, and name its state in one digest. Reads the parts that a pool is made of, which
stay the same objects for its life, and changes nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aiokv.core.epoch_index import EpochIndex
from aiokv.core.free_list import FreeList
from aiokv.core.lru import EvictionQueue
from aiokv.core.pool_values import PoolCounts
from aiokv.model.ids import BoolArray

__all__ = ["PoolBooks"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolBooks:
    """The parts of one pool; slots below `first` belong to nobody."""

    first: int
    pins: NDArray[np.int32]
    quarantined: BoolArray
    index: EpochIndex
    queue: EvictionQueue
    free: FreeList

    def fingerprint(self, *, claimed: int) -> str:
        """A digest of pins, keys, eviction order and order of reuse; equal pools print equal. O(capacity)."""
        end = self.free.fresh
        indexed = self.index.indexed_between(0, end).nonzero()[0]
        keys = (indexed, self.index.is_stale(indexed), self.index.key_of(indexed), self.index.group_of(indexed))
        order = (self.queue.peek(len(self.queue), 1 << 62), self.free.returned)
        digest = hashlib.sha256(repr((end, claimed, self.index.epoch)).encode())
        for part in (self.pins[:end], self.quarantined[:end], *keys, *order):
            digest.update(part.tobytes())
        return digest.hexdigest()

    def check_invariants(self, counts: PoolCounts) -> list[str]:
        """Where a full recount and the `counts` of the pool differ, in words; O(capacity)."""
        end = self.free.fresh
        pinned = self.pins[:end] > 0
        indexed = self.index.indexed_between(0, end)
        out = self.quarantined[:end]
        queued = self.queue.queued_between(0, end)
        returned = self.free.returned
        free = np.zeros(end, np.bool_)
        free[returned] = True
        reserved = pinned & ~indexed & ~out
        states = free.astype(np.int8) + reserved + indexed + out
        violated = {
            "a pin count is negative": bool((self.pins < 0).any()),
            "a slot that was never used has a pin": bool(self.pins[end:].any()),
            "a slot is twice on the free stack": int(free.sum()) != len(returned),
            "a free slot has a pin": bool((free & pinned).any()),
            "a slot is in no state or in two": bool((states[self.first :] != 1).any()),
            "the null block is in use": bool(states[: self.first].any()),
            "the evictable slots are not those with a key and no pin": bool((queued != (indexed & ~pinned)).any()),
            "the reserved count is wrong": int(reserved.sum()) != counts.reserved,
            "the quarantined count is wrong": int(out.sum()) != counts.quarantined,
            "there are more claims than slots for them": not 0 <= counts.claimed <= counts.free + counts.evictable,
        }
        found = self.index.check_invariants() + self.queue.check_invariants()
        return found + [text for text, is_violated in violated.items() if is_violated]
