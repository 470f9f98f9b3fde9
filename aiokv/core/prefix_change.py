"""What becomes of the block tables of a lease whose prefix is planned again. Pure.

Rules: a hit that stays where it is keeps its pin; everything else of the old prefix is dropped, and every position that
must be computed now is claimed anew, as what could be found is never written.
"""

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
    """Positions `[0, old_blocks)` are bound anew."""
    fresh_slots: SlotArray
    """GPU hits that the lease does not hold yet."""
    dropped_slots: SlotArray
    """What it holds and needs no more, by ascending position."""
    recomputed: IntArray
    """Positions below the old prefix that get an empty slot."""
    loads: int

    @property
    def claims(self) -> int:
        """New slots: load targets and positions that must be computed now."""
        return self.loads + len(self.recomputed)


def plan_change(record: LeaseRecord, *, index: int, plan: GroupPlan, room: int) -> PrefixChange:
    """The change of group `index` under its part of a new plan, with room for `room` tokens; all claims have names."""
    block = record.block_sizes[index]
    stop, old_blocks = -(-room // block), record.length // block
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
