"""Which residence hints give a request the room it lacks: as few as will do, the least valuable first.

Rules: changes no hint and no pool. Looks at many small hints in one pass, because a pass over an array costs as much as
a hundred of its elements, and at no more hints than it takes, as many again aside. A hint gives at most what it holds:
so the first pass is over as many as hold what is lacking, which are enough unless they share slots or others pin them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aiokv.core.hint_table import HintRecord
from aiokv.core.slot_counts import HeldSlots
from aiokv.model.ids import BoolArray, IntArray

__all__ = ["choose_hints"]

_Pins = NDArray[np.int32]
_ONE: Final = np.int32(1)
"""Of the arrays' own type, with which `add.at` is thirty times faster."""
_HINTS: Final = 64
_SLOTS: Final = 4096
"""So many hints are looked at in the first pass, fewer if they hold so many slots, and twice as many in each other."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Holds:
    """Some hints, by value, and what they hold: the slot at place `at[i]` is of hint `who[i]`, ascending."""

    records: list[HintRecord]
    at: IntArray
    who: IntArray

    def starts(self) -> IntArray:
        """Hint h holds `at[starts[h]:starts[h + 1]]`."""
        return self.who.searchsorted(np.arange(len(self.records) + 1))

    def count(self, which: BoolArray) -> IntArray:
        """Per hint, how many of its slots are among `which`."""
        return np.bincount(self.who[which], minlength=len(self.records))


def choose_hints(by_value: Iterator[HintRecord], *, lacking: int, held: HeldSlots, pins: _Pins) -> list[HintRecord]:
    """The first hints `by_value` that give `lacking` slots together, without those that turn out not to be needed.

    `pins` are those of all slots that hints hold (`held`), less what is dropped anyhow; it is used up. All hints
    together give enough.
    """
    parts: list[_Holds] = []
    gain = 0
    while gain < lacking:
        few = _next_few(by_value, lacking=lacking - gain, scale=1 << len(parts))
        taken, gained = _take_first(_holds_of(few, held), pins, lacking=lacking - gain)
        parts.append(taken)
        gain += gained
    return _needed(_joined(parts), pins, spare=gain - lacking)


def _next_few(by_value: Iterator[HintRecord], *, lacking: int, scale: int) -> list[HintRecord]:
    """The next hints, as many as are looked at in one pass: no fewer than hold `lacking` slots."""
    few: list[HintRecord] = []
    slots = 0
    for record in by_value:
        few.append(record)
        slots += len(record.slots)
        if slots >= lacking and (slots >= _SLOTS * scale or len(few) >= _HINTS * scale):
            break
    return few


def _holds_of(records: list[HintRecord], held: HeldSlots) -> _Holds:
    batches = [record.slots for record in records]
    return _Holds(
        records=records,
        at=held.places_of_held(np.concatenate(batches, dtype=np.int64)),
        who=np.repeat(np.arange(len(records)), list(map(len, batches))),
    )


def _joined(parts: list[_Holds]) -> _Holds:
    if len(parts) == 1:
        return parts[0]
    before = np.cumsum([0, *(len(part.records) for part in parts)])
    return _Holds(
        records=[record for part in parts for record in part.records],
        at=np.concatenate([part.at for part in parts]),
        who=np.concatenate([part.who + first for part, first in zip(parts, before[:-1], strict=True)]),
    )


def _take_first(holds: _Holds, pins: _Pins, *, lacking: int) -> tuple[_Holds, int]:
    """Take the pins of hints away until that gives `lacking` slots: of which hints, and how many slots it gives."""
    np.subtract.at(pins, holds.at, _ONE)
    gains = np.cumsum(holds.count((pins[holds.at] == 0) & _is_last(holds.at, len(pins))))
    count = min(int(gains.searchsorted(lacking)) + 1, len(gains))
    stop = int(holds.who.searchsorted(count))
    np.add.at(pins, holds.at[stop:], _ONE)
    return _Holds(records=holds.records[:count], at=holds.at[:stop], who=holds.who[:stop]), int(gains[count - 1])


def _is_last(at: IntArray, end: int) -> BoolArray:
    """Which entries of `at`, all below `end`, do not come again behind: the last hint that lets go frees a slot."""
    last = np.empty(end, np.int64)
    order = np.arange(len(at))
    last[at] = order
    is_last: BoolArray = last[at] == order
    return is_last


def _needed(holds: _Holds, pins: _Pins, *, spare: int) -> list[HintRecord]:
    """Give hints back, the most valuable first, as far as `spare` slots allow; which ones are left.

    The last one is always needed. Giving a hint back can make another one cost less, by no more than was spared for
    it: so only those are looked at whose cost was small enough in the beginning.
    """
    is_free = pins[holds.at] == 0
    costs = holds.count(is_free)
    doubtful = np.flatnonzero(costs[:-1] <= spare)
    if not len(doubtful):
        return holds.records
    has_shared = holds.count(_is_repeated(holds.at, len(pins))) > 0
    starts, spared = holds.starts(), set()
    for hint in doubtful[::-1].tolist():
        mine = holds.at[starts[hint] : starts[hint + 1]] if has_shared[hint] else None
        cost = int(costs[hint] if mine is None else np.count_nonzero(pins[mine] == 0))
        if cost <= spare:
            spare -= cost
            spared.add(hint)
            if mine is not None:
                pins[mine] += _ONE
    return [record for hint, record in enumerate(holds.records) if hint not in spared]


def _is_repeated(at: IntArray, end: int) -> BoolArray:
    """Which entries of `at`, all below `end`, occur more than once."""
    counts = np.zeros(end, np.int32)
    np.add.at(counts, at, _ONE)
    is_repeated: BoolArray = counts[at] > 1
    return is_repeated
