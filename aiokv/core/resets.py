"""Resets: a tier answers nothing from one step to the next, its slots come back in slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from aiokv.core.counters import EvictReason
from aiokv.core.hints import Hints
from aiokv.core.slices import Job
from aiokv.core.world import SCAN_LIMIT, World
from aiokv.model.ids import Tier

__all__ = ["Resets"]


@final
class Resets:
    """Forgets what the pools of one cache hold."""

    __slots__ = ("_hints", "_world")

    def __init__(self, world: World, *, hints: Hints) -> None:
        self._world = world
        self._hints = hints

    @property
    def is_sweeping(self) -> bool:
        """Whether slots of a tier that was reset are still to be given back."""
        is_stale = any(pool.stale_count for pool in (self._world.gpu, self._world.cpu) if pool is not None)
        return is_stale or bool(self._world.hints.cleared)

    def reset(self, tiers: Sequence[Tier]) -> None:
        """Begin a new epoch of each tier."""
        world = self._world
        for tier in tiers:
            pool = world.pool(tier)
            if pool is not None:
                world.counters.evicted_blocks[tier, EvictReason.RESET] += pool.resident_count - pool.stale_count
                self._hints.reset(tier)
                world.bump_epoch(pool)
                world.events.cleared(tier)
                world.note_moves(pool.capacity)
                world.slices.append(self._sweeping(tier))

    def _sweeping(self, tier: Tier) -> Job:
        pool = self._world.pool(tier)
        while pool is not None and pool.sweep(SCAN_LIMIT):
            yield
        self._world.capacity_generation += 1
