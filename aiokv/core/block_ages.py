"""How long the blocks of a pool lie idle: until they are evicted, and until a request uses them again.

Duty: stamp blocks as their last pin goes, a batch at a time, and look at one block in `SAMPLE` of those that are
evicted or hit, and at no more than one of a step: which one depends on their number alone, so that what is repeated is
sampled alike. Blocks that come and go together have one age.

Rules: the core knows no clock. The host says what time it is before it lets requests in and out; what happens in
between counts as happening then. Until it does so for the first time nothing is stamped, and what was idle by then has
no age. Nothing here decides anything.

State: the tick at which each slot fell idle; how many blocks are passed before the next sample of each kind.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from aiokv.core.slot_memory import zeros
from aiokv.model.ids import SlotArray

__all__ = ["GAP_BOUNDS", "SAMPLE", "TICKS_PER_SECOND", "BlockAges", "Gaps"]

TICKS_PER_SECOND: Final = 16
"""Four bytes hold four years of them."""
SAMPLE: Final = 1024

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
        """How many blocks from now on the next one is looked at."""

    def pick(self, slots: SlotArray) -> int:
        """Which of these blocks, `until_next` of them or more, is looked at."""
        picked = slots.item(self.until_next - 1)
        self.until_next = SAMPLE
        return int(picked)

    def note(self, ticks: int) -> None:
        """One was idle for so long."""
        self.counts[bisect_left(_TICK_BOUNDS, ticks)] += 1
        self.ticks += ticks


@final
class BlockAges:
    """When each slot of a pool fell idle, and samples of what came of it."""

    __slots__ = ("_idle_since", "_now", "evictions", "is_on", "reuses", "tick")

    def __init__(self, slots: int) -> None:
        self._idle_since: NDArray[np.int32] = zeros(slots, np.int32)
        self._now = np.array(0, np.int32)
        self.tick = 0
        """The time as the host told it last."""
        self.is_on = False
        """Whether it ever did."""
        self.evictions = Gaps()
        self.reuses = Gaps()

    def set_time(self, tick: int) -> None:
        """It is later now."""
        self.is_on = True
        self.tick = tick
        self._now = np.array(tick, np.int32)

    def stamp(self, slots: SlotArray) -> None:
        """These have fallen idle."""
        if self.is_on:
            self._idle_since[slots] = self._now

    def note_eviction(self, slot: int) -> None:
        """This idle block is being evicted."""
        self._note(self.evictions, slot=slot)

    def note_reuse(self, slot: int) -> None:
        """A request uses this idle block."""
        self._note(self.reuses, slot=slot)

    def _note(self, gaps: Gaps, *, slot: int) -> None:
        since = self._idle_since.item(slot)
        if since:
            gaps.note(self.tick - since)
