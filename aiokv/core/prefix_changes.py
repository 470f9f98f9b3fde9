"""What a new plan changes in the block table of a lease. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aiokv.core.lease_table import LeaseRecord
from aiokv.core.planner import GroupPlan
from aiokv.model.ids import NULL_SLOT, IntArray, SlotArray

__all__ = ["PrefixChange", "plan_change"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixChange:
    """How one group's table changes when a lease is planned again: positions below the old prefix, and those for which
    there is no room any more.
    """

    room: int
    """Tokens that the group has room for then."""
    stop: int
    """Positions that the table has then; it keeps those of the old prefix at least."""
    old_blocks: int
    """Positions `[0, old_blocks)` are bound anew: those of the old prefix, or the whole table of a bare lease."""
    fresh_slots: SlotArray
    """GPU hits that the lease does not hold yet."""
    dropped_slots: SlotArray
    """What it holds and needs no more, by ascending position."""
    recomputed: IntArray
    """Positions of those that get an empty slot."""
    loads: int

    @property
    def claims(self) -> int:
        """New slots: load targets and positions that must be computed now."""
        return self.loads + len(self.recomputed)


def plan_change(record: LeaseRecord, *, index: int, plan: GroupPlan, room: int) -> PrefixChange:
    """What group `index` of a lease gives up, keeps and takes if `plan` replaces what it has."""
    block = record.block_sizes[index]
    stop = -(-room // block)
    old_blocks = len(record.tables[index]) if record.is_bare else record.length // block
    slots = record.tables[index].view().copy()
    is_kept = slots[plan.hit_positions] == plan.hit_slots
    slots[plan.hit_positions[is_kept]] = NULL_SLOT
    slots[old_blocks:stop] = NULL_SLOT
    recomputed_stop = 0 if plan.state_claims else min(old_blocks, stop)
    return PrefixChange(
        room=room,
        stop=stop,
        old_blocks=old_blocks,
        fresh_slots=plan.hit_slots[~is_kept],
        dropped_slots=slots[slots != NULL_SLOT],
        recomputed=np.arange(plan.claim_start, recomputed_stop, dtype=np.int64),
        loads=len(plan.load_positions),
    )
