"""Residence hints: what each holds for whom, and the table of all of them.

Rules
- A record holds one pin on each of its slots, all in one tier (invariant 2). It names findable blocks only.
- The table keeps books and changes no pool; `revocations.py` and `hints.py` do both in one step.

State: records that hold, the one whose owner spoke last at the end; those whose tier was reset and whose pins are still
to be given back; per tier how many records hold each slot, and per tenant in `quotas`; which blocks are waited for, by
group and the first word of their hash; when a request last hit each GPU slot, in steps of a clock of our own.

Transitions: HELD -> REVOKED -> HELD (held anew by its owner), HELD -> RELEASED, REVOKED -> RELEASED.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, islice
from typing import Final, NamedTuple, final

import numpy as np

from aiokv.core.hint_quotas import HintQuotas, QuotaKey
from aiokv.core.life_cycle import LifeCycle
from aiokv.core.slot_counts import HeldSlots, SlotCounts, SlotTimes
from aiokv.core.slot_memory import zeros
from aiokv.core.watching import ChangedHolders
from aiokv.model.ids import DigestArray, IntArray, KeyEnum, SlotArray, Tier
from aiokv.model.keys import BlockKeys

__all__ = ["HintEvent", "HintRecord", "HintState", "HintTable", "WantedBlock", "advance_all"]


class HintState(KeyEnum):
    """Where a residence hint stands."""

    HELD = "held"
    REVOKED = "revoked"
    RELEASED = "released"


class HintEvent(KeyEnum):
    """What can happen to a residence hint."""

    HOLD = "take hold"
    REVOKE = "be revoked"
    RELEASE = "be released"


_LIFE: Final = LifeCycle(
    {
        (HintState.HELD, HintEvent.HOLD): HintState.HELD,
        (HintState.REVOKED, HintEvent.HOLD): HintState.HELD,
        (HintState.HELD, HintEvent.REVOKE): HintState.REVOKED,
        (HintState.HELD, HintEvent.RELEASE): HintState.RELEASED,
        (HintState.REVOKED, HintEvent.RELEASE): HintState.RELEASED,
    }
)

_NO_SLOTS: Final[SlotArray] = np.zeros(0, np.int32)
_AT_ONCE: Final = 256
"""Hints that are asked for their value in one pass."""


class WantedBlock(NamedTuple):
    """A block that is not resident yet: its group and the first word of its hash."""

    group: int
    word: int


@final
class HintRecord:
    """One hold on a prefix in one tier. Changed by the core's collaborators only."""

    __slots__ = (
        "align", "hint_id", "is_whole", "keys", "length", "slots", "state", "tail", "tenant", "tier", "touched",
        "wanted",
    )  # fmt: skip

    def __init__(self, *, hint_id: int, tenant: str, tier: Tier, keys: BlockKeys, align: int) -> None:
        self.hint_id = hint_id
        self.tenant = tenant
        self.tier = tier
        self.keys = keys
        """The prefix, whole; a copy of its own."""
        self.align = align
        self.state = HintState.HELD
        self.length = 0
        """Tokens of the prefix that are held: a multiple of the alignment; 0 after a loss, until looked at again."""
        self.is_whole = False
        """Whether no longer part of the prefix could be held."""
        self.slots = _NO_SLOTS
        """Pinned, distinct, in eviction order: the tail of the prefix first."""
        self.tail = 0
        """That of `slots` which every request hits that hits all of the prefix, if it has any."""
        self.wanted: tuple[WantedBlock, ...] = ()
        """Once one of these is resident there may be more to hold."""
        self.touched = 0
        """When its owner last spoke."""

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"residence hint {self.hint_id}"

    def check(self, event: HintEvent) -> HintState:
        """The state after `event`; `InvalidTransition` if there is none."""
        return _LIFE.find_next(self.state, event, subject=self)

    def advance(self, event: HintEvent) -> None:
        """Take one step of the life cycle; `InvalidTransition` leaves the state as it was."""
        self.state = self.check(event)


def advance_all(records: Sequence[HintRecord], event: HintEvent) -> None:
    """Take the same step with many hints; `InvalidTransition`, and none has changed, where there is no such step."""
    states = {record.state: record for record in records}
    following = {state: record.check(event) for state, record in states.items()}
    for record in records:
        record.state = following[record.state]


@final
class HintTable:
    """All hints that hold something or may come to."""

    __slots__ = ("_clock", "_hit_at", "_next_id", "cleared", "due", "held", "live", "quotas", "wanted", "watchers")

    def __init__(self, *, gpu_slots: int, cpu_slots: int) -> None:
        self._next_id = 1
        self._clock = 0
        self._hit_at: IntArray = zeros(gpu_slots, np.int64)
        self.live: dict[int, HintRecord] = {}
        """By id, those whose owner spoke last at the end."""
        self.cleared: dict[int, HintRecord] = {}
        """Their tier was reset: revoked, but their pins are still to be given back."""
        self.due: dict[int, HintRecord] = {}
        """To be looked at again: a block that one of them waits for has come, or one that it holds was lost."""
        self.held = {Tier.GPU: HeldSlots(gpu_slots), Tier.CPU: HeldSlots(cpu_slots)}
        self.quotas = HintQuotas()
        self.wanted: dict[tuple[Tier, int], dict[int, dict[int, HintRecord]]] = {}
        self.watchers: list[ChangedHolders] = []
        """Whoever wants to know which hints hold other slots than before."""

    def __len__(self) -> int:
        return len(self.live)

    def __iter__(self) -> Iterator[HintRecord]:
        """Everyone who holds pins."""
        yield from self.cleared.values()
        yield from self.live.values()

    @property
    def is_due(self) -> bool:
        """Whether there is anything to look at, to give back or to write down in a later slice."""
        return bool(self.due or self.cleared or self.quotas.given)

    def next_id(self) -> int:
        """A fresh id; ids are never reused."""
        self._next_id += 1
        return self._next_id - 1

    def touch(self, record: HintRecord) -> None:
        """Its owner has spoken: enter it, as the most valuable."""
        self._clock += 1
        record.touched = self._clock
        self.live.pop(record.hint_id, None)
        self.live[record.hint_id] = record

    def take(self, record: HintRecord, slots: SlotArray) -> None:
        """Write down that a record holds these slots as well."""
        if not len(slots):
            return
        self.held[record.tier].add(slots)
        self.quotas.take((record.tenant, record.tier), slots)

    def give(self, record: HintRecord, slots: SlotArray) -> None:
        """Write down that a record does not hold these slots any more."""
        if not len(slots):
            return
        self.held[record.tier].remove(slots)
        if record.hint_id not in self.cleared:
            self.quotas.give({(record.tenant, record.tier): [slots]})

    def give_all(self, records: Sequence[HintRecord]) -> tuple[SlotArray, SlotTimes]:
        """Write down that these records, of one tier, hold nothing any more; in a few passes for all of them, and what
        their tenants hold in later slices, if it is much.

        Returns the slots that they held, each where it comes last, and how many of them held it.
        """
        tier, batches = records[0].tier, [record.slots for record in records]
        self.quotas.give(self._batches_by_tenant(records))
        slots, times = self.held[tier].merge(batches)
        self.held[tier].remove(slots, times)
        self.forget(records)
        return slots, times

    def forget(self, records: Sequence[HintRecord]) -> None:
        """They neither hold nor wait for anything any more."""
        for record in records:
            if record.wanted:
                self.stop_waiting(record)
        ids = [record.hint_id for record in records]
        for changed in self.watchers:
            changed.update(ids)
        for table in (self.live, self.cleared, self.due):
            if table:
                for hint_id in ids:
                    table.pop(hint_id, None)

    def clear(self, tier: Tier) -> list[HintRecord]:
        """The tier is being reset: nobody's quota counts its slots any more. Returns who held there."""
        gone = [record for record in self.live.values() if record.tier is tier]
        self.forget(gone)
        self.cleared.update((record.hint_id, record) for record in gone)
        self.quotas.clear(tier)
        return gone

    # What is waited for.

    def wait_for(self, record: HintRecord, wanted: tuple[WantedBlock, ...]) -> None:
        """What it holds has changed: look at it again once one of these blocks is resident in its tier."""
        self.stop_waiting(record)
        self._note(record)
        record.wanted = wanted
        for block in wanted:
            by_word = self.wanted.setdefault((record.tier, block.group), {})
            by_word.setdefault(block.word, {})[record.hint_id] = record

    def stop_waiting(self, record: HintRecord) -> None:
        """It waits for nothing any more."""
        for block in record.wanted:
            by_word = self.wanted.get((record.tier, block.group), {})
            waiting = by_word.get(block.word, {})
            waiting.pop(record.hint_id, None)
            if not waiting:
                by_word.pop(block.word, None)
            if not by_word:
                self.wanted.pop((record.tier, block.group), None)
        record.wanted = ()

    def note_arrivals(self, tier: Tier, digests: DigestArray, *, group: int) -> None:
        """These blocks have become resident: who waits for one of them is due."""
        by_word = self.wanted.get((tier, group))
        if by_word:
            for word in by_word.keys() & set(digests[:, 0].tolist()):
                self.due.update(by_word[word])

    def note_losses(self, tier: Tier, slots: SlotArray) -> None:
        """These slots have lost their blocks while they were pinned: who holds one is due, and vouches for no token."""
        if len(self.held[tier].places(slots)):
            for record in self.live.values():
                if record.tier is tier and _meet(record.slots, slots):
                    record.length, record.is_whole = 0, False
                    self.due[record.hint_id] = record

    # What a hint is worth.

    def note_hits(self, slots: SlotArray) -> None:
        """A request has hit these GPU slots."""
        if self.live:
            self._clock += 1
            self._hit_at[slots] = self._clock

    def forget_hits(self, slots: SlotArray) -> None:
        """These GPU slots hold other blocks from now on."""
        if self.live:
            self._hit_at[slots] = 0

    def by_value(self) -> Iterator[HintRecord]:
        """Who holds GPU slots, the least valuable first; do not change the table meanwhile.

        First what a reset has cleared; then those whose whole held prefix no request has hit since their owner spoke,
        the longest silent first; then the others, by their last hit.
        """
        yield from (record for record in self.cleared.values() if record.tier is Tier.GPU)
        used: list[HintRecord] = []
        hits: list[IntArray] = []
        live, gpu = iter(self.live.values()), Tier.GPU
        while some := list(islice(live, _AT_ONCE)):
            holders = [record for record in some if record.tier is gpu and len(record.slots)]
            hit_at = self._last_hits(holders)
            is_used = hit_at > np.array([record.touched for record in holders], np.int64)
            if not np.count_nonzero(is_used):
                yield from holders
                continue
            yield from compress(holders, (~is_used).tolist())
            used.extend(compress(holders, is_used.tolist()))
            hits.append(hit_at[is_used])
        if used:
            yield from map(used.__getitem__, np.concatenate(hits).argsort(kind="stable").tolist())

    def check_invariants(self) -> list[str]:
        """Violations found by a full recount, in words."""
        found = []
        for tier, held in self.held.items():
            if not _is_count_of(held, [r for r in self if r.tier is tier]):
                found.append(f"what hints hold in the {tier.value} tier is counted wrong")
        for tenant, tier in self.quotas.keys():
            used = self.quotas.used_by((tenant, tier))
            if not _is_count_of(used, [r for r in self.live.values() if (r.tenant, r.tier) == (tenant, tier)]):
                found.append(f"what tenant {tenant!r} holds in the {tier.value} tier is counted wrong")
        return found

    def _note(self, record: HintRecord) -> None:
        for changed in self.watchers:
            changed.add(record.hint_id)

    def _batches_by_tenant(self, records: Sequence[HintRecord]) -> dict[QuotaKey, list[SlotArray]]:
        """What those of these records hold that count for their tenants' quotas."""
        batches: dict[QuotaKey, list[SlotArray]] = {}
        for record in records:
            if len(record.slots) and record.hint_id not in self.cleared:
                key = record.tenant, record.tier
                if key in batches:
                    batches[key].append(record.slots)
                else:
                    batches[key] = [record.slots]
        return batches

    def _last_hits(self, records: Sequence[HintRecord]) -> IntArray:
        """When a request last hit the tail of what each of them holds, and so all of it."""
        return self._hit_at[np.array([record.tail for record in records], np.int64)]


def _meet(some: SlotArray, others: SlotArray) -> bool:
    return bool(np.isin(some, others).any())


def _is_count_of(counted: HeldSlots | SlotCounts, records: list[HintRecord]) -> bool:
    slots = np.concatenate([_NO_SLOTS, *(record.slots for record in records)])
    distinct, counts = np.unique(slots, return_counts=True)
    order = np.argsort(counted.slots)
    return np.array_equal(distinct, counted.slots[order]) and np.array_equal(counts, counted.counts[order])
