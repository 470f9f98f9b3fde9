"""Who changed while an audit looks: what a pool, its free stack and the tables of holders tell whoever watches them.

Duty: let an audit that goes in slices look again at what has changed behind it, and at nothing else. While nobody
watches, a change costs the test of an empty list.
"""

from __future__ import annotations

from collections import deque
from typing import final

import numpy as np

from aiokv.core.slot_memory import zeros
from aiokv.model.ids import BoolArray, IntArray, SlotArray

__all__ = ["ChangedHolders", "SlotWatch", "StackWatch"]

ChangedHolders = set[int]
"""Ids of leases, or of transfers, that hold other slots than before, have come or have gone."""


@final
class SlotWatch:
    """The slots of one pool that are still to be looked at: every one once, and again those that changed since."""

    __slots__ = ("_changed", "_cursor", "_is_known", "changed_count")

    def __init__(self, size: int) -> None:
        self._is_known: BoolArray = zeros(size, np.bool_)  # not due: memory that nobody has touched costs nothing yet
        self._cursor = 0
        self._changed: deque[IntArray] = deque()
        self.changed_count = 0
        """How many have changed since they were looked at; one that is named twice in a batch counts twice."""

    @property
    def is_first_pass(self) -> bool:
        """Whether some slots have never been looked at."""
        return self._cursor < len(self._is_known)

    def note(self, slots: SlotArray) -> None:
        """These have changed; those that are due anyway are not put down again."""
        fresh = slots[self._is_known.take(slots)].astype(np.int64)
        if len(fresh):
            self._is_known[fresh] = False
            self._changed.append(fresh)
            self.changed_count += len(fresh)

    def take_changed(self, limit: int) -> IntArray:
        """Up to `limit` distinct slots that have changed since they were looked at."""
        taken: list[IntArray] = []
        while limit > 0 and self._changed:
            slots = self._changed.popleft()
            if len(slots) > limit:
                self._changed.appendleft(slots[limit:])
                slots = slots[:limit]
            limit -= len(slots)
            self.changed_count -= len(slots)
            taken.append(slots)
        return self._settle(_distinct(np.concatenate(taken))) if taken else np.empty(0, np.int64)

    def take_next(self, limit: int) -> IntArray:
        """The next `limit` slots that were never looked at."""
        start, self._cursor = self._cursor, min(self._cursor + limit, len(self._is_known))
        return self._settle(np.arange(start, self._cursor))

    def _settle(self, slots: IntArray) -> IntArray:
        self._is_known[slots] = True
        return slots


@final
class StackWatch:
    """How low a stack has been since somebody read it: what lies below is still what was read."""

    __slots__ = ("low",)

    def __init__(self) -> None:
        self.low = 0


def _distinct(slots: IntArray) -> IntArray:
    slots.sort()
    differs = np.ones(len(slots), np.bool_)
    np.not_equal(slots[1:], slots[:-1], out=differs[1:])
    return slots[differs]
