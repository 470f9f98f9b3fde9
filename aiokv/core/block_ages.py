"""How long the blocks of a pool lie idle: until they are evicted, and until a request uses them again.

Duty: stamp blocks as their last pin goes, a batch at a time, and look at one block in `SAMPLE` of those that are
evicted or hit: which one depends on their number alone, so what repeats is sampled alike.

Rules: the core knows no clock. The host says what time it is before it lets requests in and out; what happens in
between counts as happening then. Nothing here decides anything.

State: the tick at which each slot fell idle; how many blocks are passed before the next sample of each kind.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from aiokv.core.slot_memory import zeros
from aiokv.model.ids import IntArray, SlotArray

__all__ = ["GAP_BOUNDS", "SAMPLE", "TICKS_PER_SECOND", "BlockAges", "Gaps"]

TICKS_PER_SECOND: Final = 16
"""Four bytes hold four years of them."""
SAMPLE: Final = 256

_TICK_BOUNDS: Final = tuple(4**power for power in range(9))
GAP_BOUNDS: Final = tuple(ticks / TICKS_PER_SECOND for ticks in _TICK_BOUNDS)
"""Upper bounds in seconds, each four times the one before: a sixteenth of a second to an hour."""


@final
class Gaps:
    """How long sampled blocks had been idle: counts by upper bound (the last one is above all), and the sum."""

    __slots__ = ("counts", "ticks", "until_next")

    def __init__(self) -> None:
        self.counts = [0] * (len(GAP_BOUNDS) + 1)
        self.ticks = 0
        self.until_next = SAMPLE
        """The so manieth block from now on is the next to be looked at."""

    def pick(self, slots: SlotArray) -> SlotArray:
        """Which of these blocks are looked at, when `until_next` of them have come."""
        picked = slots[self.until_next - 1 :: SAMPLE]
        self.until_next += len(picked) * SAMPLE - len(slots)
        return picked

    def note(self, ticks: int) -> None:
        """One was idle for so long."""
        self.counts[bisect_left(_TICK_BOUNDS, ticks)] += 1
        self.ticks += ticks


@final
class BlockAges:
    """When each slot of a pool fell idle, and samples of what came of it."""

    __slots__ = ("_idle_since", "_now", "evictions", "reuses", "tick")

    def __init__(self, slots: int) -> None:
        self._idle_since: NDArray[np.int32] = zeros(slots, np.int32)
        self._now = np.array(0, np.int32)
        self.tick = 0
        """The time as the host told it last."""
        self.evictions = Gaps()
        self.reuses = Gaps()

    def set_time(self, tick: int) -> None:
        """It is later now."""
        self.tick = tick
        self._now = np.array(tick, np.int32)

    def stamp(self, slots: SlotArray) -> None:
        """These have fallen idle."""
        self._idle_since[slots] = self._now

    def count_evicted(self, slots: IntArray) -> None:
        """These idle blocks are being evicted."""
        if len(slots) < self.evictions.until_next:
            self.evictions.until_next -= len(slots)
        else:
            for since in self._idle_since[self.evictions.pick(slots)].tolist():
                self.evictions.note(self.tick - since)

    def count_used(self, slots: SlotArray, pins: NDArray[np.int32]) -> None:
        """A request uses these blocks; those with pins were not idle."""
        picked = self.reuses.pick(slots)
        for since in self._idle_since[picked[pins[picked] == 0]].tolist():
            self.reuses.note(self.tick - since)
