"""Which tokens of a prompt come from GPU, from CPU and from compute (law 7).

Rules
- Pure. Over the prefix of L tokens a token counts as `cpu` if some group loads the block that holds it, else as `gpu`;
  a token that no group covers takes the source of the next covered one, else `gpu`. The other N - L are `compute`.
- Both sources of the prefix are counted; neither is what the other leaves.
- All groups' blocks begin and end at hash blocks, and L at the end of one in every group, so a hash block is the grain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aiokv.core.masks import has_any
from aiokv.model.ids import BoolArray
from aiokv.model.plan import Hit
from aiokv.model.spec import CacheGeometry

__all__ = ["Sources", "find_sources"]


class Sources(NamedTuple):
    """Where the tokens of a prompt come from."""

    hit: Hit
    switches: int
    """How often the source switches between GPU and CPU along the prefix; `gcgc` has three switches."""


def find_sources(
    geometry: CacheGeometry,
    *,
    num_tokens: int,
    length: int,
    loads: Sequence[BoolArray],
    covered: Sequence[range],
) -> Sources:
    """The sources of a prompt of `num_tokens` tokens whose first `length` are a prefix found in the cache.

    Per group, `loads[g][i]` says whether block i of the prefix comes from CPU (shape `[length / B_g]`), and
    `covered[g]` is the range of blocks it covers.
    """
    compute = num_tokens - length
    if not any(map(has_any, loads)):
        return Sources(Hit(prompt_tokens=num_tokens, gpu_tokens=length, cpu_tokens=0, compute_tokens=compute), 0)
    from_cpu = _cpu_hash_blocks(geometry, length=length, loads=loads, covered=covered)
    size = geometry.hash_block_size
    hit = Hit(
        prompt_tokens=num_tokens,
        gpu_tokens=int(np.count_nonzero(~from_cpu)) * size,
        cpu_tokens=int(np.count_nonzero(from_cpu)) * size,
        compute_tokens=compute,
    )
    return Sources(hit, int(np.count_nonzero(from_cpu[1:] != from_cpu[:-1])))


def _cpu_hash_blocks(
    geometry: CacheGeometry, *, length: int, loads: Sequence[BoolArray], covered: Sequence[range]
) -> BoolArray:
    """Which hash blocks of the prefix count as `cpu`."""
    rows: list[BoolArray] = []
    total = first = length // geometry.hash_block_size
    for index, (mask, span) in enumerate(zip(loads, covered, strict=True)):
        step = geometry.hashes_per_block(index)
        rows.append(mask if step == 1 else np.repeat(mask, step))
        if span:
            first = min(first, span.start * step)
    from_cpu = rows[0] if len(rows) == 1 else np.logical_or.reduce(rows)
    # Every coverage ends at L or is empty, so what no group covers is one leading range.
    if 0 < first < total:
        from_cpu = from_cpu.copy()
        from_cpu[:first] = from_cpu[first]
    return from_cpu
