"""What must hold after any step, asked from outside the core: by contents, masks and the oracle.

Rules: checks change nothing. They read public state only: tables of leases, unfinished transfers, lookups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final, final

import numpy as np

from aiokv.core.audit import Audit
from aiokv.core.audit_run import AuditRun
from aiokv.core.cache import CacheState
from aiokv.core.inflight import Transfer, TransferState
from aiokv.core.lease_table import AcquireRequest, LeaseRecord
from aiokv.model.ids import Direction, Tier
from aiokv.model.plan import Outcome
from aiokv.model.spec import ChunkedLocal, RecurrentState, SlidingWindow
from aiokv.testing.contents import Content, Contents
from aiokv.testing.event_replay import EventReplay
from aiokv.testing.streams import FORKS, Streams, is_covered
from aiokv.testing.verdict import BrokenInvariant, require

__all__ = ["Checks", "worst_of"]

_SLICE_SLOTS: Final = 6
"""So few that an audit takes dozens of steps."""


@final
class Checks:
    """Questions to one cache about what it lets others read and write."""

    def __init__(self, cache: CacheState, *, streams: Streams, contents: Contents, events: EventReplay) -> None:
        self._cache = cache
        self._streams = streams
        self._contents = contents
        self._events = events
        self._slow_audit: AuditRun | None = None

    # Writing.

    def writable(
        self,
        slot: int,
        *,
        leases: Iterable[LeaseRecord],
        readers: Collection[int] = (),
        writer: Transfer | None = None,
    ) -> None:
        """Nobody but `readers` (lease ids) holds this GPU slot, no copy but `writer` touches it (laws 3 to 5)."""
        for record in leases:
            tables = [*record.tables, *record.state_slots.values()]
            if slot in record.leaving.tolist() or any(slot in table.view().tolist() for table in tables):
                name = record.request.request_id
                require(record.lease_id in readers, f"GPU slot {slot} is written while {name} holds it")
        for transfer in self._cache.transfers():
            gpu = transfer.targets if transfer.direction is Direction.LOAD else transfer.sources
            if transfer is not writer and gpu is not None:
                touched = gpu[: transfer.open_copies].tolist()
                require(slot not in touched, f"GPU slot {slot} is written during a copy")

    def unused(self, slot: int, tier: Tier, *, leases: Iterable[LeaseRecord]) -> None:
        """Nobody holds this slot of a tier."""
        if tier is Tier.GPU:
            self.writable(slot, leases=leases)
            return
        for transfer in self._cache.transfers():
            cpu = transfer.sources if transfer.direction is Direction.LOAD else transfer.bound_targets
            require(slot not in cpu[: transfer.open_copies].tolist(), f"CPU slot {slot} is written during a copy")

    def not_findable(self, slots: Iterable[int]) -> None:
        """No lookup finds these GPU slots: what can be found is never written."""
        findable: set[int] = set()
        for stream in range(len(FORKS)):
            for group in range(len(self._streams.sizes)):
                found = self._cache.find_blocks(self._streams.keys(stream), group=group, tier=Tier.GPU)
                findable |= set(found.slots[found.present].tolist())
        require(not findable & set(slots), "GPU slots are findable and written", sorted(findable & set(slots)))

    # Reading.

    def readable(self, record: LeaseRecord, *, stream: int) -> None:
        """All that queries after the confirmed tokens read is held, and has the right content."""
        for group, (spec, block) in enumerate(zip(self._streams.geometry.groups, self._streams.sizes, strict=True)):
            if isinstance(spec, RecurrentState) and record.confirmed != record.length:
                continue
            table = record.tables[group].view().tolist()
            for position in range(record.confirmed // block):
                if is_covered(spec, block, length=record.confirmed, position=position):
                    digest = self._streams.digest(stream, group, position)
                    if not self._contents.holds(Tier.GPU, table[position], group=group, digest=digest):
                        where = f"{record.request.request_id}: group {group}, block {position}, slot {table[position]}"
                        held = self._contents.find(Tier.GPU, table[position])
                        raise BrokenInvariant(f"{where} holds {'garbage' if held is None else 'another block'}")

    def states(self, record: LeaseRecord, *, stream: int) -> None:
        """The state after exactly the confirmed tokens is in the table of every recurrent group."""
        for group in record.state_slots:
            position = record.confirmed // self._streams.sizes[group] - 1
            if position >= 0:
                slot = int(record.tables[group].view()[position])
                digest = self._streams.digest(stream, group, position)
                is_there = self._contents.holds(Tier.GPU, slot, group=group, digest=digest)
                require(is_there, f"the state of {record.confirmed} tokens is not in slot {slot}")

    def findable(self) -> None:
        """Every block that a lookup can find is there, valid, and of this epoch (law 3); the events have said so."""
        for stream in range(len(FORKS)):
            for group in range(len(self._streams.sizes)):
                names = self._streams.digests(stream, group)
                for tier in self._cache.pools():
                    found = self._cache.find_blocks(self._streams.keys(stream), group=group, tier=tier)
                    for position in np.flatnonzero(found.present).tolist():
                        held = self._contents.find(tier, int(found.slots[position]))
                        if held != Content(group, names[position]):
                            where = f"stream {stream}, group {group}, block {position}, {tier.value}"
                            raise BrokenInvariant(f"{where} can be found, but is {held or 'garbage'}")
                    told = [self._events.is_published(tier, group=group, digest=name) for name in names]
                    require(told == found.present.tolist(), "the events do not rebuild the index")

    # Copies and slots.

    def single_flight(self, reports: Mapping[int, Mapping[int, Outcome]]) -> None:
        """One copy per CPU block at a time, and one store per GPU block; a load that is known to fail is none."""
        reading: Counter[tuple[Direction, int]] = Counter()
        for transfer in self._cache.transfers():
            told = reports.get(transfer.transfer_id, {})
            is_doomed = transfer.direction is Direction.LOAD and worst_of(told.values()) is not Outcome.OK
            if transfer.state in (TransferState.QUEUED, TransferState.SUBMITTED) and not is_doomed:
                reading.update((transfer.direction, slot) for slot in transfer.sources.tolist())
        require(max(reading.values(), default=0) <= 1, "blocks are copied twice at a time", reading)

    def conserved(self, capacity: Mapping[Tier, int]) -> None:
        """Every slot is in one state, and the core's own audit finds nothing (invariants 1 to 3)."""
        audit = self._cache.audit()
        require(not audit.violations, "the audit finds violations", audit.violations)
        self._audit_on(audit)
        for tier, counts in self._cache.pools().items():
            states = (counts.free, counts.reserved, counts.resident, counts.quarantined)
            require(sum(states) == capacity[tier], "slots are not conserved", tier, counts)
            require(min(*states, counts.evictable, counts.claimed) >= 0, "a count is negative", tier, counts)

    def _audit_on(self, now: Audit) -> None:
        """One more slice of an audit that goes on beside all steps: it too finds nothing, and ends with what is now."""
        if self._slow_audit is None:
            self._slow_audit = self._cache.audit_in_slices(slice_slots=_SLICE_SLOTS)
        if self._slow_audit.run_slice():
            return
        slow, self._slow_audit = self._slow_audit.result, None
        require(not slow.violations, "the sliced audit finds violations", slow.violations)
        for name, told, held in (
            ("leases", slow.leases, now.leases),
            ("pins", slow.pins, now.pins),
            ("reservations", slow.reservations, now.reservations),
        ):
            require(told == held, f"the sliced audit tells of other {name}", told, held)

    def nothing_held(self) -> None:
        """No leases, no pins but those of residence hints, nothing reserved (invariant 12)."""
        audit = self._cache.audit()
        require(not audit.leases, "leases were never given back", audit.leases)
        kept = sum(hint.blocks for hint in audit.hints)
        require(sum(pin.blocks for pin in audit.pins) == kept, "pins were never given back", audit.pins)
        require(not audit.reservations, "reservations were never given back", audit.reservations)
        for tier, counts in self._cache.pools().items():
            require(counts.reserved == 0, "slots are still reserved", tier, counts)

    def slots_for(self, request: AcquireRequest, *, length: int) -> int:
        """GPU slots that a request holds at once, with a prefix of `length` tokens."""
        total = 0
        for spec, block in zip(self._streams.geometry.groups, self._streams.sizes, strict=True):
            room = request.prompt_tokens + request.reserve_tokens
            if request.first_chunk is not None and isinstance(spec, SlidingWindow | ChunkedLocal):
                room = min(room, length + request.first_chunk)
            blocks = range(length // block)
            total += sum(is_covered(spec, block, length=length, position=position) for position in blocks)
            total += 2 if isinstance(spec, RecurrentState) else -(-room // block) - length // block
        return total


def worst_of(outcomes: Iterable[Outcome]) -> Outcome:
    """What the reports of all ranks say together."""
    said = set(outcomes)
    from_worst = (Outcome.LOST, Outcome.FAILED, Outcome.CORRUPT)
    return next((bad for bad in from_worst if bad in said), Outcome.OK)
