"""Which slot goes where in one batch, put in the order that takes the fewest calls.

A batch has no order of its own: its slots are distinct. Where neither side lies in long stretches as it was given,
sorting one side may show some: a pool hands out again, backwards, what one request has given back.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from aiokv.model.ids import SlotArray

__all__ = ["CopyMap", "RowArray", "Stretches"]

RowArray = NDArray[np.intp]
"""Slots as numpy wants an index of rows, shape `[n]`."""

_MANY_IN_A_STRETCH: Final = 4
"""So many slots in one call, on average, are worth being put in order."""


@final
class Stretches:
    """Where the slots of a batch are cut: half-open pieces of adjacent slots."""

    __slots__ = ("_bounds",)

    def __init__(self, jumps: NDArray[np.bool_], *, total: int) -> None:
        self._bounds: list[int] = [0, *(np.flatnonzero(jumps) + 1).tolist(), total] if total else [0]

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return pairwise(self._bounds)


@final
class CopyMap:
    """The slots of one batch: `source[i]` goes to `target[i]`."""

    __slots__ = ("_lists", "runs", "source", "source_stretches", "target", "target_stretches")

    def __init__(self, source_blocks: SlotArray, target_blocks: SlotArray) -> None:
        source, target = source_blocks.astype(np.intp), target_blocks.astype(np.intp)
        order = _find_order(source, target)
        self.source: RowArray = source[order]
        self.target: RowArray = target[order]
        source_jumps, target_jumps = np.diff(self.source) != 1, np.diff(self.target) != 1
        self.source_stretches = Stretches(source_jumps, total=len(self))
        """Pieces whose sources are adjacent."""
        self.target_stretches = Stretches(target_jumps, total=len(self))
        """Pieces whose targets are adjacent."""
        self.runs = Stretches(source_jumps | target_jumps, total=len(self))
        """Pieces that are adjacent on both sides."""
        self._lists: tuple[list[int], list[int]] | None = None

    def __len__(self) -> int:
        return len(self.source)

    def as_lists(self) -> tuple[list[int], list[int]]:
        """The source slots and the target slots, made once."""
        if self._lists is None:
            self._lists = self.source.tolist(), self.target.tolist()
        return self._lists


def _find_order(source: RowArray, target: RowArray) -> RowArray | slice:
    """By source or by target, whichever then has fewer stretches, if that is worth it; else as it is."""
    few = len(source) // _MANY_IN_A_STRETCH
    if min(_count_jumps(source), _count_jumps(target)) < few:
        return slice(None)
    stretches, side = min(
        ((_count_jumps(np.sort(side)), side) for side in (source, target)), key=lambda found: found[0]
    )
    return np.argsort(side) if stretches < few else slice(None)


def _count_jumps(slots: RowArray) -> int:
    return int(np.count_nonzero(np.diff(slots) != 1))
