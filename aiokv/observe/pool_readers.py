"""What the metric families of the pools read; the rules are those of `readers.py`."""

from __future__ import annotations

from collections.abc import Iterable

from aiokv.core.block_ages import GAP_BOUNDS, TICKS_PER_SECOND, BlockAges, Gaps
from aiokv.model.ids import Tier
from aiokv.observe.readers import Buckets, Reading, View

__all__ = [
    "read_alloc_failures",
    "read_corrupt_blocks",
    "read_eviction_idle",
    "read_evictions",
    "read_orphan_buffers",
    "read_pinned_bytes",
    "read_pool_blocks",
    "read_pool_capacity",
    "read_reuse_gap",
    "read_store_skips",
]


def read_pool_blocks(view: View) -> Iterable[Reading]:
    """Every slot is in one state: they sum to the capacity, whoever changes them meanwhile."""
    for tier, counts in view.core.peek.pools().items():
        for state, blocks in counts.by_state().items():
            yield Reading((tier.value, state.value), blocks)


def read_pool_capacity(view: View) -> Iterable[Reading]:
    """Usable slots times what lies behind one."""
    for tier, capacity in view.capacities.items():
        if slot_bytes := view.facts.slot_bytes.get(tier, 0):
            yield Reading((tier.value,), capacity * slot_bytes)


def read_pinned_bytes(view: View) -> Iterable[Reading]:
    """Only a CPU tier has an arena to register."""
    if Tier.CPU in view.capacities:
        yield Reading((), view.facts.read_pinning().registered_bytes)


def read_evictions(view: View) -> Iterable[Reading]:
    """Blocks that are not findable any more."""
    for (tier, reason), blocks in view.core.counters.evicted_blocks.items():
        if tier in view.capacities:
            yield Reading((tier.value, reason.value), blocks)


def read_store_skips(view: View) -> Iterable[Reading]:
    """Blocks offered to the CPU tier and not copied."""
    if Tier.CPU in view.capacities:
        for reason, blocks in view.core.counters.store_skipped_blocks.items():
            yield Reading((reason.value,), blocks)


def read_corrupt_blocks(view: View) -> Iterable[Reading]:
    """Blocks whose bytes had changed."""
    if Tier.CPU in view.capacities:
        yield Reading((), view.core.counters.corrupt_blocks)


def read_alloc_failures(view: View) -> Iterable[Reading]:
    """Requests that had to wait for GPU slots; what the CPU pool lacks is a skipped store."""
    for reason, count in view.core.counters.alloc_failures.items():
        yield Reading((Tier.GPU.value, reason.value), count)


def read_orphan_buffers(view: View) -> Iterable[Reading]:
    """Written although nobody waits, or perhaps written although the backend is lost."""
    pools = view.core.peek.pools()
    for tier in view.capacities:
        yield Reading((tier.value,), view.core.meters.orphan_blocks(tier) + pools[tier].quarantined)


def read_eviction_idle(view: View) -> Iterable[Reading]:
    """Last used to evicted, of sampled blocks."""
    for tier, ages in _ages_of(view):
        yield Reading((tier.value,), _take_gaps(ages.evictions))


def read_reuse_gap(view: View) -> Iterable[Reading]:
    """Last used to used again, of sampled blocks."""
    for tier, ages in _ages_of(view):
        yield Reading((tier.value,), _take_gaps(ages.reuses))


def _ages_of(view: View) -> Iterable[tuple[Tier, BlockAges]]:
    for tier in view.capacities:
        if (ages := view.core.meters.ages(tier)) is not None:
            yield tier, ages


def _take_gaps(gaps: Gaps) -> Buckets:
    return Buckets(GAP_BOUNDS, tuple(gaps.counts), gaps.ticks / TICKS_PER_SECOND)
