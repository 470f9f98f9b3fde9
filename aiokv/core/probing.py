"""Asking both pools where blocks of one request are.

Rules
- Pure. Each (group, hash) is probed at most once per tier; the CPU tier is asked only for what the GPU tier misses.
  Where both share a table one search answers for both, if there is no guess.
- A guess (see `foresight.py`) is only where to look first: it counts if that slot holds that very hash in this epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol, final

import numpy as np

from aiokv.core.index import FoundInBoth
from aiokv.core.masks import is_all
from aiokv.model.ids import BoolArray, DigestArray, IntArray, SlotArray, Tier
from aiokv.model.plan import Found
from aiokv.model.spec import CacheGeometry

__all__ = ["NOWHERE", "GroupResidency", "Guesses", "Index", "JointIndex", "Keys", "Prober", "Search"]

_FIRST_SLICE: Final = 128
_SLICE_GROWTH: Final = 4
_NO_BLOCKS: Final[BoolArray] = np.zeros(0, np.bool_)
_NO_SLOTS: Final[IntArray] = np.zeros(0, np.int64)


class Search(NamedTuple):
    """The GPU tier was asked for the leading blocks of a group."""

    blocks: int
    """So many of them."""
    last: bytes
    """The hash of the last one, and so of all."""
    moment: int
    """When, by the clock of that tier: where they are not as they were found, they are missing or have come since."""


class Guesses(NamedTuple):
    """What was found out about a request's blocks beforehand."""

    slots: Mapping[tuple[Tier, int], IntArray]
    """By tier and group: the slot in which each block may be; any where it was not found."""
    searches: Mapping[int, Search]
    """By group. They are believed: those of other tokens are to be left out."""


class Index(Protocol):
    """What lookup needs of a pool. Pure."""

    def find(self, keys: DigestArray, group: int) -> Found:
        """Where the blocks with these hashes are; valid until the pool changes."""
        ...

    def holds(self, slots: SlotArray, keys: DigestArray, *, group: int) -> BoolArray:
        """Which of `slots`, all of them slots of the pool, hold `keys[i]`."""
        ...

    def may_have_come(self, keys: DigestArray, *, since: int) -> BoolArray:
        """Which of `keys` may have come into the pool since that moment of it."""
        ...


class JointIndex(Protocol):
    """Both tiers, where one search answers for both. Pure."""

    def find_in_both(self, keys: DigestArray, group: int) -> FoundInBoth:
        """Where they are on the GPU, and on the CPU where they are not there; valid until a pool changes."""
        ...


class Keys(Protocol):
    """What lookup needs of a request's keys."""

    def digests(self, step: int, start: int, stop: int) -> DigestArray:  # noqa: PLR0917  # reads like a range
        """Hashes of blocks `[start, stop)` of `step` hash blocks each."""
        ...


class GroupResidency(NamedTuple):
    """Where the first `n` blocks of one group are; slots have a meaning only where the mask says so.

    `on_cpu` is false where `on_gpu` is true: GPU wins. Blocks before a range that was probed alone are nowhere.
    """

    on_gpu: BoolArray
    gpu_slots: IntArray
    on_cpu: BoolArray
    cpu_slots: IntArray
    present: BoolArray
    """In either tier."""


NOWHERE: Final = GroupResidency(_NO_BLOCKS, _NO_SLOTS, _NO_BLOCKS, _NO_SLOTS, _NO_BLOCKS)


@final
class Prober:
    """Probes blocks of one request; per group, the CPU tier is not asked for leading blocks marked in `without`."""

    __slots__ = ("_cpu", "_geometry", "_gpu", "_guesses", "_joint", "_keys", "_without")

    def __init__(
        self,
        geometry: CacheGeometry,
        keys: Keys,
        *,
        gpu: Index,
        cpu: Index | None,
        without: Sequence[BoolArray],
        guesses: Guesses | None,
        joint: JointIndex | None = None,
    ) -> None:
        self._geometry = geometry
        self._keys = keys
        self._gpu = gpu
        self._cpu = cpu
        self._without = without
        self._guesses = guesses
        self._joint = joint if cpu is not None and guesses is None else None

    def probe_leading(self, index: int, blocks: int) -> GroupResidency:
        """Up to `blocks` leading blocks, in growing slices; the slice that holds the first miss is the last.

        What was searched for beforehand is in the first slice.
        """
        parts: list[GroupResidency] = []
        search = self._guesses.searches.get(index) if self._guesses else None
        start, size = 0, _FIRST_SLICE if search is None else max(search.blocks, _FIRST_SLICE)
        while start < blocks:
            stop = min(start + size, blocks)
            part = self.probe_slice(index, start, stop)
            if start == 0 and stop == blocks:
                return part
            parts.append(part)
            if not is_all(part.present):
                break
            start, size = stop, size * _SLICE_GROWTH
        return _joined(parts) if parts else NOWHERE

    def probe_range(self, index: int, start: int, stop: int) -> GroupResidency:  # noqa: PLR0917  # reads like a range
        """Blocks `[start, stop)`, behind as many that are nowhere as there are before them."""
        if start >= stop:
            return NOWHERE
        part = self.probe_slice(index, start, stop)
        return part if start == 0 else _joined([_nowhere(start), part])

    def probe_before(self, index: int, start: int, found: GroupResidency) -> GroupResidency:  # noqa: PLR0917
        """The same blocks and those before `start`, which were not probed yet."""
        if start == 0:
            return found
        on_gpu, gpu_slots, on_cpu, cpu_slots, present = found
        tail = GroupResidency(on_gpu[start:], gpu_slots[start:], on_cpu[start:], cpu_slots[start:], present[start:])
        return _joined([self.probe_slice(index, 0, start), tail])

    def probe_slice(self, index: int, start: int, stop: int) -> GroupResidency:  # noqa: PLR0917  # reads like a range
        """Blocks `[start, stop)`, in that order and no others."""
        keys = self._keys.digests(self._geometry.hashes_per_block(index), start, stop)
        if self._joint is not None:
            return self._probe_both(self._joint.find_in_both(keys, index), index=index, start=start)
        guess = self._guess(Tier.GPU, index, start, stop) if self._guesses else _NO_SLOTS
        since = self._since(index, stop) if self._guesses else None
        on_gpu, gpu_slots = _find(self._gpu, keys, group=index, guess=guess, since=since)
        on_cpu = np.zeros(len(keys), np.bool_)
        cpu_slots = np.zeros(len(keys), np.int64)
        if self._cpu is None or is_all(on_gpu):
            return GroupResidency(on_gpu, gpu_slots, on_cpu, cpu_slots, on_gpu)
        is_absent = ~on_gpu
        if self._without:
            unasked = self._without[index][start:stop]
            is_absent[: len(unasked)] &= ~unasked
        guess = self._guess(Tier.CPU, index, start, stop) if self._guesses else _NO_SLOTS
        if is_all(is_absent):
            on_cpu, cpu_slots = _find(self._cpu, keys, group=index, guess=guess, since=None)
            return GroupResidency(on_gpu, gpu_slots, on_cpu, cpu_slots, on_cpu)
        absent = is_absent.nonzero()[0]
        on_cpu[absent], cpu_slots[absent] = _find(
            self._cpu,
            keys.take(absent, axis=0),
            group=index,
            guess=guess[absent] if len(guess) else guess,
            since=None,
        )
        return GroupResidency(on_gpu, gpu_slots, on_cpu, cpu_slots, on_gpu | on_cpu)

    def _probe_both(self, found: FoundInBoth, *, index: int, start: int) -> GroupResidency:
        on_gpu, gpu_slots = found.first
        if found.second is None:
            return GroupResidency(on_gpu, gpu_slots, np.zeros(len(on_gpu), np.bool_), gpu_slots, on_gpu)
        on_cpu, cpu_slots = found.second
        if self._without:
            unasked = self._without[index][start : start + len(on_cpu)]
            on_cpu[: len(unasked)] &= ~unasked
        return GroupResidency(on_gpu, gpu_slots, on_cpu, cpu_slots, on_gpu | on_cpu)

    def _guess(self, tier: Tier, index: int, start: int, stop: int) -> IntArray:  # noqa: PLR0917  # reads like a range
        """Where blocks `[start, stop)` may be; empty if nothing is known of all of them."""
        guess = _NO_SLOTS if self._guesses is None else self._guesses.slots.get((tier, index), _NO_SLOTS)
        return guess[start:stop] if len(guess) >= stop else _NO_SLOTS

    def _since(self, index: int, stop: int) -> int | None:
        """When the GPU tier was asked for all blocks before `stop`, if it was."""
        search = None if self._guesses is None else self._guesses.searches.get(index)
        return None if search is None or search.blocks < stop else search.moment


def _joined(parts: Sequence[GroupResidency]) -> GroupResidency:
    return GroupResidency(*map(np.concatenate, zip(*parts, strict=True)))


def _nowhere(blocks: int) -> GroupResidency:
    mask, slots = np.zeros(blocks, np.bool_), np.zeros(blocks, np.int64)
    return GroupResidency(mask, slots, mask, slots, mask)


def _find(pool: Index, keys: DigestArray, *, group: int, guess: IntArray, since: int | None) -> Found:
    """Look where the blocks may be, then search for those that are not there, but for what was missing at the moment
    `since` and has not come.
    """
    if len(guess):
        present, slots = pool.holds(guess, keys, group=group), guess.copy()
    elif since is not None:
        present, slots = np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.int64)
    else:
        return pool.find(keys, group)
    missing = np.logical_not(present).nonzero()[0]
    if since is not None and len(missing):
        rows = keys if len(missing) == len(keys) else keys.take(missing, axis=0)
        missing = missing[pool.may_have_come(rows, since=since)]
    if len(missing):
        present[missing], slots[missing] = pool.find(keys.take(missing, axis=0), group)
    return Found(present, slots)
