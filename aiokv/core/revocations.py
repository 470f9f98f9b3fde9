"""Capacity that residence hints hold back: how much there is, and taking it back for a request that needs it.

Rules
- A hint makes nobody wait: it is revoked whenever that lets a request go on, and only then.
- As few hints as will do are revoked, the least valuable first; where all of them together would not do, none is
  (law 2). Only GPU slots are taken back so: what the CPU tier lacks is a store that is skipped.
- Blocks that lose their last pin stay resident, as the most recent ones; those that are needed go from the cold end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from aiokv.core.counters import RevokeReason
from aiokv.core.hint_choice import choose_hints
from aiokv.core.hint_table import HintEvent, HintRecord, HintState, advance_all
from aiokv.core.world import World
from aiokv.model.ids import SlotArray, Tier

__all__ = ["RoomPlan", "drop_holds", "make_room", "plan_room", "revoke"]

_NO_SLOTS: Final[SlotArray] = np.zeros(0, np.int32)
_NEVER: Final = 1 << 30
"""More pins than a slot can lose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomPlan:
    """Whether there can be enough room, and which hints that would take."""

    is_enough: bool
    hints: tuple[HintRecord, ...] = ()


def make_room(world: World, lacking: int, *, kept: SlotArray = _NO_SLOTS, leaving: SlotArray = _NO_SLOTS) -> bool:
    """Have `lacking` more GPU slots available, by revoking hints if that helps; False, and nothing changed, if not.

    See `plan_room`. Whoever asks takes the room in this same step.
    """
    plan = plan_room(world, lacking, kept=kept, leaving=leaving)
    revoke(world, plan.hints, reason=RevokeReason.CAPACITY)
    return plan.is_enough


def plan_room(world: World, lacking: int, *, kept: SlotArray = _NO_SLOTS, leaving: SlotArray = _NO_SLOTS) -> RoomPlan:
    """Which hints to revoke so that `lacking` more GPU slots are available. Changes nothing.

    Slots in `kept` do not count: the caller pins them itself. Of those in `leaving` (distinct) the caller drops one pin
    in the same step. Looks at no hint where nothing is lacking; else once at every slot that any hint holds, and then
    at as many hints as are revoked and those before them in value that would give nothing.
    """
    held = world.hints.held[Tier.GPU]
    if lacking <= 0 or lacking > len(held):
        return RoomPlan(is_enough=lacking <= 0)
    pins = world.gpu.pins_of(held.slots)
    pins[held.places(leaving)] -= 1
    pins[held.places(kept)] = _NEVER
    if world.lost_gpu_slots:
        pins[world.are_lost(held.slots)] = _NEVER
    if np.count_nonzero(pins == held.counts) < lacking:
        return RoomPlan(is_enough=False)
    chosen = choose_hints(world.hints.by_value(), lacking=lacking, held=held, pins=pins)
    return RoomPlan(is_enough=True, hints=tuple(chosen))


def revoke(world: World, records: Sequence[HintRecord], *, reason: RevokeReason) -> None:
    """Take everything back from hints of one tier. Their owners may take hold again."""
    drop_holds(world, records)
    held = [record for record in records if record.state is HintState.HELD]
    advance_all(held, HintEvent.REVOKE)
    world.counters.hints_revoked[reason] += len(held)


def drop_holds(world: World, records: Sequence[HintRecord]) -> None:
    """Give back every pin of hints of one tier, and forget them in the table; their states stay."""
    if not records:
        return
    slots, times = world.hints.give_all(records)
    for record in records:
        record.slots, record.length, record.is_whole = _NO_SLOTS, 0, False
    if records[0].tier is Tier.GPU:
        world.unpin_gpu(slots, times)
    else:
        world.unpin_cpu(slots, times)
