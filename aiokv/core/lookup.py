"""Joint lookup: the longest prefix whose covered blocks are all resident, in either tier, in every group.

Rules
- Pure: no pool, pin or LRU order changes (invariant 6).
- Each (group, hash) is probed at most once per tier and call; the CPU tier is asked only for what the GPU tier misses.
- Positions are absolute (law 6).

How: full groups are probed first, in growing slices, and stop at their first miss, which bounds what the other groups
are asked. These are asked first for what the longest prefix needs, which most often is all that is there. If it is not,
every kind of attention needs "no missing block in a range", so a prefix sum of missing positions answers it for all
candidate lengths at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aiokv.core.coverage import coverage, coverage_start
from aiokv.core.masks import count_leading, is_all
from aiokv.core.probing import NOWHERE, GroupResidency, Guesses, Index, JointIndex, Keys, Prober
from aiokv.model.ids import BoolArray, IntArray
from aiokv.model.spec import CacheGeometry, FullAttention

__all__ = ["Residency", "candidate_lengths", "find_residency", "longest_valid"]


class Residency(NamedTuple):
    """The answer to one lookup: the usable prefix in tokens and, per group, where its blocks are.

    A group tells of no more blocks than were probed: those that the prefix needs, at least.
    """

    length: int
    groups: Sequence[GroupResidency]


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
    guesses: Guesses | None = None,
    joint: JointIndex | None = None,
) -> Residency:
    """Look up a prompt of `num_tokens` tokens in both tiers. `align` is in tokens.

    The answer is at most `longest` tokens; per group, the leading blocks marked in `without` are missing in the CPU
    tier. `guesses` say where to look first; `joint` answers for both tiers at once.
    """
    limit = num_tokens - 1 if longest is None else min(longest, num_tokens - 1)
    prober = Prober(geometry, keys, gpu=gpu, cpu=cpu, without=without, guesses=guesses, joint=joint)
    groups = [NOWHERE] * len(geometry.groups)
    for index in geometry.full_groups:
        block = geometry.block_sizes[index]
        margin = block if geometry.groups[index].lookahead else 0
        groups[index] = prober.probe_leading(index, min(limit + margin, num_tokens - 1) // block)
        limit = min(limit, count_leading(groups[index].present) * block)
    limit -= limit % geometry.alignment(align)
    if limit <= 0 or not geometry.not_prefixes:
        return Residency(max(limit, 0), groups)
    starts = {index: coverage_start(geometry, index, limit) for index in geometry.other_groups}
    for index, start in starts.items():
        groups[index] = prober.probe_range(index, start, _needed_blocks(geometry, index, limit, num_tokens=num_tokens))
    if _is_valid(geometry, limit, present=[group.present for group in groups], num_tokens=num_tokens):
        return Residency(limit, groups)
    for index, start in starts.items():
        groups[index] = prober.probe_before(index, start, groups[index])
    present = [group.present for group in groups]
    return Residency(_search(geometry, limit, present=present, num_tokens=num_tokens, align=align), groups)


def longest_valid(
    geometry: CacheGeometry, *, num_tokens: int, present: Sequence[BoolArray], align: int, limit: int | None = None
) -> int:
    """The largest valid L in tokens, at most `limit`, given per group which leading blocks are resident.

    What lies beyond a mask is missing.
    """
    longest = num_tokens - 1 if limit is None else min(limit, num_tokens - 1)
    for index, mask in enumerate(present):
        if isinstance(geometry.groups[index], FullAttention):
            longest = min(longest, count_leading(mask) * geometry.block_sizes[index])
    longest -= longest % geometry.alignment(align)
    if longest <= 0 or _is_valid(geometry, longest, present=present, num_tokens=num_tokens):
        return max(longest, 0)
    return _search(geometry, longest, present=present, num_tokens=num_tokens, align=align)


def _search(geometry: CacheGeometry, limit: int, *, present: Sequence[BoolArray], num_tokens: int, align: int) -> int:
    """The largest valid L up to `limit`."""
    lengths = candidate_lengths(geometry, num_tokens=limit + 1, align=align)
    valid = np.ones(len(lengths), np.bool_)
    for index, mask in enumerate(present):
        valid &= _is_covered(geometry, index, lengths=lengths, present=mask, num_tokens=num_tokens)
    valid[0] = True
    return int(lengths[valid.nonzero()[0][-1]])


def candidate_lengths(geometry: CacheGeometry, *, num_tokens: int, align: int) -> IntArray:
    """All multiples of the alignment from 0 to `num_tokens - 1`: the last token is always recomputed."""
    return np.arange(0, max(num_tokens, 1), geometry.alignment(align), dtype=np.int64)


def _needed_blocks(geometry: CacheGeometry, index: int, length: int, *, num_tokens: int) -> int:  # noqa: PLR0917
    """Where the blocks end that group `index` needs for a prefix of `length` tokens, as far as they can be full."""
    block = geometry.block_sizes[index]
    margin = block if geometry.groups[index].lookahead else 0
    return min(length + margin, num_tokens - 1) // block


def _is_valid(geometry: CacheGeometry, length: int, *, present: Sequence[BoolArray], num_tokens: int) -> bool:
    """Whether all blocks are there for one candidate length, before which no full group has a miss."""
    for index in geometry.not_prefixes:
        start, stop = coverage_start(geometry, index, length), length // geometry.block_sizes[index]
        if geometry.groups[index].lookahead:
            stop += 1
            if stop > _needed_blocks(geometry, index, length, num_tokens=num_tokens):
                return False
        if start < stop and (stop > len(present[index]) or not is_all(present[index][start:stop])):
            return False
    return True


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
