"""Fences: points of compute streams behind which slots were written or given back (law 5).

Duty: number fences in the order in which they are made, note per GPU slot the last one behind which it was written or
let go, and say what a copy, or another stream, has to wait for.

Rules
- Streams belong to the host. Where a fence is needed it is *promised* here, and the host records what was promised
  before it hands over another copy. Later than promised is safe: a fence stands for all that was launched before it.
- One number per slot does for any number of streams: whatever has touched the slot has a fence of at most this number,
  so the last fence of each stream up to it covers all of that. It may be waited for more than is needed, never less.
- A stream passes its fences in order: one that was passed stands for those before it, and they are forgotten.
- Without fences nothing is kept: no memory, and no more time than it takes to see that there are none.

State: per stream the fences that it may not have passed, oldest first; those that nobody has recorded yet; per slot the
number of its last fence, 0 for none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from aiokv.core.slot_memory import zeros
from aiokv.errors import UsageError
from aiokv.model.ids import SlotArray

__all__ = ["Fence", "FenceBook"]

_LOOKS: Final = 4
"""Fences asked about at a time, over all streams. Two would do: one is made each time, so they do not add up."""


@final
class Fence:
    """A point of one compute stream. Of two fences of a cache the one with the lower `number` was made first."""

    __slots__ = ("book", "mark", "number", "stream")

    def __init__(self, book: FenceBook, stream: object, *, number: int) -> None:
        self.book = book
        self.stream = stream
        self.number = number
        self.mark: object | None = None
        """What the backend calls it; None until it has been recorded."""

    def __repr__(self) -> str:
        return f"<Fence {self.number} of {self.stream!r}>"


@final
class FenceBook:
    """The fences of one cache. `gpu_slots` counts the null block."""

    __slots__ = ("_gpu_slots", "_last", "_numbers", "_streams", "_top", "promised")

    def __init__(self, gpu_slots: int) -> None:
        self._gpu_slots = gpu_slots
        self._numbers: NDArray[np.int64] | None = None
        self._streams: dict[Hashable, list[Fence]] = {}
        self._last = 0
        self._top = 0
        """The highest number that a slot may have."""
        self.promised: list[Fence] = []
        """Fences that the host has yet to record, oldest first: see `keep_promises`."""

    def __len__(self) -> int:
        """How many fences may not have been passed."""
        return sum(map(len, self._streams.values()))

    def promise(self, stream: object) -> Fence:
        """A fence of all that was launched on `stream` so far; the host records it before anything waits for it."""
        fence = self._make(stream)
        self.promised.append(fence)
        return fence

    def add(self, stream: object, mark: object) -> Fence:
        """A fence that the backend has recorded as `mark`."""
        fence = self._make(stream)
        fence.mark = mark
        return fence

    def keep_promises(self, record: Callable[[object], object]) -> None:
        """Have `record(stream)` record what was promised, once per stream; what it raises leaves the others promised.

        A stream for which it answers None has nothing to be waited for.
        """
        while self.promised:
            stream = self.promised[0].stream
            mark = record(stream)
            key = _key_of(stream)
            mine = [fence for fence in self.promised if _key_of(fence.stream) == key]
            for fence in mine:
                fence.mark = mark
            self.promised = [fence for fence in self.promised if _key_of(fence.stream) != key]
            if mark is None:
                self._forget(key, [fence for fence in self._streams[key] if fence.mark is not None])

    def forget_all(self) -> None:
        """Nothing is waited for any more: there is no backend left that could."""
        self._streams.clear()
        self.promised.clear()

    def forget_passed(self, is_passed: Callable[[object], bool]) -> None:
        """Forget fences that were passed, by asking a few times; the more there are, the more of them at once."""
        looks = _LOOKS
        for key in tuple(self._streams):
            fences = self._streams[key]
            seen = _count_passed(fences, is_passed, most_looks=looks)
            self._forget(key, fences[seen.passed :])
            looks -= seen.looks
            if not looks:
                return

    def note(self, slots: SlotArray, number: int) -> None:
        """Whatever has touched these slots so far did so before the fence `number`, or before one they had already."""
        if self._numbers is None:
            self._numbers = zeros(self._gpu_slots, np.int64)
        if number >= self._top:
            self._top = number
            self._numbers[slots] = number
        else:
            self._numbers[slots] = np.maximum(self._numbers.take(slots), number)

    def find_waits(self, slots: SlotArray, *, beside: object = None) -> tuple[Fence, ...]:
        """What must be passed before something else touches these slots: at most one fence for each stream.

        Those of the stream `beside` are left out: it is in order by itself. Changes nothing.
        """
        if not self._streams or self._numbers is None or not len(slots):
            return ()
        number = int(self._numbers.take(slots).max())
        waits = []
        for key, fences in self._streams.items():
            count = bisect_right(fences, number, key=_number_of)
            if count and (beside is None or key != _key_of(beside)):
                waits.append(fences[count - 1])
        return tuple(waits)

    def check(self, fence: object) -> Fence:
        """`UsageError` for what is no fence of this cache."""
        if not isinstance(fence, Fence) or fence.book is not self:
            raise UsageError(f"a fence comes from kv.fence() of the same runtime, {fence!r} does not")
        return fence

    def _make(self, stream: object) -> Fence:
        self._last += 1
        fence = Fence(self, stream, number=self._last)
        self._streams.setdefault(_key_of(stream), []).append(fence)
        return fence

    def _forget(self, key: Hashable, left: Sequence[Fence]) -> None:
        """Only these of a stream's fences are left; it is the last to be asked again."""
        self._streams.pop(key, None)
        if left:
            self._streams[key] = list(left)


class _Seen(NamedTuple):
    """How many fences of a stream were passed, the oldest ones, and how many were asked about."""

    passed: int
    looks: int


def _count_passed(fences: Sequence[Fence], is_passed: Callable[[object], bool], *, most_looks: int) -> _Seen:
    """Ask about fences farther and farther on, until one was not passed or is not recorded yet."""
    passed, looks = 0, 0
    while looks < most_looks and passed < len(fences):
        at = min(passed + (1 << looks), len(fences))
        looks += 1
        mark = fences[at - 1].mark
        if mark is None or not is_passed(mark):
            break
        passed = at
    return _Seen(passed=passed, looks=looks)


def _key_of(stream: object) -> Hashable:
    """Equal for the same stream. If it differs, the worst is that a stream waits for itself."""
    try:
        frozenset((stream,))
    except TypeError:  # it stays alive as long as a fence of it is kept, so that its id is nobody else's
        return id(stream)
    return stream


def _number_of(fence: Fence) -> int:
    return fence.number
