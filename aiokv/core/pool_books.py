"""The books of a pool, beside the pool: what its parts say of each slot, compared with each other and with its counts.

Duty: tell the facts of slots, find what is wrong with a pool, name its state in one digest. Reads the parts that a pool
is made of, which stay the same objects for its life, and changes nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aiokv.core import slot_facts
from aiokv.core.epoch_index import EpochIndex
from aiokv.core.free_list import FreeList
from aiokv.core.lru import EvictionQueue
from aiokv.core.pool_values import PoolCounts
from aiokv.core.slot_facts import count_patterns, find_broken_rules, find_wrong_counts
from aiokv.model.ids import BoolArray, SlotArray

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

    def __len__(self) -> int:
        """One more than the largest slot."""
        return len(self.pins)

    def find_facts(self, slots: SlotArray, *, stacked: NDArray[np.int8]) -> NDArray[np.uint16]:
        """The pattern of each of `slots`, of which `stacked[i]` tells how often it lies on the free stack."""
        pins = self.pins.take(slots)
        facts = np.zeros(len(slots), np.uint16)
        for fact, is_so in (
            (slot_facts.PINNED, pins != 0),
            (slot_facts.NEGATIVE, pins < 0),
            (slot_facts.INDEXED, self.index.is_indexed(slots)),
            (slot_facts.STALE, self.index.is_stale(slots)),
            (slot_facts.ASTRAY, self.index.is_astray(slots)),
            (slot_facts.QUEUED, self.queue.is_queued(slots)),
            (slot_facts.MISPLACED, self.queue.is_misplaced(slots)),
            (slot_facts.OUT, self.quarantined.take(slots)),
            (slot_facts.STACKED, stacked > 0),
            (slot_facts.STACKED_TWICE, stacked > 1),
            (slot_facts.UNUSED, (slots < self.first) | (slots >= self.free.fresh)),
        ):
            facts |= is_so * np.uint16(fact)
        return facts

    def peek_holdings(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Of each slot in `[start, stop)` the sum of 1 if it has a key, 2 if it has a pin, 4 if it is out of use.

        From any thread.
        """
        holdings: NDArray[np.uint8] = self.index.indexed_between(start, stop).view(np.uint8)
        holdings |= np.not_equal(self.pins[start:stop], 0).view(np.uint8) << 1
        holdings |= self.quarantined[start:stop].view(np.uint8) << 2
        return holdings

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
        stacked = np.bincount(self.free.returned, minlength=len(self)).astype(np.int8)
        facts = self.find_facts(np.arange(len(self)), stacked=stacked)
        slots = count_patterns(np.bincount(facts))
        found = find_broken_rules(slots) + find_wrong_counts(slots, counts)
        return found + self.index.check_invariants() + self.queue.check_invariants()
