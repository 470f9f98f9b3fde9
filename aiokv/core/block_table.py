"""One group's block table of one lease: GPU slots by absolute block position, and the claims still without a name.

State: an `int32` buffer that doubles, its length in blocks; position i holds the null block (0) where the group needs
nothing there or the claim has not been named yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from aiokv.core.watching import ChangedHolders
from aiokv.model.ids import NULL_SLOT, IntArray, SlotArray, TableArray

__all__ = ["BlockTable", "ClaimSegment"]


@final
class BlockTable:
    """Slots by block position. Views handed out are read-only and valid until the table grows."""

    __slots__ = ("_length", "_owner", "_slots", "_watchers")

    def __init__(self, length: int, *, owner: int = 0, watchers: Sequence[ChangedHolders] = ()) -> None:
        """`owner` is the lease that the table is of; each of `watchers` is told when it holds other slots."""
        self._slots: TableArray = np.zeros(max(length, 8), np.int32)
        self._length = length
        self._owner = owner
        self._watchers = watchers

    def __len__(self) -> int:
        return self._length

    def view(self, start: int = 0) -> TableArray:
        """Slots of positions `[start, len)`, without a copy."""
        part = self._slots[start : self._length]
        part.flags.writeable = False
        return part

    def grow(self, length: int) -> None:
        """Make room for `length` positions; new ones hold the null block."""
        if length > len(self._slots):
            larger = np.zeros(max(length, 2 * len(self._slots)), np.int32)
            larger[: self._length] = self._slots[: self._length]
            self._slots = larger
        self._length = max(self._length, length)
        self._tell()

    def cut(self, length: int) -> SlotArray:
        """Keep at most `length` positions; returns the slots held beyond."""
        taken = self.take_range(length, self._length)
        self._length = min(self._length, length)
        return taken

    def put(self, positions: IntArray, slots: SlotArray) -> None:
        """Bind slots to positions (ascending)."""
        n = len(positions)
        if n and positions.item(-1) - positions.item(0) == n - 1:  # a run of them, most often
            self.put_run(positions.item(0), slots)
            return
        self._slots[positions] = slots.astype(np.int32, copy=False)
        self._tell()

    def put_run(self, start: int, slots: SlotArray) -> None:
        """Bind slots to adjacent positions from `start` on."""
        self._slots[start : start + len(slots)] = slots
        self._tell()

    def take(self, positions: IntArray) -> SlotArray:
        """Remove and return the slots held at `positions`."""
        held = self._slots[positions]
        taken: SlotArray = held[held != NULL_SLOT]
        self._slots[positions] = NULL_SLOT
        self._tell()
        return taken

    def take_range(self, start: int, stop: int) -> SlotArray:
        """Remove and return the slots held at `[start, stop)`."""
        part = self._slots[start:stop]
        taken: SlotArray = part[part != NULL_SLOT].copy()
        part[:] = NULL_SLOT
        self._tell()
        return taken

    def held_positions(self) -> IntArray:
        """Positions that hold a slot, ascending."""
        return self._slots[: self._length].nonzero()[0]

    def held_slots(self) -> IntArray:
        """The slots held, by ascending position."""
        slots = self._slots[: self._length].astype(np.int64)
        return slots if np.count_nonzero(slots) == len(slots) else slots[slots != NULL_SLOT]

    def count_held(self) -> int:
        """How many positions hold a slot; from any thread."""
        return int(np.count_nonzero(self._slots[: self._length]))

    def copy_to(self, row: SlotArray) -> None:
        """Write what all its positions hold into `row`, which is as long."""
        row[:] = self._slots[: self._length]

    def _tell(self) -> None:
        for changed in self._watchers:
            changed.add(self._owner)


@dataclass(slots=True, kw_only=True, eq=False)
class ClaimSegment:
    """Claimed positions of one table, named from the front; `transfer_id` is set for the targets of a load.

    Without positions: another lease's load that was joined before all its targets had names. Those go to `table` then.
    """

    table: BlockTable
    positions: IntArray
    transfer_id: int | None = None
    joined_id: int | None = None
    named: int = 0

    @property
    def unnamed(self) -> int:
        """Claims of this segment that have no slot yet."""
        return len(self.positions) - self.named
