"""The LAZY store policy: copy blocks shortly before the GPU evicts them.

Duty: keep a target of slots ahead of the allocator that cost nothing to take: free ones, and evictable ones that have a
copy in the CPU tier. A walk starts at the cold end of the eviction queue and queues a store for every block there that
has none, until the target is covered.

Rules
- The target is the larger of a fraction of the GPU pool and of the most slots that one recent admission has claimed (it
  fades by an eighth with every admission after); at most 16,384, what one walk can look at, and at most the CPU tier.
- Every walk begins at the cold end anew and holds no place in the queue, so blocks may move under it. A stored block
  returns to its place, unless a request has hit it meanwhile: copying a block does not make it recent.
- Walks follow from what others do to the GPU pool or to the CPU tier, never from the end of a store; so a store that
  fails is tried again with the next activity, and a drain ends.
- A walk covers a quarter more than the target and is due again when that may be used up, or with the next change if it
  found too few: a few lookups per block evicted, whatever the size of the pool.
- A lease has no backlog here: what it leaves behind is copied when it gets cold, behind the fence of its slots.

State: the fading peak of claims, and how far the pool had moved when the last walk began.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np

from aiokv.core.inflight import SourceUse
from aiokv.core.lease_table import LeaseRecord
from aiokv.core.offers import Offer
from aiokv.core.planner import AcquirePlan
from aiokv.core.slices import Job
from aiokv.core.store_queue import StoreOrder, StoreQueue
from aiokv.core.world import SCAN_LIMIT, World
from aiokv.model.ids import SlotArray

__all__ = ["LazyWalk"]

_SLACK: Final = 4
"""One part in so many is covered beyond the target."""
_FADING: Final = 8
_SCANS: Final = 4


@final
class LazyWalk:
    """Copies what is next to be evicted."""

    __slots__ = ("_fell_short", "_fraction", "_is_walking", "_peak", "_queue", "_seen_moves", "_world")

    def __init__(self, world: World, *, queue: StoreQueue, fraction: float) -> None:
        self._world = world
        self._queue = queue
        self._fraction = fraction
        self._peak = 0
        self._seen_moves = 0
        self._fell_short = True
        self._is_walking = False

    @property
    def is_due(self) -> bool:
        """Whether a walk may find something to copy."""
        world = self._world
        if self._is_walking or not world.has_cpu_tier:
            return False
        moves = world.gpu_moves - self._seen_moves
        return bool(world.gone_copies) or moves > (0 if self._fell_short else self.target // _SLACK)

    @property
    def target(self) -> int:
        """Slots to keep free or copied ahead of the allocator."""
        cpu = self._world.usable_cpu
        wanted = max(int(self._world.gpu.capacity * self._fraction), self._peak, 1)
        return min(wanted, SCAN_LIMIT, cpu.capacity) if cpu is not None else 0

    def admitted(self, record: LeaseRecord, plan: AcquirePlan) -> None:
        """A request was let in: as much may be claimed at once again."""
        del record
        self._peak = max(plan.claims, self._peak - self._peak // _FADING)

    def offer(self, offer: Offer) -> None:
        """Nothing: a block that was just confirmed is far from eviction."""

    def flush(self, record: LeaseRecord) -> Job:
        """Nothing: what the lease leaves behind is copied when it gets cold."""
        del record
        yield from ()

    def work(self) -> Job:
        """Walk once, a slice at a time; nothing is due until that has ended."""
        self._is_walking = True
        return self._walk()

    def _walk(self) -> Job:
        world = self._world
        self._seen_moves = world.gpu_moves
        world.gone_copies.clear()
        world.gpu.trim(_SCANS * SCAN_LIMIT)
        missing = self._count_missing()
        coldest = world.gpu.find_coldest(missing, _SCANS * SCAN_LIMIT)
        self._fell_short = len(coldest) < missing
        for start in range(0, len(coldest), world.slice_blocks):
            if start:
                yield
            while world.has_cpu_tier and self._cover(coldest[start : start + world.slice_blocks]):
                yield
        self._is_walking = False

    def _count_missing(self) -> int:
        """How many of the coldest slots must have a copy."""
        gpu, target = self._world.gpu, self.target
        ahead = gpu.free_count - gpu.claimed_count + self._world.inflight.cold_blocks
        return max(target + target // _SLACK - ahead, 0)

    def _cover(self, slots: SlotArray) -> bool:
        """Queue stores for those of `slots` that are still evictable and have no copy; whether some wait for a slice
        that looks for slots further on.
        """
        is_left = False
        gpu = self._world.gpu
        groups = gpu.group_of(slots)
        is_idle = (groups >= 0) & (gpu.pins_of(slots) == 0)
        for group in np.unique(groups[is_idle]).tolist():
            mine = slots[is_idle & (groups == group)]
            digests = gpu.key_of(mine)
            wanted = self._queue.sift(digests[::-1], group=group, slots=mine[::-1]).is_wanted[::-1]
            if wanted.any():
                is_left |= self._put(mine[wanted], group=group)
        return is_left

    def _put(self, slots: SlotArray, *, group: int) -> bool:
        digests = self._world.gpu.key_of(slots)
        order = StoreOrder(
            blocks=self._queue.hashed(digests, group=group, slots=slots),
            sources=slots,
            epochs=self._world.epochs,
            use=SourceUse.COLD,
        )
        return len(self._queue.put(order).sources) > 0
