"""What any thread may see of the pools while the cache is at work: counts, and pictures of what lies where.

Duty: look and change nothing, without a lock. Counts are O(1); a picture looks at every slot that was ever used, in
passes of numpy over a part of the pool at a time. A slot that changes meanwhile is seen as it was or as it is, and what
was let go of a moment ago may still count as held.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from aiokv.core.pool_values import PoolCounts
from aiokv.core.world import World
from aiokv.errors import UsageError
from aiokv.model.ids import Tier

__all__ = ["CellMap", "CellState", "Peek"]

_PART_SLOTS: Final = 1 << 18
"""Slots looked at in one pass: their arrays stay in the processor's cache."""


class CellState(Enum):
    """What most slots of a cell are, as the character that stands for it; the first one of those that are as many."""

    QUARANTINED = "q"
    """Out of use for good: shown if any slot of the cell is."""
    RESERVED = "r"
    """Held without a key: something is being written there."""
    PINNED = "p"
    """Can be found, and is held."""
    CACHED = "c"
    """Can be found, and can be evicted."""
    FREE = "."


_BY_HOLDINGS: Final = "".join(
    state.value
    for state in (
        CellState.FREE, CellState.CACHED, CellState.RESERVED, CellState.PINNED, *[CellState.QUARANTINED] * 4,
    )
)  # fmt: skip
"""By `PoolBooks.peek_holdings`."""
_CODES: Final = np.frombuffer(_BY_HOLDINGS.encode(), np.uint8)
_PRECEDENCE: Final = np.frombuffer("".join(state.value for state in CellState).encode(), np.uint8)
_OUTSIDE: Final = np.uint8(0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CellMap:
    """One pool at one moment: `cells[i]` is the `CellState` of slots `[i * cell_slots, (i + 1) * cell_slots)`.

    Slots are counted from the first usable one: the null block is in no cell. The last cell may have fewer.
    """

    cell_slots: int
    cells: str


@final
class Peek:
    """The pools of one cache, seen from any thread."""

    __slots__ = ("_world",)

    def __init__(self, world: World) -> None:
        self._world = world

    def pools(self) -> dict[Tier, PoolCounts]:
        """Slots by state, per configured tier."""
        return {tier: pool.peek_counts() for tier, pool in self._world.pools().items()}

    def take_map(self, tier: Tier, *, cells: int) -> CellMap:
        """A pool in at most `cells` cells; `UsageError` for a tier that is not configured."""
        pool = self._world.pool(tier)
        if pool is None or cells < 1:
            raise UsageError(f"there is no map of {cells} cells of the {tier.value} tier")
        size = max(-(-pool.capacity // cells), 1)
        books = pool.peeked_books
        first, end = books.first, books.first + pool.capacity
        used = min(first + _round_up(books.free.fresh - first, size), end)
        step = size * max(_PART_SLOTS // size, 1)
        parts = [
            _name_cells(books.peek_holdings(start, min(start + step, used)), size=size)
            for start in range(first, used, step)
        ]
        count = _round_up(pool.capacity, size) // size
        return CellMap(cell_slots=size, cells="".join(parts).ljust(count, CellState.FREE.value))


def _name_cells(holdings: NDArray[np.uint8], *, size: int) -> str:
    """One character for every `size` slots; the last cell may have fewer."""
    codes = _CODES.take(holdings)
    if size == 1:
        return codes.tobytes().decode()
    whole = np.full(_round_up(len(codes), size), _OUTSIDE)
    whole[: len(codes)] = codes
    grid = whole.reshape(-1, size)
    counts = np.stack([np.count_nonzero(grid == code, axis=1) for code in _PRECEDENCE])
    counts[0] *= size + 1  # a slot that is out of use counts more than all others
    cells: NDArray[np.uint8] = _PRECEDENCE.take(counts.argmax(axis=0))
    return cells.tobytes().decode()


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
