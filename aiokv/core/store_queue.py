"""Stores on their way: which blocks still want a copy, and the transfers that make it.

Rules
- A block is copied at most once at a time, and never if it has a copy. Whoever wants one that is being copied joins
  that store: it is dropped only if all who want it leave before it is submitted.
- Sources that nobody holds are pinned only as far as admitted requests have not been promised their slots.
- A CPU block is findable only after its copy ended well in the current epochs (law 3), under the names taken down when
  the store was planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from aiokv.core.block_names import BlockNames, HashedBlocks
from aiokv.core.inflight import NOBODY, SourceUse, Transfer
from aiokv.core.lease_table import LeaseRecord
from aiokv.core.pool_values import Epochs
from aiokv.core.slices import Job
from aiokv.core.world import World
from aiokv.model.ids import BoolArray, DigestArray, Direction, SlotArray
from aiokv.model.plan import DeclineReason, Outcome

__all__ = ["Sifted", "StoreOrder", "StoreQueue"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sifted:
    """What is known of GPU blocks that may be stored, one mask each."""

    is_current: BoolArray
    """Findable in this very slot."""
    is_cached: BoolArray
    is_storing: BoolArray

    @property
    def is_wanted(self) -> BoolArray:
        """Worth a copy: findable, without one, and none is being made."""
        return self.is_current & ~self.is_cached & ~self.is_storing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoreOrder:
    """Blocks to copy from the GPU slots `sources`, the most wanted first.

    `owner` is the lease that asks for them: if it leaves before they are submitted, and nobody has joined, they are
    dropped. `after` is the fence they wait for, where it is known; `epochs` those in which the blocks were valid.
    """

    blocks: BlockNames
    sources: SlotArray
    epochs: Epochs
    owner: int = NOBODY
    after: object = None
    use: SourceUse = SourceUse.USED


@final
class StoreQueue:
    """Plans, queues and completes stores for whichever policy is in force."""

    __slots__ = ("_world",)

    def __init__(self, world: World) -> None:
        self._world = world

    def sift(self, digests: DigestArray, *, group: int, slots: SlotArray) -> Sifted:
        """Look GPU blocks up in both tiers; those that have a copy are touched there, the last of them first."""
        world = self._world
        is_current = world.gpu.is_held_by(slots, digests, group=group)
        is_cached = np.zeros(len(slots), np.bool_)
        if world.cpu is not None:
            on_cpu = world.cpu.find(digests, group)
            world.cpu.touch(on_cpu.slots[on_cpu.present][::-1])
            is_cached = on_cpu.present
        return Sifted(
            is_current=is_current,
            is_cached=is_cached & is_current,
            is_storing=(world.inflight.storing_ids(slots) != 0) & is_current & ~is_cached,
        )

    def hashed(self, digests: DigestArray, *, group: int, slots: SlotArray) -> HashedBlocks:
        """The names of blocks in GPU slots, whoever computed them."""
        return HashedBlocks(group=group, hashes=digests, origins=self._world.events.find_origins(slots))

    def put(self, order: StoreOrder) -> None:
        """Reserve CPU slots for as many blocks as fit, the most wanted first, and queue their copies."""
        world = self._world
        may_pin = np.cumsum(world.gpu.pins_of(order.sources) == 0) <= world.gpu.available
        blocks, sources = order.blocks.select(may_pin), order.sources[may_pin]
        self.skip(np.count_nonzero(~may_pin), DeclineReason.BACKPRESSURE)
        targets = world.reserve_cpu(len(sources))
        self.skip(len(sources) - len(targets), DeclineReason.POOL_FULL)
        if not len(targets):
            return
        which = slice(0, len(targets))
        if order.use is SourceUse.COLD:  # the tail of a prefix is evicted first; a transfer begins with its head
            which = slice(len(targets) - 1, None, -1)
        self._queue(order, blocks=blocks.select(which), sources=sources[which], targets=targets)

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

    def skip(self, blocks: int | np.intp, reason: DeclineReason) -> None:
        """So many blocks are not stored, for this reason."""
        self._world.counters.store_skipped_blocks[reason] += int(blocks)

    def _queue(self, order: StoreOrder, *, blocks: BlockNames, sources: SlotArray, targets: SlotArray) -> None:
        world = self._world
        world.gpu.pin(sources)
        transfer = Transfer(
            transfer_id=world.inflight.next_id(),
            direction=Direction.STORE,
            names=blocks,
            sources=sources,
            targets=targets,
            owner=order.owner,
            epochs=order.epochs,
            after=order.after,
            use=order.use,
        )
        world.inflight.add(transfer)
        if order.owner in world.leases:
            transfer.waiters.add(order.owner)
            world.leases.find(order.owner).storing.add(transfer.transfer_id)
        world.outbox.submissions.append(transfer)
