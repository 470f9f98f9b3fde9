"""Cache events as the core makes them: recorded only while somebody listens, taken by the host after every step.

Rules
- An event is written where the index changes, in the order of the changes; every run is dense (law 9).
- A block that is stored by its hash alone is published with the tokens that its GPU block was published with. If that
  was registered while nobody listened, its tokens are unknown and neither copy is published: the listener has never
  heard of it. Its removal is published all the same.
"""

from __future__ import annotations

from typing import final

import numpy as np

from aiokv.core.block_names import BlockNames, KeyedBlocks
from aiokv.core.counters import Counters, EventRefusal
from aiokv.core.origins import Origins, OriginTable
from aiokv.core.pool import Evicted
from aiokv.model.events import BlockRemoved, CacheEvent, TierCleared, chained_runs, dense_runs, hashes_of
from aiokv.model.ids import SlotArray, Tier
from aiokv.model.spec import CacheGeometry

__all__ = ["EventLog"]


@final
class EventLog:
    """Events that have not been taken yet."""

    __slots__ = ("_counters", "_events", "_geometry", "_is_on", "_origins")

    def __init__(self, geometry: CacheGeometry, *, gpu_slots: int, counters: Counters) -> None:
        sizes = map(geometry.effective_block_size, range(len(geometry.groups)))
        self._geometry = geometry
        self._counters = counters
        self._events: list[CacheEvent] = []
        self._is_on = False
        self._origins = OriginTable(slots=gpu_slots, block_tokens=max(sizes))

    @property
    def is_on(self) -> bool:
        """Whether somebody listens."""
        return self._is_on

    @is_on.setter
    def is_on(self, is_on: bool) -> None:
        if is_on and not self._is_on:
            self._origins.start()
        elif not is_on:
            self._origins.stop()
        self._is_on = is_on

    def take(self) -> list[CacheEvent]:
        """Everything since the last time, oldest first."""
        taken, self._events = self._events, []
        return taken

    def find_origins(self, gpu_slots: SlotArray) -> Origins:
        """What is known of the tokens of the blocks in these GPU slots."""
        return self._origins.find(gpu_slots)

    def stored(self, tier: Tier, slots: SlotArray, *, blocks: BlockNames) -> None:
        """`blocks` became findable in `slots`: one event per dense run."""
        if not self.is_on or not len(blocks):
            return
        name = self._geometry.groups[blocks.group].name
        size = self._geometry.effective_block_size(blocks.group)
        if isinstance(blocks, KeyedBlocks):
            if tier is Tier.GPU:
                self._note_origins(slots, blocks, size=size)
            self._events += dense_runs(blocks.keys, tier=tier, group=name, block_size=size, positions=blocks.positions)
            return
        known = blocks.select(blocks.origins.is_known)
        self._counters.events_refused[EventRefusal.UNKNOWN_TOKENS] += len(blocks) - len(known)
        self._events += chained_runs(
            known.hashes,
            tier=tier,
            group=name,
            parents=known.origins.parents,
            is_first=known.origins.is_first,
            tokens=known.origins.tokens[:, :size],
        )

    def removed(self, tier: Tier, evicted: Evicted) -> None:
        """Keys stopped being findable: one event per group."""
        if self.is_on:
            for group, keys in evicted.by_group():
                name = self._geometry.groups[group].name
                self._events.append(BlockRemoved(tier=tier, group=name, block_hashes=hashes_of(keys)))

    def cleared(self, tier: Tier) -> None:
        """Nothing is findable in this tier any more."""
        if self.is_on:
            self._events.append(TierCleared(tier=tier))

    def _note_origins(self, slots: SlotArray, blocks: KeyedBlocks, *, size: int) -> None:
        first, stop = int(blocks.positions[0]), int(blocks.positions[-1]) + 1
        keys, at = blocks.keys, blocks.positions - first
        tokens = keys.tokens(first * size, stop * size).reshape(-1, size)[at]
        step = size // keys.hash_block_size
        known = keys.digests(step, max(first - 1, 0), stop)
        parents = known[np.maximum(at - int(first == 0), 0)]
        self._origins.note(slots, is_first=blocks.positions == 0, parents=parents, tokens=tokens)
