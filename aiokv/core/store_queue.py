"""Stores on their way: which blocks still want a copy, and the transfers that make it.

Rules
- A block is copied at most once at a time, and never if it has a copy. Whoever wants one that is being copied joins
  that store: it is dropped only if all who want it leave before it is submitted.
- Sources that nobody holds are pinned only as far as admitted requests have not been promised their slots.
- A CPU block is findable only after its copy ended well in the current epochs (law 3), under the names taken down when
  the store was planned.
"""

from __future__ import annotations

from typing import NamedTuple, final

import numpy as np

from aiokv.core.block_names import BlockNames, HashedBlocks
from aiokv.core.inflight import NOBODY, SourceUse, Transfer
from aiokv.core.lease_table import LeaseRecord
from aiokv.core.masks import has_any, is_all
from aiokv.core.pool_values import Epochs
from aiokv.core.slices import Job
from aiokv.core.world import World
from aiokv.model.ids import BoolArray, DigestArray, Direction, IntArray, SlotArray
from aiokv.model.plan import DeclineReason, Outcome

__all__ = ["Sifted", "StoreOrder", "StoreQueue"]


class Sifted(NamedTuple):
    """What is known of GPU blocks that may be stored, one mask each."""

    is_current: BoolArray
    """Findable in this very slot."""
    has_copy: BoolArray
    store_ids: IntArray
    """The store that reads this slot; 0 where none does."""

    @property
    def are_wanted(self) -> bool:
        """Whether all of them are worth a copy."""
        return is_all(self.is_current) and not has_any(self.has_copy) and not np.count_nonzero(self.store_ids)

    @property
    def is_wanted(self) -> BoolArray:
        """Worth a copy: findable, without one, and none is being made."""
        return self.is_current & ~self.has_copy & np.equal(self.store_ids, 0)

    @property
    def is_cached(self) -> BoolArray:
        """Has a copy."""
        return self.is_current & self.has_copy

    @property
    def is_storing(self) -> BoolArray:
        """A copy is being made."""
        return self.is_current & ~self.has_copy & np.not_equal(self.store_ids, 0)


class StoreOrder(NamedTuple):
    """Blocks to copy from the GPU slots `sources`, the most wanted first.

    `owner` is the lease that asks for them: if it leaves before they are submitted, and nobody has joined, they are
    dropped. `epochs` are those in which the blocks were valid.
    """

    blocks: BlockNames
    sources: SlotArray
    epochs: Epochs
    owner: int = NOBODY
    use: SourceUse = SourceUse.USED

    def select(self, which: slice | BoolArray) -> StoreOrder:
        """Some of its blocks, in the order of `which`."""
        return self._replace(blocks=self.blocks.select(which), sources=self.sources[which])


@final
class StoreQueue:
    """Plans, queues and completes stores for whichever policy is in force."""

    __slots__ = ("_world",)

    def __init__(self, world: World) -> None:
        self._world = world

    def sift(self, digests: DigestArray, *, group: int, slots: SlotArray) -> Sifted:
        """Look GPU blocks up in both tiers; those that have a copy are touched there, the last of them first."""
        is_current = self._world.gpu.holds(slots, digests, group=group)
        known = slots if np.count_nonzero(is_current) == len(slots) else None
        return Sifted(
            is_current=is_current,
            has_copy=self._touch_copies(digests, group=group, known=known),
            store_ids=self._world.inflight.storing_ids(slots),
        )

    def _touch_copies(self, digests: DigestArray, *, group: int, known: SlotArray | None) -> BoolArray:
        """Which blocks have a copy; it is recent now. In the GPU slots `known` they can be found, all of them."""
        cpu = self._world.cpu
        if cpu is None:
            return np.zeros(len(digests), np.bool_)
        found = cpu.find(digests, group) if known is None else self._world.gpu.find_copies(known, among=cpu)
        copies = found.slots[found.present]
        if len(copies):
            cpu.touch(copies[::-1])
        return found.present

    def hashed(self, digests: DigestArray, *, group: int, slots: SlotArray) -> HashedBlocks:
        """The names of blocks in GPU slots, whoever computed them."""
        return HashedBlocks(group=group, hashes=digests, origins=self._world.events.find_origins(slots))

    def put(self, order: StoreOrder) -> StoreOrder:
        """Reserve CPU slots for as many blocks as fit, the most wanted first, and queue their copies.

        Returns what is left for a later slice: there are slots for these, behind more entries of the eviction queue
        than one slice looks at. Each call passes some of them for good, so that it ends.
        """
        world = self._world
        if len(order.sources) > world.gpu.available:
            may_pin = np.cumsum(world.gpu.pins_of(order.sources) == 0) <= world.gpu.available
            self.skip(np.count_nonzero(~may_pin), DeclineReason.BACKPRESSURE)
            order = order.select(may_pin)
        targets = world.reserve_cpu(len(order.sources))
        later = order.select(slice(0, 0))
        if len(targets) < len(order.sources):
            stop = min(len(targets) + world.available_cpu, len(order.sources))
            self.skip(len(order.sources) - stop, DeclineReason.POOL_FULL)
            later = order.select(slice(len(targets), stop))
            order = order.select(slice(0, len(targets)))
        if len(targets):
            if order.use is SourceUse.COLD:  # the tail of a prefix is evicted first; a transfer begins with its head
                order = order.select(slice(None, None, -1))
            self._queue(order, targets)
        return later

    def join(self, record: LeaseRecord, slots: SlotArray) -> None:
        """A lease wants the copies that are being made of these GPU slots, whoever began them.

        A store that no lease asked for is never dropped, so there is nothing to join.
        """
        world = self._world
        for transfer_id in np.unique(world.inflight.storing_ids(slots)).tolist() if len(slots) else ():
            transfer = world.inflight.find(transfer_id)
            if transfer.waiters:
                world.inflight.join(transfer, record.lease_id)
                record.storing.add(transfer_id)

    def complete(self, transfer: Transfer, outcome: Outcome) -> Job:
        """The copies of a store have ended: register slice by slice, give every pin back, then tell who wants it."""
        leases = self._world.leases
        yield from self._world.ending(transfer, outcome)
        for lease_id in transfer.waiters:
            if lease_id in leases:
                leases.find(lease_id).storing.discard(transfer.transfer_id)
        self._world.inflight.remove(transfer)

    def skip(self, blocks: int | np.intp, reason: DeclineReason) -> None:
        """So many blocks are not stored, for this reason."""
        self._world.counters.store_skipped_blocks[reason] += int(blocks)

    def _queue(self, order: StoreOrder, targets: SlotArray) -> None:
        world = self._world
        world.gpu.pin(order.sources)
        transfer = Transfer(
            transfer_id=world.inflight.next_id(),
            direction=Direction.STORE,
            names=order.blocks,
            sources=order.sources,
            targets=targets,
            owner=order.owner,
            epochs=order.epochs,
            use=order.use,
        )
        world.inflight.add(transfer)
        if order.owner in world.leases:
            transfer.waiters.add(order.owner)
            world.leases.find(order.owner).storing.add(transfer.transfer_id)
        world.outbox.submissions.append(transfer)
