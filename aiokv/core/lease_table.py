"""Leases: what one request holds, and the table of all of them.

Rules
- A record holds one pin on every GPU slot in its tables and on those that are leaving; transfers hold their own
  (law 4).
- A record never looks anything up; it is filled by admission and changed by its own life cycle only.

Transitions: HELD -> LOADING -> READY -> RELEASED, with HELD -> READY when nothing is loaded, LOADING -> HELD when a
failed load waits for capacity to be planned again, and any live state -> RELEASED.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from aiokv.core.block_table import BlockTable, ClaimSegment
from aiokv.core.counters import Phase
from aiokv.core.fences import Fence
from aiokv.core.lease_shares import GroupShare, Share
from aiokv.core.life_cycle import LifeCycle
from aiokv.core.pool_values import Epochs
from aiokv.core.watching import ChangedHolders
from aiokv.errors import InvalidTransition, LeaseReleased, UsageError
from aiokv.model.ids import NULL_SLOT, BoolArray, IntArray, KeyEnum, SlotArray
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import Outcome

__all__ = [
    "AcquireRequest",
    "FailedLoad",
    "LeaseEvent",
    "LeaseRecord",
    "LeaseState",
    "LeaseTable",
]

_NO_SLOTS: Final[IntArray] = np.zeros(0, np.int64)


class LeaseState(KeyEnum):
    """Where a lease stands."""

    HELD = "held"
    LOADING = "loading"
    READY = "ready"
    RELEASED = "released"


class LeaseEvent(KeyEnum):
    """What can happen to a lease."""

    LOAD = "start loading"
    SETTLE = "become ready"
    REPLAN = "be planned again"
    RELEASE = "be released"


_LIFE: Final = LifeCycle(
    {
        (LeaseState.HELD, LeaseEvent.LOAD): LeaseState.LOADING,
        (LeaseState.HELD, LeaseEvent.SETTLE): LeaseState.READY,
        (LeaseState.LOADING, LeaseEvent.SETTLE): LeaseState.READY,
        (LeaseState.LOADING, LeaseEvent.REPLAN): LeaseState.HELD,
        (LeaseState.HELD, LeaseEvent.RELEASE): LeaseState.RELEASED,
        (LeaseState.LOADING, LeaseEvent.RELEASE): LeaseState.RELEASED,
        (LeaseState.READY, LeaseEvent.RELEASE): LeaseState.RELEASED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcquireRequest:
    """What a request asks for, in tokens: `prompt_tokens` is N, `align` as in the contract.

    `first_chunk` limits what windowed groups claim to their coverage plus that many tokens. Lower `priority` goes
    first. The keys may grow, but are not truncated before the lease and the copies it started have ended.
    """

    request_id: str
    keys: BlockKeys
    prompt_tokens: int
    reserve_tokens: int = 0
    first_chunk: int | None = None
    align: int = 1
    priority: int = 0
    phase: Phase = Phase.FIRST

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_tokens <= self.keys.num_tokens:
            raise UsageError(f"a prompt of {self.prompt_tokens} tokens, of which {self.keys.num_tokens} are known")
        if min(self.reserve_tokens, self.first_chunk or 0) < 0 or self.align < 1:
            given = f"reserve_tokens={self.reserve_tokens}, first_chunk={self.first_chunk}, align={self.align}"
            raise UsageError(f"{given} make no request")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FailedLoad:
    """A load that brought a lease nothing: its group, the mask of its positions over the prefix, and how it ended."""

    group: int
    positions: BoolArray
    outcome: Outcome


@final
class LeaseRecord:
    """One request's pins and reservations. Changed by the core's collaborators only."""

    __slots__ = (
        "attributed",
        "block_sizes",
        "capacity_tokens",
        "claims",
        "confirmed",
        "delivered",
        "epochs",
        "failed",
        "fenced",
        "given_back",
        "hit",
        "is_bare",
        "is_finishing",
        "keys",
        "lease_id",
        "leaving",
        "length",
        "loaded",
        "loaded_at",
        "opened_at",
        "publish_limit",
        "registered",
        "replans",
        "request",
        "state",
        "state_slots",
        "storing",
        "streams",
        "tables",
        "waiting",
        "watchers",
    )

    def __init__(
        self,
        lease_id: int,
        request: AcquireRequest,
        *,
        plan: Share,
        block_sizes: Sequence[int],
        epochs: Epochs,
        watchers: Sequence[ChangedHolders],
    ) -> None:
        self.lease_id, self.block_sizes, self.epochs = lease_id, block_sizes, epochs
        self.request, self.keys = request, request.keys
        """Tokens known and their hashes; replaced by a copy of the lease's own before it grows."""
        self.state = LeaseState.HELD
        self.length = self.confirmed = self.publish_limit = plan.length
        """L: tokens of the prefix that need no compute."""
        self.opened_at: float | None = None
        """When the host admitted it, by the host's clock: the core knows none. Written once, by the host."""
        self.loaded_at: float | None = None
        """When the last of its loads ended, by the host's clock; None where it is planned again after that."""
        self.tables: list[BlockTable] = []
        self.state_slots: dict[int, BlockTable] = {}
        """Per recurrent group: position 0 the working state, 1 the one being captured."""
        self.claims: deque[ClaimSegment] = deque()
        self.capacity_tokens: list[int] = []
        self.loaded: list[BoolArray] = []
        """Per group, over the blocks of the prefix: taken from the CPU tier by this request."""
        self.registered: list[int] = []
        """Per group, blocks `[0, registered)` have been offered to the index."""
        self.watchers = watchers
        self._take_shares(plan.groups)
        self.hit = self.delivered = plan.hit
        self.attributed = False
        self.waiting: set[int] = set()
        self.storing: set[int] = set()
        """Unfinished stores that this lease began or joined."""
        self.failed: list[FailedLoad] = []
        """Loads that did not bring what it waited for, since it was planned."""
        self.replans = 0
        self.leaving: IntArray = _NO_SLOTS
        """Slots of an old prefix that it still pins, in eviction order: until all its claims have names, so that
        none of them is named anew for it."""
        self.is_bare = False
        """It has given all of its table back, so that another may go on, and waits to be planned again from nothing."""
        self.is_finishing = False
        self.fenced = 0
        """The number of the last fence behind which its slots were written, read or given back; 0 for none."""
        self.streams: list[object] = []
        """Those that were made to wait for its loads: their kernels use its slots."""
        self.given_back = [0] * len(block_sizes)
        """Per group, blocks `[0, given_back)` are no longer held."""

    def _take_shares(self, groups: Sequence[GroupShare]) -> None:
        whole, owner, watchers = self.request.prompt_tokens + self.request.reserve_tokens, self.lease_id, self.watchers
        for index, (block, share) in enumerate(zip(self.block_sizes, groups, strict=True)):
            positions = max(-(-whole // block), share.claim_stop)
            self.tables.append(BlockTable(positions, owner=owner, watchers=watchers))
            if share.state_claims:
                self.state_slots[index] = BlockTable(share.state_claims, owner=owner, watchers=watchers)
            self.capacity_tokens.append(share.capacity_tokens)
            self.loaded.append(share.is_loaded)
            self.registered.append(self.length // block)

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"the lease of request {self.request.request_id!r}"

    @property
    def unnamed_claims(self) -> int:
        """Claims that have no slot yet."""
        return sum(segment.unnamed for segment in self.claims)

    @property
    def is_open(self) -> bool:
        """Whether it may still be used: neither released nor about to be."""
        return self.state is not LeaseState.RELEASED and not self.is_finishing

    def check_open(self) -> None:
        """`LeaseReleased` unless it may still be used."""
        if not self.is_open:
            raise LeaseReleased(self.request.request_id)

    def check_ready(self, event: str) -> None:
        """`InvalidTransition` unless it is READY: only then it can `event`."""
        if self.state is not LeaseState.READY:
            raise InvalidTransition(self.name, state=self.state.value, event=event)

    def fence(self, fence: Fence | None) -> None:
        """Whatever has touched its slots so far did so before this fence, or before an older one that it has."""
        if fence is not None and fence.number > self.fenced:
            self.fenced = fence.number

    def has_unnamed(self, table: BlockTable, *, stop: int) -> bool:
        """Whether a claim of `table` at a position below `stop` has no slot yet."""
        return any(s.table is table and s.unnamed and s.positions[s.named] < stop for s in self.claims)

    def advance(self, event: LeaseEvent) -> None:
        """Take one step of the life cycle; `InvalidTransition` leaves the state as it was."""
        self.state = _LIFE.find_next(self.state, event, subject=self)
        for changed in self.watchers:
            changed.add(self.lease_id)

    def resumption(self) -> AcquireRequest:
        """What asks for all tokens known now, with the same options: a request that goes on after a preemption."""
        keys = self.keys.copy()
        return replace(self.request, keys=keys, prompt_tokens=keys.num_tokens, phase=Phase.RESUMED)

    def branch(self, *, request_id: str, num_tokens: int) -> AcquireRequest:
        """What asks for the first `num_tokens` tokens with the same options; `UsageError` if they are not known."""
        if not 1 <= num_tokens <= self.keys.num_tokens:
            raise UsageError(f"cannot fork {num_tokens} tokens: 1 to {self.keys.num_tokens} are known")
        keys = self.keys.copy()
        keys.truncate(num_tokens)
        return replace(self.request, request_id=request_id, keys=keys, prompt_tokens=num_tokens, phase=Phase.FIRST)

    def put_off(self, slots: SlotArray) -> None:
        """These have left the tables and are still pinned, in eviction order."""
        self.leaving = np.concatenate((self.leaving, slots.astype(np.int64, copy=False)))
        for changed in self.watchers:
            changed.add(self.lease_id)

    def take_leaving(self) -> IntArray:
        """Remove and return what `put_off` was told: the caller unpins it."""
        slots, self.leaving = self.leaving, _NO_SLOTS
        for changed in self.watchers:
            changed.add(self.lease_id)
        return slots

    def held_slots(self) -> IntArray:
        """Every GPU slot in the tables, each pinned, in eviction order: the tail of the prefix first."""
        if len(self.tables) == 1 and not self.state_slots:
            return self.tables[0].held_slots()[::-1]
        if not self.state_slots and self.block_sizes.count(self.block_sizes[0]) == len(self.tables):
            return self._held_slots_of_equals()
        parts: list[IntArray] = []
        ends: list[IntArray] = []
        for index, table in enumerate(self.tables):
            positions = table.held_positions()
            parts.append(table.held_slots())
            ends.append(-(positions + 1) * self.block_sizes[index])
        for table in self.state_slots.values():
            parts.append(table.held_slots())
            ends.append(np.full(len(parts[-1]), np.iinfo(np.int64).min))
        return np.concatenate(parts)[np.argsort(np.concatenate(ends), kind="stable")]

    def count_held(self) -> int:
        """How many GPU slots it holds, claims without a name not counted; from any thread."""
        tables = (*self.tables, *self.state_slots.values())
        return sum(table.count_held() for table in tables) + len(self.leaving)

    def _held_slots_of_equals(self) -> IntArray:
        """The same where one position is as long in all tables: they are read side by side, and nothing is sorted."""
        side_by_side = np.zeros((max(map(len, self.tables)), len(self.tables)), np.int64)
        for index, table in enumerate(self.tables):
            table.copy_to(side_by_side[: len(table), index])
        slots = side_by_side[::-1].ravel()
        return slots if np.count_nonzero(slots) == len(slots) else slots[slots != NULL_SLOT]


@final
class LeaseTable:
    """All live leases by id. Ids are never reused."""

    __slots__ = ("_next_id", "_records", "watchers")

    def __init__(self) -> None:
        self._records: dict[int, LeaseRecord] = {}
        self._next_id = 1
        self.watchers: list[ChangedHolders] = []
        """Each is told which leases hold other slots than before, have come or have gone."""

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[LeaseRecord]:
        return iter(self._records.values())

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._records

    def next_id(self) -> int:
        """A fresh id."""
        self._next_id += 1
        return self._next_id - 1

    def add(self, record: LeaseRecord) -> None:
        """Enter a record under its id."""
        self._records[record.lease_id] = record
        for changed in self.watchers:
            changed.add(record.lease_id)

    def find(self, lease_id: int) -> LeaseRecord:
        """The live record with this id; `KeyError` when it has gone."""
        return self._records[lease_id]

    def remove(self, lease_id: int) -> None:
        """Forget a record that holds nothing any more."""
        del self._records[lease_id]
        for changed in self.watchers:
            changed.add(lease_id)
