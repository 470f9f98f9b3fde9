"""Joint lookup: the longest prefix whose covered blocks are all resident, in either tier, in every group.

Rules
- Pure: no pool, pin or LRU order changes (invariant 6).
- Each (group, hash) is probed at most once per tier and call; the CPU tier is asked only for what the GPU tier misses.
- Positions are absolute (law 6).

How: every kind of attention needs "no missing block in a range", so a prefix sum of missing positions answers it for
all candidate lengths at once. Full groups are probed first, in growing slices, and stop at their first miss, which
bounds what the other groups are asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from aiokv.core.coverage import coverage, covered_range
from aiokv.model.ids import BoolArray, DigestArray, IntArray
from aiokv.model.plan import Found
from aiokv.model.spec import CacheGeometry, FullAttention

__all__ = ["GroupResidency", "Index", "Keys", "Residency", "candidate_lengths", "find_residency", "longest_valid"]

_FIRST_SLICE = 128
_SLICE_GROWTH = 4
_NO_BLOCKS: Final[BoolArray] = np.zeros(0, np.bool_)


class Index(Protocol):
    """What lookup needs of a pool. Pure."""

    def find(self, keys: DigestArray, group: int) -> Found:
        """Where the blocks with these hashes are; valid until the pool changes."""
        ...


class Keys(Protocol):
    """What lookup needs of a request's keys."""

    def digests(self, step: int, start: int, stop: int) -> DigestArray:  # noqa: PLR0917  # reads like a range
        """Hashes of blocks `[start, stop)` of `step` hash blocks each."""
        ...


class GroupResidency(NamedTuple):
    """Where the first `n` blocks of one group are; slots have a meaning only where the mask says so.

    `on_cpu` is false where `on_gpu` is true: GPU wins.
    """

    on_gpu: BoolArray
    gpu_slots: IntArray
    on_cpu: BoolArray
    cpu_slots: IntArray

    @property
    def present(self) -> BoolArray:
        """Resident in either tier, shape `[n]`."""
        return self.on_gpu | self.on_cpu


class Residency(NamedTuple):
    """The answer to one lookup: the usable prefix in tokens and, per group, where its blocks are."""

    length: int
    groups: tuple[GroupResidency, ...]


def find_residency(
    geometry: CacheGeometry,
    keys: Keys,
    *,
    gpu: Index,
    cpu: Index | None,
    num_tokens: int,
    align: int,
    longest: int | None = None,
    without: Sequence[BoolArray] = (),
) -> Residency:
    """Look up a prompt of `num_tokens` tokens in both tiers. `align` is in tokens.

    The answer is at most `longest` tokens; per group, the leading blocks marked in `without` are missing in the CPU
    tier.
    """
    limit = num_tokens - 1 if longest is None else min(longest, num_tokens - 1)
    found: dict[int, GroupResidency] = {}
    present: list[BoolArray] = [_NO_BLOCKS] * len(geometry.groups)
    for index in geometry.full_first:
        block = geometry.effective_block_size(index)
        margin = block if geometry.groups[index].lookahead else 0
        blocks = min(limit + margin, num_tokens - 1) // block
        unasked = without[index] if without else _NO_BLOCKS
        found[index] = _probe_group(geometry, keys, gpu=gpu, cpu=cpu, index=index, blocks=blocks, unasked=unasked)
        present[index] = found[index].present
        if isinstance(geometry.groups[index], FullAttention):
            limit = min(limit, _count_leading(present[index]) * block)
    groups = tuple(found[i] for i in range(len(geometry.groups)))
    length = longest_valid(geometry, num_tokens=num_tokens, present=present, align=align, limit=longest)
    return Residency(length=length, groups=groups)


def longest_valid(
    geometry: CacheGeometry, *, num_tokens: int, present: Sequence[BoolArray], align: int, limit: int | None = None
) -> int:
    """The largest valid L in tokens, at most `limit`, given per group which leading blocks are resident.

    What lies beyond a mask is missing.
    """
    longest = num_tokens - 1 if limit is None else min(limit, num_tokens - 1)
    for index, mask in enumerate(present):
        if isinstance(geometry.groups[index], FullAttention):
            longest = min(longest, _count_leading(mask) * geometry.effective_block_size(index))
    longest -= longest % geometry.alignment(align)
    if longest <= 0:
        return 0
    if all(_is_served(geometry, i, longest, present=mask, num_tokens=num_tokens) for i, mask in enumerate(present)):
        return longest
    lengths = candidate_lengths(geometry, num_tokens=longest + 1, align=align)
    valid = np.ones(len(lengths), np.bool_)
    for index, mask in enumerate(present):
        valid &= _is_covered(geometry, index, lengths=lengths, present=mask, num_tokens=num_tokens)
    valid[0] = True
    return int(lengths[valid.nonzero()[0][-1]])


def candidate_lengths(geometry: CacheGeometry, *, num_tokens: int, align: int) -> IntArray:
    """All multiples of the alignment from 0 to `num_tokens - 1`: the last token is always recomputed."""
    return np.arange(0, max(num_tokens, 1), geometry.alignment(align), dtype=np.int64)


def _is_served(  # noqa: PLR0917  # "of group i for L", like `covered_range`
    geometry: CacheGeometry, index: int, length: int, *, present: BoolArray, num_tokens: int
) -> bool:
    """`_is_covered` for one candidate length, which no full group's first miss is before: most often the answer."""
    group = geometry.groups[index]
    if isinstance(group, FullAttention) and not group.lookahead:
        return True
    span = covered_range(geometry, index, length)
    stop = span.stop
    if group.lookahead:
        stop += 1
        if length + geometry.effective_block_size(index) > num_tokens - 1:
            return False
    return span.start == stop or (stop <= len(present) and _all(present[span.start : stop]))


def _is_covered(
    geometry: CacheGeometry, index: int, *, lengths: IntArray, present: BoolArray, num_tokens: int
) -> BoolArray:
    """Per candidate length: is every block that group `index` needs for it resident?"""
    block = geometry.effective_block_size(index)
    span = coverage(geometry, index, lengths)
    missing = np.zeros(num_tokens // block + 2, np.int64)
    known = min(len(present), len(missing) - 1)
    missing[1:] = 1
    missing[1 : known + 1] = ~present[:known]
    np.cumsum(missing, out=missing)
    if not geometry.groups[index].lookahead:
        return np.equal(missing[span.stop], missing[span.start])
    ahead = np.minimum(span.stop + 1, len(missing) - 1)
    is_complete: BoolArray = np.equal(missing[ahead], missing[span.start])
    return is_complete & (lengths + block <= num_tokens - 1)


def _probe_group(
    geometry: CacheGeometry,
    keys: Keys,
    *,
    gpu: Index,
    cpu: Index | None,
    index: int,
    blocks: int,
    unasked: BoolArray,
) -> GroupResidency:
    """Probe up to `blocks` leading blocks; a full group stops after the slice that holds its first miss.

    The CPU tier is not asked for those marked in `unasked`.
    """
    step = geometry.hashes_per_block(index)
    stops_at_miss = isinstance(geometry.groups[index], FullAttention)
    parts: list[GroupResidency] = []
    start, size = 0, _FIRST_SLICE if stops_at_miss else max(blocks, 1)
    while start < blocks:
        stop = min(start + size, blocks)
        part = _probe(keys.digests(step, start, stop), gpu=gpu, cpu=cpu, group=index, unasked=unasked[start:stop])
        parts.append(part)
        if stops_at_miss and not part.present.all():
            break
        start, size = stop, size * _SLICE_GROWTH
    return _joined(parts)


def _probe(keys: DigestArray, *, gpu: Index, cpu: Index | None, group: int, unasked: BoolArray) -> GroupResidency:
    on_gpu = gpu.find(keys, group)
    on_cpu = np.zeros(len(keys), np.bool_)
    cpu_slots = np.zeros(len(keys), np.int64)
    if cpu is not None and not _all(on_gpu.present):
        is_absent = ~on_gpu.present
        is_absent[: len(unasked)] &= ~unasked
        absent = is_absent.nonzero()[0]
        found = cpu.find(keys if len(absent) == len(keys) else keys[absent], group)
        on_cpu[absent] = found.present
        cpu_slots[absent] = found.slots
    return GroupResidency(on_gpu=on_gpu.present, gpu_slots=on_gpu.slots, on_cpu=on_cpu, cpu_slots=cpu_slots)


def _joined(parts: Sequence[GroupResidency]) -> GroupResidency:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        none, no_slots = np.zeros(0, np.bool_), np.zeros(0, np.int64)
        return GroupResidency(on_gpu=none, gpu_slots=no_slots, on_cpu=none, cpu_slots=no_slots)
    return GroupResidency(
        on_gpu=np.concatenate([p.on_gpu for p in parts]),
        gpu_slots=np.concatenate([p.gpu_slots for p in parts]),
        on_cpu=np.concatenate([p.on_cpu for p in parts]),
        cpu_slots=np.concatenate([p.cpu_slots for p in parts]),
    )


def _count_leading(present: BoolArray) -> int:
    """How many blocks are present before the first one that is not."""
    return len(present) if _all(present) else int(present.argmin())


def _all(mask: BoolArray) -> bool:
    """`mask.all()`, several times as fast on short masks."""
    return int(np.count_nonzero(mask)) == len(mask)
