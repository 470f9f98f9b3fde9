"""How a CPU arena is cut for registration with a device: ends of chunks are ends of slots and of pages.

Of slots, because no copy may straddle two registrations; of pages, because the driver registers whole pages and
refuses one that it has already. One call of 512 GiB or more fails on current drivers whatever is free, and a long call
holds up whoever else wants something of the driver: so at most 64 GiB, unless pages do not allow it.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import Final, final

__all__ = ["MOST_BYTES", "MOST_BYTES_PER_CALL", "Chunks", "cut_chunks"]

MOST_BYTES: Final = 64 << 30
MOST_BYTES_PER_CALL: Final = (512 << 30) - 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Chunk `i` holds the slots `[i * slots_per_chunk, (i + 1) * slots_per_chunk)`, the last one what is left."""

    slots: int
    slots_per_chunk: int
    slot_bytes: int

    @property
    def count(self) -> int:
        """How many calls register all of it; 0 for an empty arena."""
        return -(-self.slots // self.slots_per_chunk) if self.num_bytes else 0

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return self.slots * self.slot_bytes

    @property
    def largest_bytes(self) -> int:
        """Of the first chunk."""
        return min(self.slots, self.slots_per_chunk) * self.slot_bytes


def cut_chunks(*, slots: int, slot_bytes: int, most_bytes: int = MOST_BYTES) -> Chunks:
    """Chunks of at most `most_bytes`, or of as few slots as end on a page if those are more."""
    step = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, slot_bytes) if slot_bytes else 1
    steps = max(most_bytes // (step * slot_bytes), 1) if slot_bytes else 1
    return Chunks(slots=slots, slots_per_chunk=step * steps, slot_bytes=slot_bytes)
