"""The mutable state of one `CacheState`, shared by its collaborators, and the steps that all of them take.

Rules
- Every slot that is given back or named passes through here, so that evictions are counted and the capacity generation
  moves in one place.
- Nothing here decides anything: admission, loads, stores and confirmation do.
"""

from __future__ import annotations

from collections import deque
from typing import Final, final

import numpy as np

from aiokv.core.block_names import BlockNames
from aiokv.core.counters import Counters, EvictReason
from aiokv.core.event_log import EventLog
from aiokv.core.fences import FenceBook
from aiokv.core.hint_table import HintTable
from aiokv.core.index import FoundInBoth, SlotIndex
from aiokv.core.index_table import SlotTable
from aiokv.core.inflight import InflightTable, SourceUse, Transfer
from aiokv.core.lease_table import LeaseRecord, LeaseTable
from aiokv.core.pool import Evicted, NamedSlots, Pool
from aiokv.core.pool_values import NOTHING_EVICTED, Epochs
from aiokv.core.slices import SLICE_BLOCKS, Job, SliceQueue
from aiokv.core.slot_counts import SlotTimes
from aiokv.errors import UsageError
from aiokv.model.ids import NULL_SLOT, BoolArray, DigestArray, IntArray, SlotArray, Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import DeferReason, Deferred, Outcome
from aiokv.model.spec import CacheGeometry

__all__ = ["SCAN_LIMIT", "Outbox", "World"]

SCAN_LIMIT: Final = 16_384
"""Entries of the eviction queue looked at in one slice: stale ones cost 12 to 30 ns each, the more the larger the pool
and the less in order its slots; so 0.2 to 0.5 ms at most beside the 0.3 ms of a slice of names."""

_GONE_BATCHES: Final = 1024
"""Batches of CPU blocks that went, remembered for whoever stores them again; older ones are forgotten."""


@final
class Outbox:
    """What the core wants done: transfers to submit, leases whose waiters must be told. Emptied by the host."""

    __slots__ = ("settled", "submissions")

    def __init__(self) -> None:
        self.submissions: list[Transfer] = []
        self.settled: list[int] = []

    def take_submissions(self) -> list[Transfer]:
        """Transfers to hand to the backend, oldest first; each is taken once."""
        taken, self.submissions = self.submissions, []
        return taken

    def take_settled(self) -> list[int]:
        """Ids of leases that became READY; each is taken once."""
        taken, self.settled = self.settled, []
        return taken


@final
class World:
    """Pools, tables, counters and queues of one cache."""

    __slots__ = (
        "capacity_generation", "counters", "cpu", "epochs", "events", "fences", "geometry", "gone_copies", "gpu",
        "gpu_moves", "hints", "identity", "inflight", "is_backend_lost", "is_storing_shut", "leases", "lost_gpu_slots",
        "outbox", "slice_blocks", "slices", "tick", "watermark_blocks", "world_size",
    )  # fmt: skip

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        gpu_blocks: int,
        cpu_blocks: int,
        watermark: float = 0.0,
        slice_blocks: int = SLICE_BLOCKS,
        world_size: int = 1,
    ) -> None:
        self.geometry = geometry
        self.slice_blocks = slice_blocks
        self.world_size = world_size
        table = SlotTable(gpu_blocks + cpu_blocks, split=gpu_blocks)
        index = SlotIndex(gpu_blocks, table=table)
        self.gpu = Pool(Tier.GPU, capacity=gpu_blocks - 1, first_slot=NULL_SLOT + 1, index=index)
        index = SlotIndex(cpu_blocks, table=table, base=gpu_blocks)
        self.cpu = Pool(Tier.CPU, capacity=cpu_blocks, first_slot=0, index=index) if cpu_blocks else None
        self.leases = LeaseTable()
        self.hints = HintTable(gpu_slots=gpu_blocks, cpu_slots=cpu_blocks)
        self.inflight = InflightTable(gpu_slots=gpu_blocks, cpu_slots=cpu_blocks)
        self.counters = Counters()
        self.fences = FenceBook(gpu_blocks)
        self.events = EventLog(geometry, gpu_slots=gpu_blocks, counters=self.counters)
        self.outbox = Outbox()
        self.slices = SliceQueue()
        self.watermark_blocks = int(self.gpu.capacity * watermark)
        self.capacity_generation = 0
        self.gpu_moves = 0
        """Grows whenever what is next to be evicted from the GPU may have changed, save by stores themselves."""
        self.gone_copies: deque[Evicted] = deque(maxlen=_GONE_BATCHES)
        """What was evicted from the CPU tier, or corrupt there, since the store policy last looked."""
        self.tick = 0
        self.is_backend_lost = False
        self.is_storing_shut = False
        self.identity = object()
        """Stands for this cache where others' notes may lie beside its own."""
        self.epochs = Epochs(self.gpu.epoch, 0)
        """The epochs of both tiers now."""
        self.lost_gpu_slots: set[int] = set()
        """Those that copies of LOST transfers read or wrote."""

    @property
    def usable_gpu_slots(self) -> int:
        """GPU slots that one request could have if it were alone."""
        return self.gpu.usable_count

    @property
    def has_cpu_tier(self) -> bool:
        """Whether blocks may be stored in the CPU tier."""
        return self.cpu is not None and not self.is_backend_lost and not self.is_storing_shut

    @property
    def usable_cpu(self) -> Pool | None:
        """The CPU pool; none where nothing may be looked up or stored there."""
        return None if self.is_backend_lost else self.cpu

    def bump_epoch(self, pool: Pool) -> None:
        """Make every key of a pool unfindable at once."""
        pool.bump_epoch()
        self.epochs = Epochs(self.gpu.epoch, self.cpu.epoch if self.cpu is not None else 0)

    def check_keys(self, keys: BlockKeys) -> None:
        """`UsageError` for keys of another geometry: their digests would stand for other tokens."""
        if keys.hash_block_size != self.geometry.hash_block_size:
            size, expected = keys.hash_block_size, self.geometry.hash_block_size
            raise UsageError(f"these keys hash blocks of {size} tokens, the geometry {expected}")

    def defer(self, reason: DeferReason) -> Deferred:
        """The answer to whom must wait, counted."""
        self.counters.alloc_failures[reason] += 1
        return Deferred(reason)

    def pool(self, tier: Tier) -> Pool | None:
        """The pool of a tier; there is none for a CPU tier of zero blocks."""
        return self.gpu if tier is Tier.GPU else self.cpu

    def pools(self) -> dict[Tier, Pool]:
        """Those that there are."""
        return {Tier.GPU: self.gpu} if self.cpu is None else {Tier.GPU: self.gpu, Tier.CPU: self.cpu}

    def name_gpu(self, count: int) -> IntArray:
        """Name up to `count` claimed GPU slots, evicting where none is free; fewer when the scan limit is reached."""
        slots = self._counted(self.gpu.name_claimed(count, scan_limit=SCAN_LIMIT), tier=Tier.GPU)
        self.note_moves(len(slots))
        return slots

    @property
    def available_cpu(self) -> int:
        """CPU slots that can be claimed."""
        return self.cpu.available if self.cpu is not None else 0

    def reserve_cpu(self, count: int) -> IntArray:
        """Claim and name up to `count` CPU slots, as many as are available; fewer when the scan limit is reached."""
        if self.cpu is None:
            return np.zeros(0, np.int64)
        count = min(count, self.cpu.available)
        self.cpu.claim(count)
        slots = self._counted(self.cpu.name_claimed(count, scan_limit=SCAN_LIMIT), tier=Tier.CPU)
        self.cpu.unclaim(count - len(slots))
        return slots

    def unpin_gpu(self, slots: SlotArray, times: SlotTimes | None = None) -> None:
        """Drop one pin each, or so many, in eviction order."""
        if len(slots):
            self.gpu.unpin(slots, times)
            self.capacity_generation += 1
            self.note_moves(len(slots))

    def give_back(self, record: LeaseRecord, slots: SlotArray) -> None:
        """Drop the pins of a lease in eviction order; whatever takes the slots next waits for its fence (law 5)."""
        if record.fenced:
            self.fences.note(slots, record.fenced)
        self.unpin_gpu(slots)

    def give_back_all(self, record: LeaseRecord, slots: IntArray) -> None:
        """The same as a lease leaves; it changes this array no more, so that several leases' are dropped together."""
        if record.fenced:
            self.fences.note(slots, record.fenced)
        self.gpu.unpin_late(slots)
        self.gpu_moves += len(slots)

    def take_back(self, record: LeaseRecord, slots: SlotArray) -> None:
        """`give_back` while it is planned again: kernels that wait for its loads on a stream may be about to read."""
        for stream in record.streams:
            record.fence(self.fences.promise(stream))
        self.give_back(record, slots)

    def unpin_cpu(self, slots: SlotArray, times: SlotTimes | None = None) -> None:
        """Drop one pin each, or so many, in eviction order."""
        if self.cpu is not None and len(slots):
            self.cpu.unpin(slots, times)

    def unclaim_gpu(self, count: int) -> None:
        """Give claims back that were never named."""
        if count:
            self.gpu.unclaim(count)
            self.capacity_generation += 1

    def pin_hits(self, slots: SlotArray) -> None:
        """Hold resident GPU slots for a request that has hit them."""
        self.gpu.note_use(slots)
        self.gpu.pin(slots)
        self.inflight.note_use(slots)
        self.hints.note_hits(slots)

    def pin_sources(self, slots: SlotArray) -> None:
        """Hold resident CPU slots for a load of a request that has hit them."""
        if self.cpu is not None:
            self.cpu.note_use(slots)
            self.cpu.pin(slots)

    def note_tick(self, tick: int) -> None:
        """It is later now, by the host's clock."""
        self.tick = tick
        for pool in self.pools().values():
            pool.note_tick(tick)

    def find_in_both(self, keys: DigestArray, group: int) -> FoundInBoth:
        """Where blocks are on the GPU, and on the CPU where they are not there, in one search; changes nothing."""
        if self.cpu is None:
            return FoundInBoth(self.gpu.find(keys, group), None)
        return self.gpu.find_in_both(keys, group, second=self.cpu)

    def note_moves(self, count: int) -> None:
        """So many GPU slots were named, or came to the recent end of the eviction order."""
        self.gpu_moves += count

    def register(
        self, tier: Tier, slots: SlotArray, *, blocks: BlockNames, copies_of: SlotArray | None = None
    ) -> BoolArray:
        """Make slots findable under the hashes of `blocks`, which were copied from slots of the other tier if given.

        False where the hash is resident already: that slot stays private to whoever holds it.
        """
        pool = self.pool(tier)
        if pool is None:
            return np.zeros(len(slots), np.bool_)
        digests = blocks.digests(self.geometry.hashes_per_block(blocks.group))
        is_new = pool.register(slots, digests, blocks.group, copies_of=copies_of)
        if self.hints.live and tier is Tier.GPU:
            self.hints.forget_hits(slots[is_new])
        if self.events.is_on:
            self.events.stored(tier, slots[is_new], blocks=blocks.select(is_new))
        if self.hints.wanted:
            self.hints.note_arrivals(tier, digests[is_new], group=blocks.group)
        return is_new

    def forget(self, tier: Tier, evicted: Evicted, *, reason: EvictReason) -> None:
        """Blocks have stopped being findable: count them and say so."""
        if not len(evicted):
            return
        self.counters.evicted_blocks[tier, reason] += len(evicted)
        self.events.removed(tier, evicted)
        if tier is Tier.CPU and reason in (EvictReason.CAPACITY, EvictReason.CORRUPT):
            self.gone_copies.append(evicted)

    def ending(self, transfer: Transfer, outcome: Outcome) -> Job:
        """The copies of a transfer have ended: register what they brought, and give every pin back, tail first.

        It stays in the table until whoever waits for it has been told.
        """
        tier = transfer.direction.target_tier
        targets = transfer.bound_targets
        for stop in range(len(transfer), 0, -self.slice_blocks):
            start = max(stop - self.slice_blocks, 0)
            if outcome is Outcome.OK and self.may_copy(transfer):
                sources = transfer.sources[start:stop]
                self.register(tier, targets[start:stop], blocks=transfer.blocks(start, stop), copies_of=sources)
            if outcome is Outcome.LOST:
                self.quarantine(transfer, start=start, stop=stop)
            self.end_copies(transfer, start=start, stop=stop)
            if start:
                yield

    def end_copies(self, transfer: Transfer, *, start: int, stop: int) -> None:
        """Copies `[start, stop)`, the last open ones, are over: only here a transfer's pins go back (law 4)."""
        slots = transfer.slots(Tier.GPU)[start:stop][::-1]
        self.inflight.unmark(transfer, start=start, stop=stop)
        if transfer.use is SourceUse.COLD:
            was_used = self.inflight.was_used(slots)
            self.gpu.unpin_in_place(slots[~was_used])
            slots = slots[was_used]
            self.capacity_generation += 1
        self.unpin_gpu(slots)
        self.unpin_cpu(transfer.slots(Tier.CPU)[start:stop][::-1])

    def quarantine(self, transfer: Transfer, *, start: int, stop: int) -> None:
        """Nobody knows what lost copies still do: both their sides are taken out of use for good."""
        self.lost_gpu_slots.update(transfer.slots(Tier.GPU)[start:stop].tolist())
        for tier in Tier:
            pool = self.pool(tier)
            if pool is not None:
                lost = pool.quarantine(transfer.slots(tier)[start:stop])
                self.forget(tier, lost, reason=EvictReason.INVALIDATED)
                self.hints.note_losses(tier, transfer.slots(tier)[start:stop])

    def forget_corrupt(self, slots: SlotArray) -> None:
        """Take blocks out of the CPU tier's index: the source slots of an unfinished load, whose bytes are wrong.

        That load's pins keep each slot from being named for another block, so a key found here is that of the corrupt
        block; a reset or another load may have taken it off already. The slot is free when its last reader is done.
        """
        if self.cpu is not None:
            keyed = slots[self.cpu.group_of(slots) >= 0]
            self.forget(Tier.CPU, self.cpu.unregister(keyed), reason=EvictReason.CORRUPT)
            self.hints.note_losses(Tier.CPU, keyed)

    def are_lost(self, slots: SlotArray) -> BoolArray:
        """Which GPU slots are out of use for good: whoever holds them may read them, nobody writes them again."""
        if not self.lost_gpu_slots:
            return np.zeros(len(slots), np.bool_)
        return np.isin(slots, list(self.lost_gpu_slots))

    def count_last_pins(self, slots: SlotArray) -> int:
        """How many GPU slots can be claimed once a holder of `slots` lets go: nobody else pins them, none is lost."""
        return int(np.count_nonzero((self.gpu.pins_of(slots) == 1) & ~self.are_lost(slots)))

    def may_register(self, holder: LeaseRecord | Transfer) -> bool:
        """A lease from before a reset of the GPU tier registers nothing (invariant 4)."""
        return holder.epochs.gpu == self.gpu.epoch

    def may_copy(self, holder: LeaseRecord | Transfer) -> bool:
        """What a copy brings is registered, and stores are planned, only if neither tier was reset since."""
        return self.cpu is not None and (holder.epochs is self.epochs or holder.epochs == self.epochs)

    def _counted(self, named: NamedSlots, *, tier: Tier) -> IntArray:
        if named.evicted is not NOTHING_EVICTED:
            self.forget(tier, named.evicted, reason=EvictReason.CAPACITY)
        return named.slots
