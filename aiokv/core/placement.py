"""Blocks put into a tier, or taken out of it, by name: for tests, demonstrations and warm starts.

Rules: everything goes through the same pools as real traffic; refused calls change nothing.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import final

import numpy as np

from aiokv.core.counters import EvictReason
from aiokv.core.inflight import digests_at
from aiokv.core.pool import Pool
from aiokv.core.world import World
from aiokv.errors import UsageError
from aiokv.model.ids import DigestArray, IntArray, SlotArray, Tier
from aiokv.model.keys import BlockKeys

__all__ = ["Placement"]


@final
class Placement:
    """Makes blocks resident and evicts them."""

    __slots__ = ("_world",)

    def __init__(self, world: World) -> None:
        self._world = world

    def place(self, keys: BlockKeys, *, group: int, positions: IntArray, tier: Tier) -> None:
        """Make the blocks at `positions` findable in `tier`, unpinned; those that are already are touched.

        Takes free slots only and evicts nothing; `UsageError` if there are not enough.
        """
        pool = self._pool(tier)
        wanted = np.unique(positions)
        found = pool.find(self._digests(keys, group=group, positions=wanted), group)
        missing = wanted[~found.present]
        if len(missing) > min(pool.free_count, pool.available):
            raise UsageError(f"{len(missing)} blocks do not fit: {pool.free_count} {tier.value} slots are free")
        pool.touch(found.slots[found.present][::-1])
        pool.claim(len(missing))
        slots = pool.name_claimed(len(missing), scan_limit=0).slots
        self._world.register(tier, slots, keys=keys, group=group, positions=missing)
        pool.unpin(slots[::-1])

    def check_evict(self, keys: BlockKeys, *, group: int, positions: Sequence[int], tier: Tier) -> SlotArray:
        """The slots that `evict` would free. `UsageError` for a block that is pinned or not resident."""
        pool = self._pool(tier)
        wanted = np.unique(np.array(positions, np.int64))
        found = pool.find(self._digests(keys, group=group, positions=wanted), group)
        if not found.present.all():
            absent = reprlib.repr(wanted[~found.present].tolist())
            raise UsageError(f"blocks {absent} of group {group} are not resident in the {tier.value} tier")
        if pool.count_unpinned(found.slots) < len(found.slots):
            raise UsageError(f"some of blocks {reprlib.repr(wanted.tolist())} of group {group} are pinned")
        return found.slots

    def evict(self, keys: BlockKeys, *, group: int, positions: Sequence[int], tier: Tier) -> None:
        """Evict the blocks at `positions` as pressure would; refuses what `check_evict` refuses."""
        slots = self.check_evict(keys, group=group, positions=positions, tier=tier)
        self._world.forget(tier, self._pool(tier).evict(slots), reason=EvictReason.CAPACITY)
        self._world.capacity_generation += 1

    def _digests(self, keys: BlockKeys, *, group: int, positions: IntArray) -> DigestArray:
        self._world.check_keys(keys)
        step = self._world.geometry.hashes_per_block(group)
        blocks = keys.num_blocks // step
        if len(positions) and not (0 <= positions[0] and positions[-1] < blocks):
            named = reprlib.repr(positions.tolist())
            raise UsageError(f"blocks {named} are not among the {blocks} full blocks of the prompt")
        return digests_at(keys, step=step, positions=positions)

    def _pool(self, tier: Tier) -> Pool:
        pool = self._world.pool(tier)
        if pool is None:
            raise UsageError(f"there is no {tier.value} tier")
        return pool
