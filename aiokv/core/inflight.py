"""Transfers: batches of copies that are queued or running, and who waits for them.

Rules
- A transfer pins its sources from the start and its targets from the moment they are named; its pins are given back in
  one place, its completion (law 4). It never looks at who still waits for it to decide that.
- One copy per CPU block: every CPU slot that is the source of an unfinished load is marked with it (single flight).
- Each transfer ends exactly once; a second end is an `InvalidTransition`.

State: the table of unfinished transfers; per CPU slot the id of the load that reads it and the target it writes; per
GPU slot the id of the store that reads it, and whether a request has hit it while cold blocks were being stored; how
many blocks are being stored because they were next to be evicted.

Transitions: QUEUED -> SUBMITTED -> DONE | FAILED | QUARANTINED, QUEUED -> DROPPED, and QUEUED -> FAILED where the
backend refuses to begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, final

import numpy as np

from aiokv.core.block_names import BlockNames, HashedBlocks
from aiokv.core.block_table import BlockTable
from aiokv.core.life_cycle import LifeCycle
from aiokv.core.pool_values import Epochs
from aiokv.core.slot_memory import zeros
from aiokv.core.watching import ChangedHolders
from aiokv.errors import InvalidTransition, UsageError
from aiokv.model.ids import BoolArray, Direction, IntArray, KeyEnum, SlotArray, Tier
from aiokv.model.plan import Outcome

__all__ = ["NOBODY", "Follower", "InflightTable", "SourceUse", "Transfer", "TransferEvent", "TransferState"]

NOBODY: Final = 0
"""The owner of a transfer that no lease asked for; lease ids start at 1."""


class TransferState(KeyEnum):
    """Where a transfer stands."""

    QUEUED = "queued"
    SUBMITTED = "submitted"
    DONE = "done"
    FAILED = "failed"
    QUARANTINED = "quarantined"
    DROPPED = "dropped"


class TransferEvent(KeyEnum):
    """What can happen to a transfer."""

    SUBMIT = "be submitted"
    FINISH = "finish"
    FAIL = "fail"
    SPOIL = "bring corrupt blocks"
    LOSE = "be lost"
    DROP = "be dropped"


_LIFE: Final = LifeCycle(
    {
        (TransferState.QUEUED, TransferEvent.SUBMIT): TransferState.SUBMITTED,
        (TransferState.QUEUED, TransferEvent.DROP): TransferState.DROPPED,
        (TransferState.QUEUED, TransferEvent.FAIL): TransferState.FAILED,
        (TransferState.SUBMITTED, TransferEvent.FINISH): TransferState.DONE,
        (TransferState.SUBMITTED, TransferEvent.FAIL): TransferState.FAILED,
        (TransferState.SUBMITTED, TransferEvent.SPOIL): TransferState.FAILED,
        (TransferState.SUBMITTED, TransferEvent.LOSE): TransferState.QUARANTINED,
    }
)


class SourceUse(KeyEnum):
    """What the sources of a transfer were when it was planned, and so where they return to in the eviction order."""

    USED = "of a request"
    COLD = "next to be evicted"


class Follower(NamedTuple):
    """A lease that joined a load before its targets had names: which of its positions get those, by their sources."""

    lease_id: int
    table: BlockTable
    positions: IntArray
    sources: SlotArray


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    """One batch of copies of one group: `names` says what each copy brings, the head of a prefix before its tail."""

    transfer_id: int
    direction: Direction
    names: BlockNames
    sources: SlotArray
    targets: SlotArray | None
    owner: int
    epochs: Epochs
    """Those in which what it copies was valid."""
    use: SourceUse = SourceUse.USED
    state: TransferState = TransferState.QUEUED
    waiters: set[int] = field(default_factory=set)
    followers: list[Follower] = field(default_factory=list)
    """Empty once the targets are named."""
    reports: dict[int, Outcome] = field(default_factory=dict)
    """By rank, how its part of the copies ended."""
    corrupt: dict[int, frozenset[int]] = field(default_factory=dict)
    """By rank, the copies of a load whose source it found to be corrupt; no rank that found none."""
    open_copies: int = 0
    """Copies `[0, open_copies)` whose pins are held; completion gives them back from the tail."""
    is_watched: bool = False
    """The host wants to know when all its pins are back."""
    is_orphan: bool = False
    """All who wanted it have left, and its copies go on."""
    is_hidden: bool = False
    """A load that has failed, and that others of the same sources may have followed."""
    since: float | None = None
    """When it came to the host, by the host's clock: the core knows none. Written once, by the host."""
    ended: float | None = None
    """When its copies ended, as far as the host knows, by its clock. Written by the host before it reports an end."""

    def __post_init__(self) -> None:
        self.open_copies = len(self.sources)

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"transfer {self.transfer_id}"

    @property
    def group(self) -> int:
        """The group of its blocks."""
        return self.names.group

    @property
    def positions(self) -> IntArray:
        """Block positions, ascending, one per copy; `UsageError` for blocks that are named by their hashes alone."""
        if isinstance(self.names, HashedBlocks):
            raise UsageError(f"the blocks of {self.name} have no positions")
        return self.names.positions

    @property
    def bound_targets(self) -> SlotArray:
        """The targets; `InvalidTransition` while they are not named."""
        if self.targets is None:
            raise InvalidTransition(self.name, state="without targets", event="be copied")
        return self.targets

    def slots(self, tier: Tier) -> SlotArray:
        """The slots it pins in a tier; none while the targets of a load are not named."""
        if tier is self.direction.source_tier:
            return self.sources
        return self.targets if self.targets is not None else self.sources[:0]

    def blocks(self, start: int, stop: int) -> BlockNames:
        """Which blocks copies `[start, stop)` bring, as recorded when the transfer was planned."""
        return self.names if stop - start == len(self.sources) else self.names.select(slice(start, stop))

    def advance(self, event: TransferEvent) -> None:
        """Take one step of the life cycle; `InvalidTransition` leaves the state as it was."""
        self.state = _LIFE.find_next(self.state, event, subject=self)


@final
class InflightTable:
    """All unfinished transfers, and which slots they read."""

    __slots__ = (
        "_loading_id",
        "_loading_target",
        "_next_id",
        "_storing_id",
        "_transfers",
        "_was_used",
        "cold_blocks",
        "orphan_blocks",
        "returned",
        "watchers",
    )

    def __init__(self, *, gpu_slots: int, cpu_slots: int) -> None:
        self._transfers: dict[int, Transfer] = {}
        self._next_id = 1
        self._loading_id = zeros(cpu_slots, np.int64)
        self._loading_target = zeros(cpu_slots, np.int32)
        self._storing_id = zeros(gpu_slots, np.int64)
        self._was_used = zeros(gpu_slots, np.bool_)
        self.cold_blocks = 0
        """Open copies whose sources were next to be evicted when they were planned."""
        self.orphan_blocks = dict.fromkeys(Direction, 0)
        """Open copies that go on although all who wanted them have left."""
        self.returned: list[int] = []
        """Watched transfers that have given all their pins back, until the host takes them."""
        self.watchers: list[ChangedHolders] = []
        """Each is told which transfers hold other slots than before, have come or have gone."""

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._transfers.values())

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._transfers

    def next_id(self) -> int:
        """A fresh transfer id; ids are never reused."""
        self._next_id += 1
        return self._next_id - 1

    def add(self, transfer: Transfer) -> None:
        """Enter a queued transfer; its sources are marked as being read."""
        self._transfers[transfer.transfer_id] = transfer
        if transfer.direction is Direction.LOAD:
            self._loading_id[transfer.sources] = transfer.transfer_id
        else:
            self._storing_id[transfer.sources] = transfer.transfer_id
        if transfer.use is SourceUse.COLD:
            self._was_used[transfer.sources] = False
            self.cold_blocks += len(transfer)
        self._tell(transfer)

    def bind_targets(self, transfer: Transfer, targets: SlotArray) -> None:
        """Name the targets of a queued load."""
        transfer.targets = targets
        self._loading_target[transfer.sources] = targets.astype(np.int32, copy=False)
        self._tell(transfer)

    def find(self, transfer_id: int) -> Transfer:
        """The unfinished transfer with this id; `UsageError` when there is none."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            raise UsageError(f"there is no unfinished transfer {transfer_id}")
        return transfer

    def hide(self, transfer: Transfer) -> None:
        """Nobody may join this load any more: it has failed. A later load of the same source keeps its mark."""
        transfer.is_hidden = True
        self._unmark_loading(transfer, transfer.sources)

    def unmark(self, transfer: Transfer, *, start: int, stop: int) -> None:
        """Copies `[start, stop)`, the last open ones, are over: their sources are no longer being read.

        A hidden load may have been followed by another one of the same source, which keeps its mark.
        """
        transfer.open_copies = min(transfer.open_copies, start)
        self.orphan_blocks[transfer.direction] -= stop - start if transfer.is_orphan else 0
        self.cold_blocks -= stop - start if transfer.use is SourceUse.COLD else 0
        self._tell(transfer)
        sources = transfer.sources[start:stop]
        if transfer.is_hidden:
            self._unmark_loading(transfer, sources)
        elif transfer.direction is Direction.LOAD:
            self._loading_id[sources] = 0
        else:
            self._storing_id[sources] = 0

    def remove(self, transfer: Transfer) -> None:
        """Forget a transfer that has ended and whose sources are unmarked."""
        del self._transfers[transfer.transfer_id]
        if transfer.is_watched:
            self.returned.append(transfer.transfer_id)
        self._tell(transfer)

    def loading_ids(self, cpu_slots: SlotArray) -> IntArray:
        """Per CPU slot the id of the load that reads it; 0 where none does."""
        return self._loading_id[cpu_slots]

    def loading_targets(self, cpu_slots: SlotArray) -> SlotArray:
        """Per CPU slot the GPU slot that its load writes; meaningful where a load with named targets reads it."""
        return self._loading_target[cpu_slots]

    def note_use(self, gpu_slots: SlotArray) -> None:
        """A request has hit these slots: they are recent, whatever a store that reads them took them for."""
        if self.cold_blocks:
            self._was_used[gpu_slots] = True

    def was_used(self, gpu_slots: SlotArray) -> BoolArray:
        """Per source of an unfinished store of cold blocks, whether a request has hit it since that was planned."""
        return self._was_used[gpu_slots]

    def storing_ids(self, gpu_slots: SlotArray) -> IntArray:
        """Per GPU slot the id of the store that reads it; 0 where none does."""
        return self._storing_id.take(gpu_slots)

    def join(self, transfer: Transfer, lease_id: int) -> None:
        """One more lease wants what is being copied."""
        transfer.waiters.add(lease_id)
        if transfer.is_orphan:
            transfer.is_orphan = False
            self.orphan_blocks[transfer.direction] -= transfer.open_copies
        self._tell(transfer)

    def leave(self, transfer: Transfer, lease_id: int) -> None:
        """A lease does not want it any more. Idempotent; the copy goes on."""
        transfer.waiters.discard(lease_id)
        if transfer.followers:
            transfer.followers = [follower for follower in transfer.followers if follower.lease_id != lease_id]
        if not transfer.waiters and transfer.state is TransferState.SUBMITTED and not transfer.is_orphan:
            transfer.is_orphan = True
            self.orphan_blocks[transfer.direction] += transfer.open_copies
        self._tell(transfer)

    def _unmark_loading(self, transfer: Transfer, sources: SlotArray) -> None:
        """Its marks go; those of later loads of the same sources stay. A target means nothing without its mark."""
        self._loading_id[sources[self._loading_id[sources] == transfer.transfer_id]] = 0

    def _tell(self, transfer: Transfer) -> None:
        for changed in self.watchers:
            changed.add(transfer.transfer_id)
