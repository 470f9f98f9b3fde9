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
from numpy.typing import NDArray

from aiokv.core.counters import RevokeReason
from aiokv.core.hint_table import HintEvent, HintRecord, HintState
from aiokv.core.world import World
from aiokv.model.ids import IntArray, SlotArray, Tier

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
    return RoomPlan(is_enough=True, hints=_choose(world, lacking, pins=pins))


def revoke(world: World, records: Sequence[HintRecord], *, reason: RevokeReason) -> None:
    """Take everything back from hints of one tier. Their owners may take hold again."""
    drop_holds(world, records)
    for record in records:
        if record.state is HintState.HELD:
            record.advance(HintEvent.REVOKE)
            world.counters.hints_revoked[reason] += 1


def drop_holds(world: World, records: Sequence[HintRecord]) -> None:
    """Give back every pin of hints of one tier, and forget them in the table; their states stay."""
    world.hints.give_all(records)
    parts = [record.slots for record in records]
    for record in records:
        record.slots, record.length, record.is_whole = _NO_SLOTS, 0, False
    for slots in _distinct_batches(parts):
        if records[0].tier is Tier.GPU:
            world.unpin_gpu(slots)
        else:
            world.unpin_cpu(slots)


def _distinct_batches(parts: list[SlotArray]) -> list[SlotArray]:
    """All parts as one batch, in their order, unless that would name a slot twice."""
    if len(parts) < 2:
        return parts
    whole = np.concatenate(parts)
    ordered = np.sort(whole)
    return [whole] if (ordered[1:] != ordered[:-1]).all() else parts


def _choose(world: World, lacking: int, *, pins: NDArray[np.int32]) -> tuple[HintRecord, ...]:
    """The first hints by value that give enough together, without those that turn out not to be needed.

    `pins` are those of all slots that hints hold, less what is dropped anyhow; it is used up.
    """
    held = world.hints.held[Tier.GPU]
    chosen: list[tuple[HintRecord, IntArray]] = []
    gain = 0
    for record in world.hints.by_value():
        at = held.places(record.slots)
        pins[at] -= 1
        gain += int(np.count_nonzero(pins[at] == 0))
        chosen.append((record, at))
        if gain >= lacking:
            break
    needed = chosen[-1:]
    for record, at in reversed(chosen[:-1]):
        loss = int(np.count_nonzero(pins[at] == 0))
        if gain - loss >= lacking:
            pins[at] += 1
            gain -= loss
        else:
            needed.append((record, at))
    return tuple(record for record, _ in reversed(needed))
