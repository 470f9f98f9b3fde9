"""The part of a host that no request steers: copies and their ends, turns, tiers, and what holds all the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from aiokv.core.inflight import NOBODY, Transfer, TransferState
from aiokv.core.lease_table import AcquireRequest, LeaseRecord, LeaseState
from aiokv.core.pool import PoolCounts
from aiokv.errors import UsageError
from aiokv.model.ids import Direction, Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import Outcome
from aiokv.testing.accounts import Accounts, Growth
from aiokv.testing.checks import Checks, worst_of
from aiokv.testing.contents import Content, Contents
from aiokv.testing.driver import Driver, Setup, Witness
from aiokv.testing.event_replay import EventReplay
from aiokv.testing.streams import FORKS, STREAM_TOKENS, Streams, letters_of
from aiokv.testing.verdict import BrokenInvariant, require

__all__ = ["CopyHost"]

_PATIENCE: Final = 100
"""Turns in which everybody who stands in line is let in, once everybody else has left."""
_STRANGERS: Final = 9000
"""Tokens from here on are of no stream."""


class CopyHost:
    """Starts and ends copies through a driver, and keeps the books about every slot.

    Leases are found in the cache itself, so that a driver may let requests in whenever it likes; each must be over a
    prefix of a stream.
    """

    def __init__(self, setup: Setup, *, make_driver: Callable[[Setup, Witness], Driver]) -> None:
        self.seen: Counter[str] = Counter()
        self.streams = Streams(setup.geometry)
        self.contents = Contents(self.streams)
        self.leases: dict[int, LeaseRecord] = {}
        self.queued: list[Transfer] = []
        self.running: list[Transfer] = []
        self.reports: dict[int, dict[int, Outcome]] = {}
        self.geometry = setup.geometry
        self.sizes = self.streams.sizes
        self.capacity = {Tier.GPU: setup.gpu_blocks - 1, Tier.CPU: setup.cpu_blocks}
        self._ended: dict[int, Outcome] = {}
        self._stream_of: dict[int, int] = {}
        self._stamps: dict[int, tuple[int, int]] = {}
        self._planned: dict[int, tuple[int, int]] = {}
        self.driver = make_driver(setup, self)
        self.cache = self.driver.cache
        self._events = EventReplay(self.streams)
        self._accounts = self.make_accounts()
        self._checks = Checks(self.cache, streams=self.streams, contents=self.contents, events=self._events)

    def make_accounts(self) -> Growth:
        """The books about where tokens come from."""
        return Accounts(self.cache, streams=self.streams, seen=self.seen)

    # Names of content.

    def keys(self, stream: int, num_tokens: int = STREAM_TOKENS) -> BlockKeys:
        """The keys of a prompt; the same object each time."""
        return self.streams.keys(stream, num_tokens)

    def letters(self, stream: int, group: int = 0) -> str:
        """Where the blocks of one group of a stream are findable: g GPU, c CPU, b both, - neither."""
        return letters_of(self.cache, self.streams, stream=stream, group=group)

    def stream_of(self, record: LeaseRecord) -> int:
        """The stream that a lease's tokens begin."""
        return self._stream_of[record.lease_id]

    def is_of_this_epoch(self, record: LeaseRecord) -> bool:
        """Whether the GPU tier was not reset since the lease was admitted."""
        return self._stamps[record.lease_id][0] == self.contents.resets[0]

    # What happens.

    def look(self) -> None:
        """Follow what has changed: events, leases that came, became ready or left, copies that are being completed."""
        for record in self.cache.leases():
            if record.lease_id not in self._stream_of:
                self._adopt(record)
        self._note_planned(self.cache.transfers())
        for transfer in self.cache.transfers():
            outcome = self._ended.get(transfer.transfer_id)
            if outcome is Outcome.OK:
                self._accounts.note_arrival(transfer, waiters=self._waiters(transfer))
            elif outcome is not None:
                self._accounts.note_failure(self._waiters(transfer))
        self._events.follow(self.driver.take_events())
        for lease_id, record in list(self.leases.items()):
            if record.state is LeaseState.RELEASED:
                self._accounts.settle(record)
                del self.leases[lease_id]
            elif record.state is LeaseState.READY:
                self._accounts.settle(record)

    def settle(self) -> None:
        """Take what the core wants done, and look."""
        taken = self.driver.take_submissions()
        self._note_planned(taken)
        self.seen["stores without a lease"] += sum(transfer.owner == NOBODY for transfer in taken)
        self.queued = [t for t in self.queued + taken if t.state is TransferState.QUEUED]
        self.look()

    def copy_started(self, transfer: Transfer) -> None:
        """From now on its targets hold garbage, and nobody else may hold them."""
        require(
            transfer.state is TransferState.SUBMITTED, f"a copy starts before mark_submitted: {transfer.state.value}"
        )
        self._note_planned([transfer])
        if self.cache.find_lease(transfer.owner) is not None:
            self.look()
        if transfer.direction is Direction.LOAD:
            readers = {record.lease_id for record in self._waiters(transfer)}
            for slot in transfer.bound_targets.tolist():
                self._checks.writable(slot, leases=self.leases.values(), readers=readers, writer=transfer)
        self.contents.begin_copy(transfer)
        self.running.append(transfer)

    def submit(self, transfer: Transfer) -> None:
        """Start a copy."""
        self.queued.remove(transfer)
        self.driver.submit(transfer)
        self.copy_started(transfer)

    def submit_all(self) -> None:
        """Start every copy that is queued, those that follow from it too."""
        self.settle()
        while self.queued:
            self.submit(self.queued[0])
            self.settle()

    def report(
        self, transfer: Transfer, rank: int, *, outcome: Outcome = Outcome.OK, corrupt: Collection[int] = ()
    ) -> None:
        """One rank's part of a copy has ended, this way; nothing is given back before the last one (law 4)."""
        told = self.reports.setdefault(transfer.transfer_id, {})
        told[rank] = outcome
        self.contents.rot(transfer, corrupt)
        if len(told) == self.cache.world_size:
            self._end(transfer, worst_of(told.values()))
            self.tell(transfer, rank, outcome=outcome, corrupt=corrupt)
        else:
            self.tell(transfer, rank, outcome=outcome, corrupt=corrupt)
            require(transfer.state is TransferState.SUBMITTED, "a copy ended before its last rank has reported")
            require(transfer.open_copies == len(transfer), "slots came back before the last rank has reported")
        self.settle()

    def tell(self, transfer: Transfer, rank: int, *, outcome: Outcome, corrupt: Collection[int] = ()) -> None:
        """Hand a rank's report to the cache and nobody else, as one that changes nothing."""
        if outcome is Outcome.CORRUPT:
            self.driver.report_corrupt(transfer, rank, copies=corrupt)
        else:
            self.driver.report(transfer, rank, outcome=outcome)

    def endable(self, pick: int) -> Transfer:
        """One of the running copies that can be the next to end."""
        transfers = self.driver.endable(self.running)
        return transfers[pick % len(transfers)]

    def end(self, transfer: Transfer, outcome: Outcome = Outcome.OK) -> None:
        """A copy has ended, this way on every rank that has not reported it."""
        told = self.reports.get(transfer.transfer_id, {})
        self._end(transfer, worst_of([*told.values(), outcome]))
        self.driver.complete(transfer, outcome)
        self.settle()

    def end_all(self, outcome: Outcome = Outcome.OK) -> None:
        """Start and end every copy, oldest first, those that follow from it too, and run all sliced work."""
        self.turn()
        while self.queued or self.running:
            self.submit_all()
            while self.running:
                self.end(self.running[0], outcome)
            self.turn()

    def run_slice(self) -> None:
        """One slice of the work that is left."""
        self.driver.run_slice()
        self.settle()

    def run_slices(self) -> None:
        """Run all sliced work, one slice after the other."""
        while self.cache.has_work:
            self.run_slice()
        self.settle()

    def turn(self) -> None:
        """Run all sliced work and plan waiting leases again, as a host does between two steps of its engine."""
        self.run_slices()
        self.driver.retry_replans()
        self.run_slices()

    # Tiers.

    def place(self, stream: int, positions: Iterable[int], *, group: int = 0, tier: Tier) -> None:
        """Make blocks resident."""
        wanted = np.array(sorted(positions), np.int64)
        self.cache.placement.place(self.keys(stream), group=group, positions=wanted, tier=tier)
        self.driver.progress()
        found = self.cache.find_blocks(self.keys(stream), group=group, tier=tier)
        for position in wanted.tolist():
            require(found.present[position], "a block that was placed is not there")
            slot = int(found.slots[position])
            content = Content(group, self.streams.digest(stream, group, position))
            if self.contents.find(tier, slot) != content:
                self._checks.unused(slot, tier, leases=self.leases.values())
                self.contents.write(tier, [slot], content=content)

    def evict(self, stream: int, positions: Sequence[int], *, group: int = 0, tier: Tier) -> None:
        """Evict blocks by name; a refusal must change nothing."""
        before = self.cache.snapshot()
        try:
            self.cache.placement.evict(self.keys(stream), group=group, positions=positions, tier=tier)
        except UsageError:
            self.require_unchanged(before, "a refused eviction")
            raise
        self.driver.progress()

    def make_room(self, tier: Tier) -> None:
        """Evict every block of a tier that nobody holds."""
        for stream in range(len(FORKS)):
            for group in range(len(self.sizes)):
                found = self.cache.find_blocks(self.keys(stream), group=group, tier=tier)
                for position in np.flatnonzero(found.present).tolist():
                    with suppress(UsageError):
                        self.cache.placement.evict(self.keys(stream), group=group, positions=[position], tier=tier)
        self.driver.progress()

    def reset(self, *tiers: Tier) -> None:
        """Make tiers answer nothing (default: both)."""
        for tier in tiers or tuple(Tier):
            self.contents.forget(tier)
        self.driver.reset(tiers or tuple(Tier))

    def counts(self, tier: Tier) -> PoolCounts:
        """Slots of one tier by state."""
        return self.cache.pools()[tier]

    def in_flight(self, *, direction: Direction) -> list[Transfer]:
        """Copies of one direction that are queued or running, oldest first."""
        self.settle()
        every = sorted(self.queued + self.running, key=lambda t: t.transfer_id)
        return [t for t in every if t.direction is direction]

    # What holds.

    def check(self) -> None:
        """Everything that must hold after any step."""
        self.settle()
        self._checks.conserved(self.capacity)
        for record in self.leases.values():
            if record.state is LeaseState.READY:
                self._checks.readable(record, stream=self.stream_of(record))
        self._checks.findable()
        self._checks.single_flight(self.reports)
        self._accounts.check()

    def require_unchanged(self, before: object, what: str) -> None:
        """The snapshot is still `before` (law 2, invariant 5)."""
        require(self.cache.snapshot() == before, f"{what} changed something")

    def tear_down(self) -> None:
        """All leases leave, all copies end: nothing is held but by residence hints, and one request can have the whole
        pool (invariant 12).
        """
        self.turn()
        self.check()
        for _ in range(_PATIENCE):
            for record in list(self.leases.values()):
                if self.driver.has_lease(record):
                    self.driver.release(record)
            self.settle()
            self.end_all()
            if not self.driver.waiting and not self.leases:
                break
        waiting = self.driver.waiting
        require(not waiting, f"{waiting} wait for ever: a wake-up was lost", *self._what_stands_still())
        self.check()
        self._checks.nothing_held()
        self._fill_the_pool()

    def _what_stands_still(self) -> list[str]:
        """What might be the reason why nobody is let in, in words."""
        idle = [transfer for transfer in self.cache.transfers() if transfer not in self.running]
        reasons = {
            f"{len(idle)} copies that the cache wants were never started": idle,
            "slices were never run": self.cache.has_work,
            "leases whose loads failed were never planned again": self.cache.waits_for_capacity,
        }
        return [reason for reason, holds in reasons.items() if holds]

    def _fill_the_pool(self) -> None:
        """The longest prompt that fits is admitted into the pool, whatever is cached."""
        room = self.capacity[Tier.GPU] - self.counts(Tier.GPU).quarantined
        every = BlockKeys(
            range(_STRANGERS, _STRANGERS + 4 * STREAM_TOKENS), hash_block_size=self.geometry.hash_block_size
        )
        requests = [AcquireRequest(request_id="all", keys=every, prompt_tokens=n) for n in range(1, every.num_tokens)]
        fitting = [request for request in requests if self._checks.slots_for(request, length=0) <= room]
        if not fitting:
            return
        record = self.cache.try_acquire(fitting[-1])
        if not isinstance(record, LeaseRecord):
            raise BrokenInvariant(f"one request cannot have the whole pool: {record}, {room} slots")
        self.cache.run_slices()
        require(not record.unnamed_claims, "claims were never named")
        self.cache.release(record)
        self._checks.conserved(self.capacity)

    def _end(self, transfer: Transfer, outcome: Outcome) -> None:
        """What a copy's end means for the slots; the cache is told afterwards."""
        self.seen[f"{transfer.direction.value} {outcome.value}"] += 1
        (self.running if transfer in self.running else self.queued).remove(transfer)
        self.contents.end_copy(transfer, outcome, fresh=self._is_current(transfer))
        self._ended[transfer.transfer_id] = outcome
        self.look()

    def _adopt(self, record: LeaseRecord) -> None:
        tokens = record.keys.tokens(0, record.keys.num_tokens).tolist()
        self.leases[record.lease_id] = record
        self._stream_of[record.lease_id] = self.streams.stream_of(tokens)
        self._stamps[record.lease_id] = self.contents.resets
        self._accounts.open(record)

    def _note_planned(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            self._planned.setdefault(transfer.transfer_id, self.contents.resets)

    def _is_current(self, transfer: Transfer) -> bool:
        """Whether no tier was reset since its lease was admitted, or since it was planned if no lease asked for it."""
        stamp = self._stamps.get(transfer.owner, self._planned[transfer.transfer_id])
        return stamp == self.contents.resets

    def _waiters(self, transfer: Transfer) -> list[LeaseRecord]:
        return [self.leases[i] for i in transfer.waiters if i in self.leases and transfer.direction is Direction.LOAD]
