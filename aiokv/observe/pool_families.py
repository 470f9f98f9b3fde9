"""Metric families of the pools: what they hold, and how blocks come and go."""

from __future__ import annotations

from typing import Final

from aiokv.core.block_ages import SAMPLE, TICKS_PER_SECOND
from aiokv.observe import pool_readers
from aiokv.observe.family import Family, Kind

__all__ = ["POOLS"]

POOLS: Final = (
    Family(
        name="aiokv_pool_blocks",
        kind=Kind.GAUGE,
        unit="blocks",
        labels=("tier", "state"),
        help="Slots of a pool by state; the states sum to its capacity.",
        read=pool_readers.read_pool_blocks,
    ),
    Family(
        name="aiokv_pool_capacity_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=("tier",),
        help="Memory behind the usable slots of a pool.",
        read=pool_readers.read_pool_capacity,
    ),
    Family(
        name="aiokv_pinned_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        help="How much of the CPU pool is registered with the device: all once pinned, 0 if unpinned or without one.",
        read=pool_readers.read_pinned_bytes,
    ),
    Family(
        name="aiokv_evictions",
        kind=Kind.COUNTER,
        labels=("tier", "reason"),
        help="Blocks that stopped being findable.",
        read=pool_readers.read_evictions,
    ),
    Family(
        name="aiokv_eviction_idle_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        labels=("tier",),
        help=f"How long evicted blocks had not been used, of one in {SAMPLE:,}; to 1/{TICKS_PER_SECOND} of a second.",
        read=pool_readers.read_eviction_idle,
    ),
    Family(
        name="aiokv_block_reuse_gap_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        labels=("tier",),
        help=f"How long blocks had not been used when a request hit them, of one in {SAMPLE:,}; none that was in use.",
        read=pool_readers.read_reuse_gap,
    ),
    Family(
        name="aiokv_orphan_buffers",
        kind=Kind.GAUGE,
        labels=("tier",),
        help="Blocks that a copy may still write although all who wanted it have left, and those in quarantine.",
        read=pool_readers.read_orphan_buffers,
    ),
    Family(
        name="aiokv_corrupt_blocks",
        kind=Kind.COUNTER,
        unit="blocks",
        help="Blocks of the CPU tier that a load found changed since they were stored; they are computed again.",
        read=pool_readers.read_corrupt_blocks,
    ),
    Family(
        name="aiokv_store_skipped_blocks",
        kind=Kind.COUNTER,
        unit="blocks",
        labels=("reason",),
        help="Blocks offered to the CPU tier and not copied there.",
        read=pool_readers.read_store_skips,
    ),
    Family(
        name="aiokv_alloc_failures",
        kind=Kind.COUNTER,
        labels=("tier", "reason"),
        help="Attempts to reserve blocks that had to wait.",
        read=pool_readers.read_alloc_failures,
    ),
)
