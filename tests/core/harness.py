"""A host that steps a `CacheState`, and beside it a model of what every slot really holds.

The model knows nothing of the core's reasoning. It follows the bytes: a slot holds what compute or a copy last wrote
there, and garbage while a copy into it runs. `Host.check()` then asks, after any step, whether what leases read, what
transfers read and what a lookup can find is the right content, and whether nobody was written over (laws 3, 4 and 5).

Prompts are prefixes of *streams*, fixed token sequences that share their beginnings, so that content has few names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from aiokv.core.cache import CacheState
from aiokv.core.counters import Closing, Phase, Source
from aiokv.core.inflight import NOBODY, Transfer, TransferState
from aiokv.core.lease_table import AcquireRequest, LeaseRecord, LeaseState
from aiokv.core.pool import PoolCounts
from aiokv.core.store_policy import EAGER_STORES, StoreSettings
from aiokv.errors import CapacityError, UsageError
from aiokv.model.events import BlockRemoved, BlockStored, TierCleared
from aiokv.model.ids import Direction, Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import Deferred, Hit, Outcome
from aiokv.model.spec import CacheGeometry, ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from aiokv.testing.oracle import exhaustive_hit, exhaustive_sources

__all__ = ["Content", "Host", "geometry_of", "state_of", "stream_tokens"]

STREAM_TOKENS: Final = 96
FORKS: Final = (0, 0, 20)
"""Stream s > 0 shares its first FORKS[s] tokens with stream 0."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a slot holds: the KV, or the state, of one block. `fresh`: from the current epoch, so it may be found."""

    group: int
    digest: bytes
    fresh: bool = True


def stream_tokens(stream: int, start: int, stop: int) -> list[int]:
    """Tokens `[start, stop)` of a stream."""
    return [i if stream == 0 or i < FORKS[stream] else 1000 * stream + i for i in range(start, stop)]


def geometry_of(*groups: GroupSpec, hash_block_size: int = 4) -> CacheGeometry:
    """A geometry of these groups."""
    return CacheGeometry(groups=groups, hash_block_size=hash_block_size)


def state_of(thing: LeaseRecord | Transfer) -> LeaseState | TransferState:
    """Its state; a call, so that a type checker does not take it for settled."""
    return thing.state


class Host:
    """Drives one cache and keeps the books about its content."""

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        gpu_blocks: int,
        cpu_blocks: int = 0,
        watermark: float = 0.0,
        slice_blocks: int = 1024,
        stores: StoreSettings = EAGER_STORES,
        world_size: int = 1,
    ) -> None:
        self.geometry = geometry
        self.cache = CacheState(
            geometry,
            gpu_blocks=gpu_blocks,
            cpu_blocks=cpu_blocks,
            watermark=watermark,
            slice_blocks=slice_blocks,
            stores=stores,
            world_size=world_size,
        )
        self.reports: dict[int, dict[int, Outcome]] = {}
        self.sizes = [geometry.effective_block_size(i) for i in range(len(geometry.groups))]
        self.capacity = {Tier.GPU: gpu_blocks - 1, Tier.CPU: cpu_blocks}
        self.content: dict[Tier, dict[int, Content]] = {Tier.GPU: {}, Tier.CPU: {}}
        self.leases: dict[int, LeaseRecord] = {}
        self.preempted: list[tuple[AcquireRequest, int]] = []
        self.queued: list[Transfer] = []
        self.running: list[Transfer] = []
        self.seen: Counter[str] = Counter()
        self.lost_slots: set[tuple[Tier, int]] = set()
        self._keys: dict[tuple[int, int], BlockKeys] = {}
        self._digests: dict[tuple[int, int], list[bytes]] = {}
        self._streams: dict[int, int] = {}
        self._owned: set[int] = set()
        self._planned: dict[int, tuple[int, int]] = {}
        self._stamps: dict[int, tuple[int, int]] = {}
        self._resets = {Tier.GPU: 0, Tier.CPU: 0}
        self._arrived: dict[int, set[tuple[int, int]]] = {}
        self._expected: Counter[tuple[Source, Phase]] = Counter()
        self._attributed: set[int] = set()
        self._failed: set[int] = set()
        self._counted: dict[object, int] = {}
        self._places: dict[tuple[int, bytes], tuple[int, int]] = {}
        self._published: set[tuple[Tier, int, bytes]] = set()
        self.cache.events.is_on = True

    # Names of content.

    def keys(self, stream: int, num_tokens: int = STREAM_TOKENS) -> BlockKeys:
        """The keys of a prompt; the same object each time."""
        if (stream, num_tokens) not in self._keys:
            tokens = stream_tokens(stream, 0, num_tokens)
            self._keys[stream, num_tokens] = BlockKeys(tokens, hash_block_size=self.geometry.hash_block_size)
        return self._keys[stream, num_tokens]

    def digests(self, stream: int, group: int) -> list[bytes]:
        """The hashes of all blocks of a stream in one group."""
        if (stream, group) not in self._digests:
            step = self.geometry.hashes_per_block(group)
            keys = self.keys(stream)
            rows = keys.digests(step, 0, keys.num_blocks // step)
            self._digests[stream, group] = [row.tobytes() for row in rows]
        return self._digests[stream, group]

    def digest(self, stream: int, group: int, position: int) -> bytes:
        """The hash of one block."""
        return self.digests(stream, group)[position]

    def names(self, transfer: Transfer) -> list[bytes]:
        """The hashes of the blocks that a transfer brings, as taken down when it was planned."""
        rows = transfer.names.digests(self.geometry.hashes_per_block(transfer.group))
        return [row.tobytes() for row in rows]

    def layout(self, stream: int) -> dict[str, str]:
        """Per group one letter per block: g GPU, c CPU, b both, - neither, as a lookup would find them."""
        return {spec.name: self.letters(stream, index) for index, spec in enumerate(self.geometry.groups)}

    def letters(self, stream: int, group: int = 0) -> str:
        """Where the blocks of one group of a stream are findable."""
        gpu = self.cache.find_blocks(self.keys(stream), group=group, tier=Tier.GPU)
        cpu = self.cache.find_blocks(self.keys(stream), group=group, tier=Tier.CPU)
        return "".join("-gcb"[g + 2 * c] for g, c in zip(gpu.present, cpu.present, strict=True))

    # Requests.

    def acquire(
        self,
        stream: int,
        num_tokens: int,
        *,
        reserve_tokens: int = 0,
        first_chunk: int | None = None,
        align: int = 1,
        request_id: str | None = None,
    ) -> LeaseRecord | Deferred:
        """Ask for admission; what is promised is compared with the oracle, a refusal must change nothing."""
        request = AcquireRequest(
            request_id=request_id or f"s{stream}n{num_tokens}",
            keys=self.keys(stream, num_tokens),
            prompt_tokens=num_tokens,
            reserve_tokens=reserve_tokens,
            first_chunk=first_chunk,
            align=align,
        )
        return self._ask(request, stream)

    def preempt(self, record: LeaseRecord) -> None:
        """The request gives its blocks back and waits in `preempted`."""
        self.preempted.append((record.resumption(), self._streams[record.lease_id]))
        self.cache.finish(record, how=Closing.PREEMPTED)
        self.seen["preempted"] += 1
        self.settle()

    def fork(self, record: LeaseRecord, num_tokens: int) -> LeaseRecord | Deferred:
        """A second lease over the first tokens of a lease; a refusal must change nothing."""
        before = self.cache.snapshot()
        name = f"{record.request.request_id}f{num_tokens}"
        try:
            request = self.cache.forks.plan(record, request_id=name, num_tokens=num_tokens)
            forked = self.cache.forks.try_fork(record, request)
        except (UsageError, CapacityError):
            assert self.cache.snapshot() == before, "a refused call changed something"
            raise
        if isinstance(forked, Deferred):
            assert self.cache.snapshot() == before, "a deferred fork changed something"
            self.seen["fork deferred"] += 1
            return forked
        self._adopt(forked, self._streams[record.lease_id])
        self._owned.add(forked.lease_id)
        self._check_fork(forked, record)
        self.settle()
        return forked

    def _check_fork(self, forked: LeaseRecord, parent: LeaseRecord) -> None:
        """It starts at the last length at which its parent holds all that is read, by the masks, and shares that."""
        tokens = min(forked.request.prompt_tokens, parent.confirmed)
        step = self.geometry.alignment(forked.request.align)
        valid = [length for length in range(0, tokens + 1, step) if length == 0 or self._holds(parent, length)]
        if any(spec.lookahead for spec in self.geometry.groups):
            valid = [length for length in valid if length <= forked.length]
        assert forked.length in (valid[-1], 0), (forked.length, valid)
        assert forked.hit == _hit(Counter(gpu=forked.length, compute=forked.request.prompt_tokens - forked.length))
        for mine, theirs, spec, block in zip(
            forked.tables, parent.tables, self.geometry.groups, self.sizes, strict=True
        ):
            for position in range(forked.length // block):
                shared = mine.view()[position] == theirs.view()[position]
                assert shared or not _covers(spec, block, forked.length, position)
        self.seen["forked"] += 1
        self.seen["forked with a prefix"] += forked.length > 0

    def _holds(self, record: LeaseRecord, length: int) -> bool:
        return all(
            record.tables[group].view()[position] or not _covers(spec, block, length, position)
            for group, (spec, block) in enumerate(zip(self.geometry.groups, self.sizes, strict=True))
            for position in range(length // block)
        )

    def resume(self, pick: int) -> LeaseRecord | Deferred:
        """A preempted request asks for all its tokens again."""
        request, stream = self.preempted[pick]
        assert request.keys.tokens(0, request.prompt_tokens).tolist() == stream_tokens(stream, 0, request.prompt_tokens)
        assert request.phase is Phase.RESUMED
        record = self._ask(request, stream)
        if isinstance(record, LeaseRecord):
            del self.preempted[pick]
            self._owned.add(record.lease_id)
            self.seen["resumed"] += 1
            self.seen["resumed with a prefix"] += record.length > 0
        return record

    def _ask(self, request: AcquireRequest, stream: int) -> LeaseRecord | Deferred:
        layout = self._reachable(stream)
        before = self.cache.snapshot()
        busy = self.cache.live_leases or self.cache.unfinished_transfers
        try:
            record = self.cache.try_acquire(request)
        except CapacityError:
            assert self.cache.snapshot() == before, "a refused call changed something"
            self.seen["never fits"] += 1
            raise
        if isinstance(record, Deferred):
            assert self.cache.snapshot() == before, "a deferred request changed something"
            assert busy, f"deferred by {record.reason} though nothing is held"
            self.seen[f"deferred {record.reason.value}"] += 1
            return record
        self._adopt(record, stream)
        self._check_promise(record, layout)
        self.settle()
        return record

    def admit(
        self,
        stream: int,
        num_tokens: int,
        *,
        reserve_tokens: int = 0,
        first_chunk: int | None = None,
        request_id: str | None = None,
    ) -> LeaseRecord:
        """`acquire`, which must succeed."""
        record = self.acquire(
            stream, num_tokens, reserve_tokens=reserve_tokens, first_chunk=first_chunk, request_id=request_id
        )
        assert isinstance(record, LeaseRecord), record
        return record

    def extend(self, record: LeaseRecord, tokens: int) -> int | Deferred:
        """Ask for more room; a refusal must change nothing."""
        before = self.cache.snapshot()
        try:
            granted = self.cache.try_extend(record, tokens)
        except CapacityError:
            assert self.cache.snapshot() == before, "a refused call changed something"
            raise
        if isinstance(granted, Deferred):
            assert self.cache.snapshot() == before, "a deferred extension changed something"
            self.seen["extension deferred"] += 1
        return granted

    def undo_extend(self, record: LeaseRecord, capacity: Sequence[int]) -> None:
        """Nobody took the extension that came after `capacity`."""
        self.cache.undo_extend(record, capacity)
        self.seen["extension undone"] += 1

    def append(self, record: LeaseRecord, tokens: int) -> None:
        """The request's stream goes on."""
        start = record.keys.num_tokens
        stop = min(start + tokens, STREAM_TOKENS)
        if record.lease_id not in self._owned:
            record.keys = record.keys.copy()
            self._owned.add(record.lease_id)
        record.keys.append(stream_tokens(self._streams[record.lease_id], start, stop))

    def truncate(self, record: LeaseRecord, num_tokens: int, *, stream: int | None = None) -> int | Deferred:
        """Forget the tokens from `num_tokens` on; what follows is of `stream`. A refusal must change nothing."""
        before, kept = self.cache.snapshot(), (record.confirmed, record.keys.num_tokens)
        in_flight = [(transfer, self.names(transfer)) for transfer in self.cache.transfers()]
        try:
            confirmed = self.cache.truncations.truncate(record, num_tokens)
        except (UsageError, CapacityError):
            assert (self.cache.snapshot(), record.confirmed, record.keys.num_tokens) == (before, *kept)
            raise
        assert all(self.names(transfer) == names for transfer, names in in_flight), "a copy lost its names"
        if isinstance(confirmed, Deferred):
            assert (self.cache.snapshot(), record.confirmed, record.keys.num_tokens) == (before, *kept)
            self.seen["truncation deferred"] += 1
            return confirmed
        assert record.length <= confirmed == record.confirmed <= num_tokens == record.keys.num_tokens
        if confirmed < kept[0]:
            self._check_states(record)
        self._owned.add(record.lease_id)
        if stream is not None:
            mine = stream_tokens(self._streams[record.lease_id], 0, num_tokens)
            if mine == stream_tokens(stream, 0, num_tokens):
                self._streams[record.lease_id] = stream
        self.seen["truncated"] += 1
        self.seen["truncated what was written"] += confirmed < kept[0]
        self.settle()
        return confirmed

    def confirm(
        self,
        record: LeaseRecord,
        num_tokens: int,
        *,
        publish_to: int | None = None,
        states: Sequence[int] = (),
        after: object = None,
    ) -> None:
        """Compute up to `num_tokens` tokens and say so."""
        if record.state is LeaseState.READY and num_tokens > record.confirmed:
            self._compute(record, num_tokens, states=states)
        self.cache.confirm(record, num_tokens, publish_to=publish_to, states=states, after=after)
        self.settle()

    def release(self, record: LeaseRecord) -> None:
        """The request leaves."""
        self.cache.release(record)
        self.settle()

    def finish(self, record: LeaseRecord) -> None:
        """The request is complete."""
        self.cache.finish(record)
        self.settle()

    # Copies.

    def settle(self) -> None:
        """Take what the core wants done out of its outbox, and follow who became ready or left."""
        taken = self.cache.outbox.take_submissions()
        now = (self._resets[Tier.GPU], self._resets[Tier.CPU])
        self._planned.update(dict.fromkeys((transfer.transfer_id for transfer in taken), now))
        self.seen["stores without a lease"] += sum(transfer.owner == NOBODY for transfer in taken)
        self.queued += taken
        self.cache.outbox.take_settled()
        self.queued = [t for t in self.queued if t.state is TransferState.QUEUED]
        for transfer in self.cache.transfers():
            if transfer.state is TransferState.DONE:
                self._note_arrival(transfer)
        self._replay_events()
        for lease_id, record in list(self.leases.items()):
            if record.state is LeaseState.RELEASED:
                self._attribute(record)
                del self.leases[lease_id]
            elif record.state is LeaseState.READY:
                self._attribute(record)

    def submit(self, transfer: Transfer) -> None:
        """Start a copy: from now on its targets hold garbage."""
        self.queued.remove(transfer)
        self.cache.mark_submitted(transfer)
        self.running.append(transfer)
        source, target = self._tiers(transfer)
        self._check_sources(transfer)
        for slot in transfer.bound_targets.tolist():
            if target is Tier.GPU:
                self._check_writable(slot, readers={id(r) for r in self._waiters(transfer)}, writer=transfer)
            self.content[target].pop(slot, None)
        assert not {(source, s) for s in transfer.sources.tolist()} & self.lost_slots
        assert not {(target, s) for s in transfer.bound_targets.tolist()} & self.lost_slots

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
        if len(told) == self.cache.world_size:
            self._end(transfer, _worst(told.values()), tell=lambda: self._report(transfer, rank, outcome, corrupt))
            return
        held = self.cache.audit().pins
        self._report(transfer, rank, outcome, corrupt)
        assert state_of(transfer) is TransferState.SUBMITTED
        assert held == self.cache.audit().pins
        self.settle()

    def _report(self, transfer: Transfer, rank: int, outcome: Outcome, corrupt: Collection[int]) -> None:
        self.cache.report(transfer.transfer_id, rank, outcome, corrupt=corrupt)

    def end(self, transfer: Transfer, outcome: Outcome = Outcome.OK, *, corrupt: Collection[int] = ()) -> None:
        """A copy has ended, this way on every rank that has not reported it."""
        told = self.reports.get(transfer.transfer_id, {})
        decided = _worst([*told.values(), outcome])
        self._end(transfer, decided, tell=lambda: self.cache.complete(transfer.transfer_id, outcome, corrupt=corrupt))

    def _end(self, transfer: Transfer, outcome: Outcome, *, tell: Callable[[], None]) -> None:
        (self.running if transfer in self.running else self.queued).remove(transfer)
        source, target = self._tiers(transfer)
        if outcome is Outcome.OK:
            self._check_sources(transfer)
            fresh = self._is_current(transfer)
            for name, slot in zip(self.names(transfer), transfer.bound_targets.tolist(), strict=True):
                self.content[target][slot] = Content(transfer.group, name, fresh=fresh)
        if outcome is Outcome.LOST:
            self.lost_slots |= {(target, s) for s in transfer.bound_targets.tolist()}
            if transfer.direction is Direction.LOAD:
                self.lost_slots |= {(source, s) for s in transfer.sources.tolist()}
        if outcome is Outcome.OK:
            self._note_arrival(transfer)
        else:
            self._failed |= {record.lease_id for record in self._waiters(transfer)}
        tell()
        self.settle()

    def end_all(self, outcome: Outcome = Outcome.OK) -> None:
        """Start and end every copy, oldest first, those that follow from it too, and run all sliced work."""
        self.turn()
        while self.queued or self.running:
            self.submit_all()
            while self.running:
                self.end(self.running[0], outcome)
            self.turn()

    def turn(self) -> None:
        """Run all sliced work and plan waiting leases again, as a host does between two steps of its engine."""
        self.run_slices()
        self.cache.retry_replans()
        self.run_slices()

    def run_slices(self) -> None:
        """Run all sliced work, one slice after the other."""
        while self.cache.has_work:
            self.cache.run_slice()
            self.settle()
        self.settle()

    # Tiers.

    def place(self, stream: int, positions: Iterable[int], *, group: int = 0, tier: Tier) -> None:
        """Make blocks resident."""
        wanted = np.array(sorted(positions), np.int64)
        self.cache.placement.place(self.keys(stream), group=group, positions=wanted, tier=tier)
        found = self.cache.find_blocks(self.keys(stream), group=group, tier=tier)
        for position in wanted.tolist():
            assert found.present[position]
            slot = int(found.slots[position])
            held = self.content[tier].get(slot)
            name = self.digest(stream, group, position)
            if held is None or (held.group, held.digest) != (group, name) or not held.fresh:
                self._check_unused(slot, tier)
                self.content[tier][slot] = Content(group, name)

    def evict(self, stream: int, positions: Sequence[int], *, group: int = 0, tier: Tier) -> None:
        """Evict blocks by name; a refusal must change nothing."""
        before = self.cache.snapshot()
        try:
            self.cache.placement.evict(self.keys(stream), group=group, positions=positions, tier=tier)
        except UsageError:
            assert self.cache.snapshot() == before, "a refused call changed something"
            raise

    def make_room(self, tier: Tier) -> None:
        """Evict every block of a tier that nobody holds."""
        for stream in range(len(FORKS)):
            for group in range(len(self.sizes)):
                found = self.cache.find_blocks(self.keys(stream), group=group, tier=tier)
                for position in np.flatnonzero(found.present).tolist():
                    with suppress(UsageError):
                        self.cache.placement.evict(self.keys(stream), group=group, positions=[position], tier=tier)

    def reset(self, *tiers: Tier) -> None:
        """Make tiers answer nothing (default: both)."""
        for tier in tiers or tuple(Tier):
            self._resets[tier] += 1
            self.content[tier] = {slot: replace(held, fresh=False) for slot, held in self.content[tier].items()}
        self.cache.reset(tiers or tuple(Tier))

    def counts(self, tier: Tier) -> PoolCounts:
        """Slots of one tier by state."""
        return self.cache.pools()[tier]

    # Checks.

    def check(self) -> None:
        """Everything that must hold after any step."""
        self.settle()
        violations = self.cache.audit().violations
        assert not violations, violations
        for tier, counts in self.cache.pools().items():
            states = (counts.free, counts.reserved, counts.resident, counts.quarantined)
            assert sum(states) == self.capacity[tier], (tier, counts)
            assert min(*states, counts.evictable, counts.claimed) >= 0, (tier, counts)
        for record in self.leases.values():
            if record.state is LeaseState.READY:
                self._check_readable(record)
        self._check_findable()
        self._check_single_flight()
        self._check_counters()

    def tear_down(self) -> None:
        """All leases leave, all copies end: nothing is held, and one request can have the whole pool (invariant 12)."""
        self.turn()
        self.check()
        for record in list(self.leases.values()):
            self.cache.release(record)
        self.settle()
        self.end_all()
        self.check()
        audit = self.cache.audit()
        assert not audit.leases, audit.leases
        assert not audit.pins, audit.pins
        assert not audit.reservations, audit.reservations
        for tier, counts in self.cache.pools().items():
            assert counts.reserved == 0, (tier, counts)
        self._fill_the_pool()

    def in_flight(self, *, direction: Direction) -> list[Transfer]:
        """Copies of one direction that are queued or running, oldest first."""
        self.settle()
        every = sorted(self.queued + self.running, key=lambda t: t.transfer_id)
        return [t for t in every if t.direction is direction]

    def _fill_the_pool(self) -> None:
        """The longest prompt that fits is admitted into the pool, whatever is cached."""
        room = self.capacity[Tier.GPU] - self.counts(Tier.GPU).quarantined
        tokens = 0
        while self._slots_for(tokens + 1, length=0) <= room and tokens + 1 < 4 * STREAM_TOKENS:
            tokens += 1
        if not tokens:
            return
        keys = BlockKeys(range(9000, 9000 + tokens), hash_block_size=self.geometry.hash_block_size)
        record = self.cache.try_acquire(AcquireRequest(request_id="whole pool", keys=keys, prompt_tokens=tokens))
        assert isinstance(record, LeaseRecord), (record, tokens, room)
        self.cache.run_slices()
        assert not record.unnamed_claims
        assert not self.cache.audit().violations
        self.cache.release(record)

    def _slots_for(self, num_tokens: int, *, length: int, reserve: int = 0, first_chunk: int | None = None) -> int:
        """GPU slots that a request holds at once, with a prefix of `length` tokens."""
        total = 0
        for spec, block in zip(self.geometry.groups, self.sizes, strict=True):
            room = num_tokens + reserve
            if first_chunk is not None and isinstance(spec, SlidingWindow | ChunkedLocal):
                room = min(room, length + first_chunk)
            total += sum(_covers(spec, block, length, position) for position in range(length // block))
            total += 2 if isinstance(spec, RecurrentState) else -(-room // block) - length // block
        return total

    def _adopt(self, record: LeaseRecord, stream: int) -> None:
        self.leases[record.lease_id] = record
        self._streams[record.lease_id] = stream
        self._stamps[record.lease_id] = (self._resets[Tier.GPU], self._resets[Tier.CPU])
        self._arrived[record.lease_id] = set()

    def _is_current(self, transfer: Transfer) -> bool:
        """Whether no tier was reset since its lease was admitted, or since it was planned if no lease asked for it."""
        stamp = self._stamps.get(transfer.owner, self._planned[transfer.transfer_id])
        return stamp == (self._resets[Tier.GPU], self._resets[Tier.CPU])

    def _reachable(self, stream: int) -> dict[str, str]:
        layout = self.layout(stream)
        if self.cache.is_backend_lost:
            layout = {name: letters.replace("c", "-").replace("b", "g") for name, letters in layout.items()}
        return layout

    def _check_promise(self, record: LeaseRecord, layout: dict[str, str]) -> None:
        request = record.request
        length = exhaustive_hit(self.geometry, request.prompt_tokens, layout, align=request.align)
        needed = self._slots_for(
            request.prompt_tokens, length=length, reserve=request.reserve_tokens, first_chunk=request.first_chunk
        )
        if needed > self.capacity[Tier.GPU] - self.counts(Tier.GPU).quarantined:
            assert record.length == 0, "a prefix that the pool cannot hold is not used"
            self.seen["prefix too large"] += 1
            return
        assert record.length == length, f"hit {record.length}, the oracle says {length}"
        sources = exhaustive_sources(self.geometry, request.prompt_tokens, layout, align=request.align)
        totals: Counter[str] = Counter(sources)
        assert record.hit == _hit(totals), (record.hit, totals)
        self.seen["hit" if length else "miss"] += 1
        self.seen["loads"] += record.state is LeaseState.LOADING
        self.seen["joins"] += any(t.owner != record.lease_id for t in self._waited_for(record))

    def _waited_for(self, record: LeaseRecord) -> list[Transfer]:
        return [t for t in self.cache.transfers() if t.transfer_id in record.waiting]

    def _waiters(self, transfer: Transfer) -> list[LeaseRecord]:
        return [self.leases[i] for i in transfer.waiters if i in self.leases and transfer.direction is Direction.LOAD]

    def _shared(self, record: LeaseRecord, transfer: Transfer) -> set[tuple[int, int]]:
        """Which blocks of a lease this load brings; those of slices that were completed before it came are hits."""
        table = record.tables[transfer.group].view()
        copies = zip(transfer.bound_targets.tolist(), transfer.positions.tolist(), strict=True)
        targets = dict(list(copies)[: transfer.open_copies])
        return {(transfer.group, targets[slot]) for slot in table.tolist() if slot in targets}

    def _note_arrival(self, transfer: Transfer) -> None:
        """Its copies have ended well; who joins it while it is completed in slices has them too."""
        for record in self._waiters(transfer):
            self._arrived[record.lease_id] |= self._shared(record, transfer)

    def _check_states(self, record: LeaseRecord) -> None:
        """The state after exactly the confirmed tokens is in the table of every recurrent group."""
        for group in record.state_slots:
            position = record.confirmed // self.sizes[group] - 1
            if position >= 0:
                held = self.content[Tier.GPU].get(int(record.tables[group].view()[position]))
                name = self.digest(self._streams[record.lease_id], group, position)
                assert held is not None, f"the state of {record.confirmed} tokens is garbage"
                assert (held.group, held.digest) == (group, name)

    def _tiers(self, transfer: Transfer) -> tuple[Tier, Tier]:
        return (Tier.CPU, Tier.GPU) if transfer.direction is Direction.LOAD else (Tier.GPU, Tier.CPU)

    def _check_sources(self, transfer: Transfer) -> None:
        source, _ = self._tiers(transfer)
        for name, slot in zip(self.names(transfer), transfer.sources.tolist(), strict=True):
            held = self.content[source].get(slot)
            assert held is not None, f"{transfer.direction.value} reads garbage in {source.value} slot {slot}"
            assert (held.group, held.digest) == (transfer.group, name), f"slot {slot} holds another block"

    def _check_unused(self, slot: int, tier: Tier) -> None:
        """Nobody holds this slot of a tier."""
        if tier is Tier.GPU:
            self._check_writable(slot, readers=set(), writer=None)
            return
        for transfer in self.cache.transfers():
            cpu = transfer.sources if transfer.direction is Direction.LOAD else transfer.bound_targets
            assert slot not in cpu[: transfer.open_copies].tolist()

    def _check_writable(self, slot: int, *, readers: set[int], writer: Transfer | None) -> None:
        """Nobody but `readers` (ids of records) holds this GPU slot, no copy but `writer` touches it."""
        for record in self.leases.values():
            tables = [*record.tables, *record.state_slots.values()]
            if any(slot in table.view().tolist() for table in tables):
                assert id(record) in readers, f"GPU slot {slot} is written while {record.request.request_id} holds it"
        for transfer in self.cache.transfers():
            gpu = transfer.targets if transfer.direction is Direction.LOAD else transfer.sources
            if transfer is not writer and gpu is not None:
                assert slot not in gpu[: transfer.open_copies].tolist(), f"GPU slot {slot} is written during a copy"
        assert (Tier.GPU, slot) not in self.lost_slots, f"GPU slot {slot} is lost and used again"

    def _compute(self, record: LeaseRecord, num_tokens: int, *, states: Sequence[int]) -> None:
        """The forward pass: writes the blocks of tokens `[confirmed, num_tokens)`."""
        written: dict[int, Content | None] = {}
        for group in range(len(self.sizes)):
            written |= self._written(record, group=group, stop=num_tokens, states=states)
        findable = self._findable_slots()
        for slot, held in written.items():
            assert slot, "there is no slot to compute into"
            assert slot not in findable, f"GPU slot {slot} is findable and written"
            self._check_writable(slot, readers={id(record)}, writer=None)
            self.content[Tier.GPU].pop(slot, None)
            if held is not None:
                self.content[Tier.GPU][slot] = held

    def _written(
        self, record: LeaseRecord, *, group: int, stop: int, states: Sequence[int]
    ) -> dict[int, Content | None]:
        """What each slot of one group holds once tokens `[confirmed, stop)` are computed; None for part of a block."""
        stream, fresh = self._streams[record.lease_id], self._stamps[record.lease_id][0] == self._resets[Tier.GPU]
        block = self.sizes[group]
        written: dict[int, Content | None] = {}
        if group in record.state_slots:
            working, capture = self.cache.state_slots(record, group=group).tolist()
            written[working] = None
            for length in states:
                written[capture] = Content(group, self.digest(stream, group, length // block - 1), fresh=fresh)
            return written
        for position in range(record.confirmed // block, -(-stop // block)):
            full = (position + 1) * block <= stop
            content = Content(group, self.digest(stream, group, position), fresh=fresh)
            written[self._slot(record, group, position)] = content if full else None
        return written

    def _slot(self, record: LeaseRecord, group: int, position: int) -> int:
        """The slot of a block; reads the table, which finishes the naming, only if it has no name yet."""
        slot = int(record.tables[group].view()[position])
        return slot or int(self.cache.block_ids(record, group=group)[position])

    def _findable_slots(self) -> set[int]:
        slots: set[int] = set()
        for stream in range(len(FORKS)):
            for group in range(len(self.sizes)):
                found = self.cache.find_blocks(self.keys(stream), group=group, tier=Tier.GPU)
                slots |= set(found.slots[found.present].tolist())
        return slots

    def _check_readable(self, record: LeaseRecord) -> None:
        """All that queries after the confirmed tokens read is held, and has the right content."""
        stream = self._streams[record.lease_id]
        for group, (spec, block) in enumerate(zip(self.geometry.groups, self.sizes, strict=True)):
            if isinstance(spec, RecurrentState) and record.confirmed != record.length:
                continue
            table = record.tables[group].view().tolist()
            for position in range(record.confirmed // block):
                if not _covers(spec, block, record.confirmed, position):
                    continue
                held = self.content[Tier.GPU].get(table[position])
                where = f"{record.request.request_id}: group {group}, block {position}, slot {table[position]}"
                assert held is not None, f"{where} holds garbage"
                assert (held.group, held.digest) == (group, self.digest(stream, group, position)), f"{where}: foreign"

    def _check_findable(self) -> None:
        """Every block that a lookup can find is there, valid, and of this epoch (law 3); the events have said so."""
        for stream in range(len(FORKS)):
            for group in range(len(self.sizes)):
                names = self.digests(stream, group)
                for tier in self.cache.pools():
                    found = self.cache.find_blocks(self.keys(stream), group=group, tier=tier)
                    for position in np.flatnonzero(found.present).tolist():
                        held = self.content[tier].get(int(found.slots[position]))
                        wanted = Content(group, names[position])
                        assert held == wanted, f"stream {stream}, group {group}, block {position}: {tier.value} {held}"
                    told = [(tier, group, name) in self._published for name in names]
                    assert told == found.present.tolist(), "the events do not rebuild the index"

    def _replay_events(self) -> None:
        """Follow the cache events: each is a dense run of a stream, and says what has really changed (invariant 11)."""
        for event in self.cache.events.take():
            match event:
                case TierCleared(tier=tier):
                    self._published = {entry for entry in self._published if entry[0] is not tier}
                case BlockRemoved(tier=tier, group=name, block_hashes=hashes):
                    gone = {(tier, self.geometry.group_index(name), one) for one in hashes}
                    assert gone <= self._published, "removed though it was not there"
                    self._published -= gone
                case BlockStored():
                    self._check_run(event)

    def _check_run(self, event: BlockStored) -> None:
        group = self.geometry.group_index(event.group)
        block = self.sizes[group]
        stream, last = self._place_of(group, event.block_hashes[-1])
        first = last - len(event.block_hashes) + 1
        positions = range(first, last + 1)
        assert event.block_hashes == tuple(self.digest(stream, group, position) for position in positions)
        assert event.parent_hash == (self.digest(stream, group, first - 1) if first else None)
        assert list(event.token_ids) == stream_tokens(stream, first * block, positions.stop * block)
        new = {(event.tier, group, one) for one in event.block_hashes}
        assert not new & self._published, "stored though it was there"
        self._published |= new

    def _place_of(self, group: int, digest: bytes) -> tuple[int, int]:
        """A stream and the position of the block with this hash."""
        if (group, digest) not in self._places:
            for stream in range(len(FORKS)):
                for position in range(STREAM_TOKENS // self.sizes[group]):
                    self._places.setdefault((group, self.digest(stream, group, position)), (stream, position))
        return self._places[group, digest]

    def _check_single_flight(self) -> None:
        """One copy per CPU block at a time, and one store per GPU block; a load that is known to fail is none."""
        reading: Counter[tuple[Direction, int]] = Counter()
        for transfer in self.cache.transfers():
            told = self.reports.get(transfer.transfer_id, {})
            is_doomed = transfer.direction is Direction.LOAD and _worst(told.values()) is not Outcome.OK
            if transfer.state in (TransferState.QUEUED, TransferState.SUBMITTED) and not is_doomed:
                reading.update((transfer.direction, slot) for slot in transfer.sources.tolist())
        assert max(reading.values(), default=0) <= 1, f"copied twice at a time: {reading}"

    def _attribute(self, record: LeaseRecord) -> None:
        """Follow what the counters must say of a lease that became ready or left."""
        if record.lease_id in self._attributed:
            return
        self._attributed.add(record.lease_id)
        hit = record.hit
        if record.state is LeaseState.READY and record.lease_id in self._failed:
            self.seen["replanned"] += 1
            self.seen["replanned to less"] += record.length < record.hit.gpu_tokens + record.hit.cpu_tokens
            self.seen["replanned with loads"] += record.delivered.cpu_tokens > 0
            hit = self._outcome(record)
            assert record.delivered == hit, (record.delivered, hit)
        elif record.state is LeaseState.READY:
            assert record.delivered == record.hit
        else:
            hit = record.delivered
            self.seen["left while loading"] += 1
        phase = record.request.phase
        self._expected[Source.GPU, phase] += hit.gpu_tokens
        self._expected[Source.CPU, phase] += hit.cpu_tokens
        self._expected[Source.COMPUTE, phase] += hit.compute_tokens

    def _outcome(self, record: LeaseRecord) -> Hit:
        """Where the tokens of a lease came from, by the copies that arrived for it."""
        totals: Counter[str] = Counter(compute=record.request.prompt_tokens - record.length)
        following = "gpu"
        for token in reversed(range(record.length)):
            covered = [
                (group, token // block) in self._arrived[record.lease_id]
                for group, (spec, block) in enumerate(zip(self.geometry.groups, self.sizes, strict=True))
                if _covers(spec, block, record.length, token // block)
            ]
            if covered:
                following = "cpu" if any(covered) else "gpu"
            totals[following] += 1
        return _hit(totals)

    def _check_counters(self) -> None:
        """Counters never fall, and the tokens of all admitted requests are attributed by source (invariant 13)."""
        totals = Counter(self.cache.counters.prompt_tokens)
        assert +totals == +self._expected, (totals, self._expected)
        now = _flattened(self.cache)
        fallen = {name: value for name, value in self._counted.items() if now.get(name, 0) < value}
        assert not fallen, fallen
        self._counted = now


def _covers(spec: GroupSpec, block: int, length: int, position: int) -> bool:
    """By the mask: does the query at `length`, or the state after it, need a token of this block before `length`?"""
    tokens = range(position * block, min((position + 1) * block, length))
    match spec:
        case FullAttention():
            return bool(tokens)
        case SlidingWindow(window=window):
            return any(length - token < window for token in tokens)
        case ChunkedLocal(chunk=chunk):
            return any(token // chunk == length // chunk for token in tokens)
        case _:
            return length - 1 in tokens


def _worst(outcomes: Iterable[Outcome]) -> Outcome:
    """What the reports of all ranks say together."""
    said = set(outcomes)
    bad_ones = (Outcome.LOST, Outcome.FAILED, Outcome.CORRUPT)
    return next((bad for bad in bad_ones if bad in said), Outcome.OK)


def _hit(totals: Counter[str]) -> Hit:
    return Hit(
        prompt_tokens=sum(totals.values()),
        gpu_tokens=totals["gpu"],
        cpu_tokens=totals["cpu"],
        compute_tokens=totals["compute"],
    )


def _flattened(cache: CacheState) -> dict[object, int]:
    counters = cache.counters
    numbers: dict[object, int] = {"generation": cache.capacity_generation}
    for name in counters.__slots__:
        value = getattr(counters, name)
        if isinstance(value, dict):
            numbers.update({(name, key): number for key, number in value.items() if number})
        else:
            numbers[name] = value
    return numbers
