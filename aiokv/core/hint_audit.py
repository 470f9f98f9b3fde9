"""The audit of residence hints in slices: what each of them holds, as it says itself.

Duty and state are those of `holder_audit.py`, of which this is a part: a hint is visited once, and again if it changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Final, NamedTuple, final

import numpy as np

from aiokv.core.audit import HintView, HolderKind, Holding, view_hint
from aiokv.core.hint_table import HintTable
from aiokv.core.pool_audit import CHANGES_PER_COST, VISIT_COST, PoolAudit
from aiokv.model.ids import SlotArray, Tier

__all__ = ["HintAudit"]

_NO_SLOTS: Final[SlotArray] = np.empty(0, np.int32)


class _Hint(NamedTuple):
    """A hint as of its last visit."""

    view: HintView
    slots: SlotArray
    pins: tuple[Holding, ...]


@final
class HintAudit:
    """What an audit knows of the hints. `close` it, or the table goes on telling it of changes."""

    __slots__ = ("_due", "_hints", "_pools", "_table")

    def __init__(self, table: HintTable, *, pools: Mapping[Tier, PoolAudit]) -> None:
        self._table = table
        self._pools = pools
        self._hints: dict[int, _Hint] = {}
        self._due = {record.hint_id for record in table}
        table.watchers.append(self._due)

    def close(self) -> None:
        """Be told of no more changes. Idempotent."""
        self._table.watchers[:] = [changed for changed in self._table.watchers if changed is not self._due]

    @property
    def due_count(self) -> int:
        """How many hints are still to be visited."""
        return len(self._due)

    def visit_some(self, limit: int) -> int:
        """Visit hints for about as much work as looking at `limit` slots is; returns how much it was."""
        done = 0
        while self._due and done < limit:
            done += self._visit(self._due.pop())
        return done

    def views(self) -> tuple[HintView, ...]:
        """The hints that hold something or wait for something, oldest first."""
        return tuple([self._hints[hint_id].view for hint_id in sorted(self._hints)])

    def pins(self) -> tuple[Holding, ...]:
        """Those that hold pins, oldest first."""
        return tuple(chain.from_iterable([self._hints[hint_id].pins for hint_id in sorted(self._hints)]))

    def _visit(self, hint_id: int) -> int:
        record = self._table.live.get(hint_id) or self._table.cleared.get(hint_id)
        before = self._hints.pop(hint_id, None)
        changes = 0
        if record is not None:
            view = view_hint(record)
            self._hints[hint_id] = _Hint(view, record.slots, _held_by(view))
            was = before.slots if before is not None else _NO_SLOTS
            changes = self._pools[record.tier].exchange(was, record.slots)
        elif before is not None:
            changes = self._pools[before.view.tier].exchange(before.slots, _NO_SLOTS)
        return VISIT_COST + changes // CHANGES_PER_COST


def _held_by(view: HintView) -> tuple[Holding, ...]:
    """The pins of a hint, if it has any."""
    if not view.blocks:
        return ()
    holding = Holding(
        kind=HolderKind.HINT,
        holder_id=view.hint_id,
        request_id="",
        tier=view.tier,
        blocks=view.blocks,
        tenant=view.tenant,
    )
    return (holding,)
