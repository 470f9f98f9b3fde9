"""Cache events as the core makes them: recorded only while somebody listens, taken by the host after every step.

Rules: an event is written where the index changes, in the order of the changes; every run is dense (law 9). Nothing is
kept for blocks that were registered while nobody listened.
"""

from __future__ import annotations

from typing import final

import numpy as np

from aiokv.core.pool import Evicted
from aiokv.model.events import BlockRemoved, CacheEvent, TierCleared, dense_runs, hashes_of
from aiokv.model.ids import IntArray, Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.spec import CacheGeometry

__all__ = ["EventLog"]


@final
class EventLog:
    """Events that have not been taken yet."""

    __slots__ = ("_events", "_geometry", "is_on")

    def __init__(self, geometry: CacheGeometry) -> None:
        self._geometry = geometry
        self._events: list[CacheEvent] = []
        self.is_on = False

    def take(self) -> list[CacheEvent]:
        """Everything since the last time, oldest first."""
        taken, self._events = self._events, []
        return taken

    def stored(self, tier: Tier, *, keys: BlockKeys, group: int, positions: IntArray) -> None:
        """Blocks at ascending `positions` became findable: one event per dense run."""
        if self.is_on:
            self._events += dense_runs(
                keys,
                tier=tier,
                group=self._geometry.groups[group].name,
                block_size=self._geometry.effective_block_size(group),
                positions=positions,
            )

    def removed(self, tier: Tier, evicted: Evicted) -> None:
        """Keys stopped being findable: one event per group."""
        if self.is_on:
            for group in np.unique(evicted.groups):
                hashes = hashes_of(evicted.keys[evicted.groups == group])
                name = self._geometry.groups[int(group)].name
                self._events.append(BlockRemoved(tier=tier, group=name, block_hashes=hashes))

    def cleared(self, tier: Tier) -> None:
        """Nothing is findable in this tier any more."""
        if self.is_on:
            self._events.append(TierCleared(tier=tier))
