"""Residence hints: a prefix stays resident in one tier for as long as its owner wants and nobody needs the room.

Duty: take hold of the blocks of a prefix within a tenant's quota, follow what becomes resident later, let go.

Rules
- A hint holds the coverage of the longest prefix that its tier can serve alone (section 5 of the contract), at most the
  one it was asked for, and lookahead blocks behind it: what a longer request of the same beginning needs. So while it
  is held such a request hits that many tokens at least, and no block is held that a hole before it makes useless.
- Finding, checking and pinning is one step (law 1); a `Declined` call changes nothing (law 2).
- A tenant's hints hold at most its quota of each pool; a block that several of them hold counts once.
- What a hint waits for is looked up when the first missing block of a full group becomes resident (of the other groups
  where no full group misses one), in a later slice; if the quota is used up by then, it holds what it held.
- When a block that it holds is lost in a copy, or is corrupt, it vouches for nothing from that step on, until a later
  slice has found what is left of the prefix. It lets the lost block go, whether there is room for what else a shorter
  prefix needs or not.
- It never takes a slot that was promised to a request.

State: that of `World.hints`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from aiokv.core.counters import HintClosing, HintExtent, RevokeReason
from aiokv.core.coverage import covered_range
from aiokv.core.hint_table import HintEvent, HintRecord, HintState, WantedBlock
from aiokv.core.lookup import Residency, find_residency
from aiokv.core.pool import Pool
from aiokv.core.revocations import drop_holds, revoke
from aiokv.core.slices import Job
from aiokv.core.world import World
from aiokv.errors import ConfigError, UsageError
from aiokv.model.ids import NULL_SLOT, IntArray, SlotArray, Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import Declined, DeclineReason
from aiokv.model.spec import CacheGeometry, FullAttention

__all__ = ["HINT_QUOTA", "Hints"]

HINT_QUOTA: Final = 0.1
"""The part of each pool that the hints of one tenant may hold, unless the host says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Found:
    """What a hint would hold now. Valid until a pool changes."""

    length: int
    target: int
    slots: SlotArray
    """In eviction order."""
    tail: int
    wanted: tuple[WantedBlock, ...]


@final
class Hints:
    """Keeps prefixes resident."""

    __slots__ = ("_is_working", "_quota", "_world")

    def __init__(self, world: World, *, quota: float) -> None:
        if not 0.0 <= quota <= 1.0:
            raise ConfigError(f"hint_quota must be at least 0 and at most 1, not {quota!r}")
        self._world = world
        self._quota = quota
        self._is_working = False

    @property
    def is_due(self) -> bool:
        """Whether there is work that has not been begun."""
        table = self._world.hints
        return not self._is_working and bool(table.due or table.cleared or table.quotas.given)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left that a reset has cleared, and no hint is to be looked at again."""
        return not self._is_working and not self._world.hints.is_due

    def check_invariants(self) -> list[str]:
        """Violations of the books of hints, in words. Recounts all slots that are held: for tests."""
        return self._world.hints.check_invariants()

    def live(self) -> tuple[HintRecord, ...]:
        """All hints that are held, the one whose owner spoke last at the end."""
        return tuple(self._world.hints.live.values())

    def find(self, hint_id: int) -> HintRecord | None:
        """The hint with this id, if it is held."""
        return self._world.hints.live.get(hint_id)

    def held_blocks(self, tier: Tier) -> int:
        """Blocks of a tier that hints hold, each counted once."""
        return len(self._world.hints.held[tier])

    def count_by_extent(self) -> dict[HintExtent, int]:
        """How many hints hold all of their prefix, and how many a part. From any thread."""
        live = self.live()
        whole = sum(record.is_whole for record in live)
        return {HintExtent.WHOLE: whole, HintExtent.PARTIAL: len(live) - whole}

    def quota_blocks(self, tier: Tier) -> int:
        """Blocks of a tier that the hints of one tenant may hold; 0 without such a tier."""
        pool = self._world.pool(tier)
        return int(pool.capacity * self._quota) if pool is not None else 0

    def keep(self, keys: BlockKeys, *, tenant: str, tier: Tier = Tier.GPU, align: int = 1) -> HintRecord | Declined:
        """Hold what `tier` has of a prefix, and what comes later; `UsageError` for a tier that is not configured."""
        self._world.check_keys(keys)
        if self._world.pool(tier) is None:
            raise UsageError(f"there is no {tier.value} tier")
        if align < 1:
            raise UsageError(f"align must be at least 1, not {align}")
        hint_id = self._world.hints.next_id()
        record = HintRecord(hint_id=hint_id, tenant=tenant, tier=tier, keys=keys.copy(), align=align)
        declined = self.update(record, record.keys)
        if isinstance(declined, Declined):
            return declined
        self._world.counters.hints_opened += 1
        return record

    def update(self, record: HintRecord, keys: BlockKeys) -> int | Declined:
        """Hold another prefix instead: how many tokens of it are held now; or `Declined`, and it holds what it held.

        A revoked hint takes hold again. `InvalidTransition` once it is released.
        """
        record.check(HintEvent.HOLD)
        self._world.check_keys(keys)
        found = self._find(keys, tier=record.tier, align=record.align)
        refusal = self._refusal(record, found)
        if refusal is not None:
            self._world.counters.hints_declined[refusal] += 1
            return Declined(refusal)
        if record.state is HintState.REVOKED:
            drop_holds(self._world, (record,))  # what a reset has cleared may not have been given back yet
        record.advance(HintEvent.HOLD)
        record.keys = keys.copy()
        self._world.hints.touch(record)
        self._exchange(record, found)
        return record.length

    def release(self, record: HintRecord, *, how: HintClosing = HintClosing.RELEASED) -> None:
        """Give everything back. Idempotent."""
        if record.state is not HintState.RELEASED:
            drop_holds(self._world, (record,))
            record.advance(HintEvent.RELEASE)
            self._world.counters.hints_closed[how] += 1

    def revoke(self, record: HintRecord) -> None:
        """Take everything back, on an operator's word. Nothing happens to a hint that holds nothing any more."""
        if record.state is HintState.HELD:
            revoke(self._world, (record,), reason=RevokeReason.OPERATOR)

    def reset(self, tier: Tier) -> None:
        """A tier is being reset: its hints are revoked at once, their pins come back in slices (see `work`)."""
        for record in self._world.hints.clear(tier):
            record.advance(HintEvent.REVOKE)
            record.length, record.is_whole = 0, False
            self._world.counters.hints_revoked[RevokeReason.RESET] += 1

    def work(self) -> Job:
        """Give back what a reset has cleared, write down what was given back, and look again at what is due: one hint,
        or one tenant, a slice.
        """
        self._is_working = True
        return self._settle()

    def _settle(self) -> Job:
        table = self._world.hints
        while table.is_due:
            if table.cleared:
                drop_holds(self._world, (next(iter(table.cleared.values())),))
            elif table.quotas.given:
                table.quotas.settle_some()
            else:
                self._follow(table.due.pop(next(iter(table.due))))
            if table.is_due:
                yield
        self._is_working = False

    def _follow(self, record: HintRecord) -> None:
        """Hold what is resident now of the same prefix; what it held if there is no room for that.

        If it has lost a block of what it held, nothing, and it is looked at once more when the others have let go too.
        """
        found = self._find(record.keys, tier=record.tier, align=record.align)
        if self._refusal(record, found) is None:
            self._exchange(record, found)
        elif len(record.slots) and not record.length:  # the table has marked the loss
            self._exchange(record, replace(found, length=0, slots=found.slots[:0]))
            self._world.hints.due[record.hint_id] = record

    def _refusal(self, record: HintRecord, found: _Found) -> DeclineReason | None:
        world, tier = self._world, record.tier
        pool, used = self._usable(tier), world.hints.quotas.used_by((record.tenant, tier))
        quota = self.quota_blocks(tier)
        if self._count_covered(found.target) > quota:
            return DeclineReason.QUOTA
        fresh, dropped = _difference(record.slots, found.slots)
        growth = used.count_absent(fresh) - used.count_last(dropped)
        if record.hint_id in world.hints.cleared:
            growth = used.count_absent(found.slots)
        if growth > 0 and len(used) + growth > quota:
            return DeclineReason.QUOTA
        if pool is not None and pool.count_unpinned(fresh) > pool.available:
            return DeclineReason.POOL_FULL
        return None

    def _exchange(self, record: HintRecord, found: _Found) -> None:
        """Pin what is new, unpin what is not needed any more."""
        world = self._world
        fresh, dropped = _difference(record.slots, found.slots)
        pool = world.pool(record.tier)
        if pool is not None:
            pool.pin(fresh)
        world.hints.take(record, fresh)
        world.hints.give(record, dropped)
        if record.tier is Tier.GPU:
            world.unpin_gpu(dropped)
        else:
            world.unpin_cpu(dropped)
        record.slots, record.length, record.tail = found.slots, found.length, found.tail
        record.is_whole = found.length == found.target
        world.hints.wait_for(record, found.wanted)

    def _usable(self, tier: Tier) -> Pool | None:
        return self._world.gpu if tier is Tier.GPU else self._world.usable_cpu

    def _find(self, keys: BlockKeys, *, tier: Tier, align: int) -> _Found:
        """What a tier holds of a prefix. It may end at the last token known: whoever extends it has more."""
        geometry, pool = self._world.geometry, self._usable(tier)
        target = _longest(geometry, keys.num_tokens, align=align)
        if pool is None:
            return _Found(length=0, target=target, slots=np.zeros(0, np.int32), tail=0, wanted=())
        found = find_residency(geometry, keys, gpu=pool, cpu=None, num_tokens=keys.num_tokens + 1, align=align)
        wanted = _missing(geometry, keys, found=found, target=target) if found.length < target else ()
        slots, tail = _covered_slots(geometry, found), _tail(geometry, found)
        return _Found(length=found.length, target=target, slots=slots, tail=tail, wanted=wanted)

    def _count_covered(self, length: int) -> int:
        """Blocks that a hint on `length` tokens holds once all are resident."""
        geometry = self._world.geometry
        return sum(len(_held_range(geometry, index, length)) for index in range(len(geometry.groups)))


def _longest(geometry: CacheGeometry, num_tokens: int, *, align: int) -> int:
    """The longest prefix of so many tokens that can be valid for a longer request, all being resident."""
    blocks = [geometry.effective_block_size(i) for i, group in enumerate(geometry.groups) if group.lookahead]
    alignment = geometry.alignment(align)
    return max(num_tokens - max(blocks, default=0), 0) // alignment * alignment


def _held_range(geometry: CacheGeometry, index: int, length: int) -> range:  # noqa: PLR0917  # like `covered_range`
    """The blocks of group `index` that a prefix of `length` tokens needs, those that are probed only included."""
    covered = covered_range(geometry, index, length)
    return range(covered.start, covered.stop + 1) if geometry.groups[index].lookahead and length else covered


def _covered_slots(geometry: CacheGeometry, found: Residency) -> IntArray:
    """The slots of a valid prefix, in eviction order: its tail first."""
    parts = [np.zeros(0, np.int64)]
    ends = [np.zeros(0, np.int64)]
    for index, group in enumerate(found.groups):
        span = _held_range(geometry, index, found.length)
        parts.append(group.gpu_slots[span.start : span.stop])
        ends.append(np.arange(span.start + 1, span.stop + 1, dtype=np.int64) * -geometry.effective_block_size(index))
    return np.concatenate(parts)[np.argsort(np.concatenate(ends), kind="stable")]


def _tail(geometry: CacheGeometry, found: Residency) -> int:
    """The last block that is not probed only, of a full group if there is one: others need less of a longer prefix."""
    for index in (*geometry.full_groups, *geometry.other_groups):
        covered = covered_range(geometry, index, found.length)
        if covered:
            return int(found.groups[index].gpu_slots[covered.stop - 1])
    return NULL_SLOT


def _missing(geometry: CacheGeometry, keys: BlockKeys, *, found: Residency, target: int) -> tuple[WantedBlock, ...]:
    """What stands in the way of a longer prefix: the first missing block of each full group, else of each other."""
    first: dict[int, int] = {}
    for index, group in enumerate(found.groups):
        span = _held_range(geometry, index, target)
        present = group.on_gpu[span.start : span.stop]
        count = len(present) if present.all() else int(np.argmin(present))
        if count < len(span):
            first[index] = span.start + count
    full = [index for index in first if isinstance(geometry.groups[index], FullAttention)]
    return tuple(_wanted(geometry, keys, group=index, position=first[index]) for index in full or first)


def _wanted(geometry: CacheGeometry, keys: BlockKeys, *, group: int, position: int) -> WantedBlock:
    digests = keys.digests(geometry.hashes_per_block(group), position, position + 1)
    return WantedBlock(group, int(digests[0, 0]))


def _difference(before: SlotArray, after: SlotArray) -> tuple[SlotArray, SlotArray]:
    """What came and what went between two sets of slots, each in its own order."""
    if not len(before) or not len(after):
        return after, before
    if np.array_equal(before, after):
        return after[:0], before[:0]
    return after[~np.isin(after, before)], before[~np.isin(before, after)]
