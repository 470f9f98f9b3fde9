"""What is known of a slot, as bits, and which sets of bits break a rule (invariants 1 to 4).

A slot's facts are one number, its *pattern*. An audit counts slots by pattern, so that it need not look at a slot again
to judge it: a rule is asked once per pattern that occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from aiokv.core.pool_values import PoolCounts
from aiokv.model.ids import IntArray

__all__ = [
    "ARRIVING", "ASTRAY", "INDEXED", "MISCOUNTED", "MISPLACED", "NEGATIVE", "OUT", "PATTERNS", "PINNED", "QUEUED",
    "STACKED", "STACKED_TWICE", "STALE", "UNUSED", "count_patterns", "count_slots", "find_broken_rules",
    "find_wrong_counts",
]  # fmt: skip

PINNED: Final = 1
INDEXED: Final = 2
QUEUED: Final = 4
OUT: Final = 8
"""Quarantined."""
STALE: Final = 16
STACKED: Final = 32
"""On the free stack."""
STACKED_TWICE: Final = 64
UNUSED: Final = 128
"""Never handed out, or the null block."""
ASTRAY: Final = 256
"""Has a key and is not found under it."""
MISPLACED: Final = 512
"""In the eviction queue, which would never come to it."""
NEGATIVE: Final = 1024
"""Less than no pin."""
MISCOUNTED: Final = 2048
"""Its pins are not its holders."""
ARRIVING: Final = 4096
"""The target of a copy that has not ended."""
PATTERNS: Final = 8192


def _is_reserved(facts: int) -> bool:
    return facts & (PINNED | INDEXED | OUT) == PINNED


def _count_states(facts: int) -> int:
    return sum(map(bool, (facts & STACKED, _is_reserved(facts), facts & INDEXED, facts & OUT)))


_RULES: Final[tuple[tuple[str, Callable[[int], object]], ...]] = (
    ("a pin count is negative", lambda facts: facts & NEGATIVE),
    ("a slot that was never used is in use", lambda facts: facts & UNUSED and (facts & PINNED or _count_states(facts))),
    ("a slot is twice on the free stack", lambda facts: facts & STACKED_TWICE),
    ("a free slot has a pin", lambda facts: facts & STACKED and facts & PINNED),
    ("a slot is in no state or in two", lambda facts: not facts & UNUSED and _count_states(facts) != 1),
    (
        "the evictable slots are not those with a key and no pin",
        lambda facts: bool(facts & QUEUED) != (facts & (INDEXED | PINNED) == INDEXED),
    ),
    ("a slot is not found under its key", lambda facts: facts & ASTRAY),
    ("an evictable slot has no place in the eviction queue", lambda facts: facts & MISPLACED),
    ("a slot can be found before its copy has ended", lambda facts: facts & ARRIVING and facts & INDEXED),
)


def count_patterns(tally: IntArray) -> dict[int, int]:
    """How many slots have each pattern that occurs, given `tally[pattern]`."""
    occurring = np.flatnonzero(tally)
    return dict(zip(occurring.tolist(), tally[occurring].tolist(), strict=True))


def find_broken_rules(slots: Mapping[int, int]) -> list[str]:
    """What is wrong with slots, in words; `slots[pattern]` is how many have it."""
    found = []
    for text, is_broken in _RULES:
        broken = sum(count for facts, count in slots.items() if is_broken(facts))
        if broken:
            found.append(f"{text}: {broken} slots")
    return found


def find_wrong_counts(slots: Mapping[int, int], counts: PoolCounts, *, doubtful: int = 0) -> list[str]:
    """Which counts of a pool are not those of its slots, in words; `doubtful` slots may have other facts by now."""
    pairs = {
        "reserved": (sum(count for facts, count in slots.items() if _is_reserved(facts)), counts.reserved),
        "resident": (count_slots(slots, INDEXED), counts.resident),
        "evictable": (count_slots(slots, QUEUED), counts.evictable),
        "quarantined": (count_slots(slots, OUT), counts.quarantined),
    }
    found = [
        f"{number} slots are {name}, counted {told}"
        for name, (number, told) in pairs.items()
        if abs(number - told) > doubtful
    ]
    if not 0 <= counts.claimed <= counts.free + counts.evictable:
        found.append(f"there are more claims than slots for them: {counts.claimed}")
    return found


def count_slots(slots: Mapping[int, int], fact: int) -> int:
    """How many slots have this fact."""
    return sum(count for facts, count in slots.items() if facts & fact)
