"""The table of all metric families: name, kind, unit, labels, help, and who reads it.

Names follow the Prometheus rules: base units, plural, last in the name; counters are shown with `_total` behind it. A
sum over all labels of a family has a meaning.
"""

from __future__ import annotations

from typing import Final

from aiokv.observe import hint_readers, readers
from aiokv.observe.family import Family, Kind

__all__ = ["ACCOUNTING_ERRORS", "FAMILIES", "Family", "Kind"]

_REQUESTS: Final = (
    Family(
        name="aiokv_prompt_tokens",
        kind=Kind.COUNTER,
        unit="tokens",
        labels=("source", "phase"),
        help="Prompt tokens of admitted requests by where their KV came from; the sources sum to the prompts.",
        read=readers.read_prompt_tokens,
    ),
    Family(
        name="aiokv_lookups",
        kind=Kind.COUNTER,
        labels=("result",),
        help="Admission attempts by what they found; a request that waits makes several.",
        read=readers.read_lookups,
    ),
    Family(
        name="aiokv_lookup_duration_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        help="Time of the event loop in one admission attempt: lookup, plan and pin.",
        read=readers.read_lookup_duration,
    ),
    Family(
        name="aiokv_interleaved_runs",
        kind=Kind.HISTOGRAM,
        help="Switches between GPU and CPU blocks along the prefix of one admitted request; 64 stands for 64 and more.",
        read=readers.read_interleaved_runs,
    ),
    Family(
        name="aiokv_load_failed_tokens",
        kind=Kind.COUNTER,
        unit="tokens",
        labels=("source",),
        help="Prompt tokens promised at admission and computed instead, because their load failed.",
        read=readers.read_load_failed_tokens,
    ),
    Family(
        name="aiokv_truncated_tokens",
        kind=Kind.COUNTER,
        unit="tokens",
        help="Tokens whose KV was written and that a truncation gave up, back to where compute goes on.",
        read=readers.read_truncated_tokens,
    ),
    Family(
        name="aiokv_cancellations",
        kind=Kind.COUNTER,
        labels=("stage",),
        help="Requests cancelled or timed out, by what they were waiting for.",
        read=readers.read_cancellations,
    ),
)

_TRANSFERS: Final = (
    Family(
        name="aiokv_transfer_bytes",
        kind=Kind.COUNTER,
        unit="bytes",
        labels=("direction",),
        help="Bytes of transfers that ended well.",
        read=readers.read_transfer_bytes,
    ),
    Family(
        name="aiokv_transfer_blocks",
        kind=Kind.COUNTER,
        unit="blocks",
        labels=("direction", "outcome"),
        help="Blocks whose copy has ended; all outcomes and what is in flight sum to what was submitted.",
        read=readers.read_transfer_blocks,
    ),
    Family(
        name="aiokv_transfer_submitted_blocks",
        kind=Kind.COUNTER,
        unit="blocks",
        labels=("direction",),
        help="Blocks handed to the backend to be copied.",
        read=readers.read_submitted_blocks,
    ),
    Family(
        name="aiokv_transfer_duration_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        labels=("direction",),
        help="From the submission of a transfer until its completion was seen.",
        read=readers.read_transfer_duration,
    ),
    Family(
        name="aiokv_transfer_queue_wait_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        labels=("direction",),
        help="From the moment a transfer was ready until it was submitted.",
        read=readers.read_queue_wait,
    ),
    Family(
        name="aiokv_transfer_queue_blocks",
        kind=Kind.GAUGE,
        unit="blocks",
        labels=("direction",),
        help="Blocks of transfers that wait for room in their stream.",
        read=readers.read_queue_blocks,
    ),
    Family(
        name="aiokv_transfer_inflight_blocks",
        kind=Kind.GAUGE,
        unit="blocks",
        labels=("direction",),
        help="Blocks submitted whose copy has not ended.",
        read=readers.read_inflight_blocks,
    ),
    Family(
        name="aiokv_rank_reports",
        kind=Kind.COUNTER,
        labels=("outcome",),
        help="Reports of ranks that their part of a transfer has ended.",
        read=readers.read_rank_reports,
    ),
    Family(
        name="aiokv_transfers_partly_reported",
        kind=Kind.GAUGE,
        help="Transfers that some ranks have reported and others have not.",
        read=readers.read_partly_reported,
    ),
    Family(
        name="aiokv_bridge_polls",
        kind=Kind.COUNTER,
        labels=("result",),
        help="Looks at device events, by whether a copy had ended.",
        read=readers.read_bridge_polls,
    ),
)

_POOLS: Final = (
    Family(
        name="aiokv_pool_blocks",
        kind=Kind.GAUGE,
        unit="blocks",
        labels=("tier", "state"),
        help="Slots of a pool by state; the states sum to its capacity.",
        read=readers.read_pool_blocks,
    ),
    Family(
        name="aiokv_pool_capacity_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=("tier",),
        help="Memory behind the usable slots of a pool.",
        read=readers.read_pool_capacity,
    ),
    Family(
        name="aiokv_pinned_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        help="How much of the CPU pool is registered with the device: all once pinned, 0 if unpinned or without one.",
        read=readers.read_pinned_bytes,
    ),
    Family(
        name="aiokv_evictions",
        kind=Kind.COUNTER,
        labels=("tier", "reason"),
        help="Blocks that stopped being findable.",
        read=readers.read_evictions,
    ),
    Family(
        name="aiokv_corrupt_blocks",
        kind=Kind.COUNTER,
        unit="blocks",
        help="Blocks of the CPU tier that a load found changed since they were stored; they are computed again.",
        read=readers.read_corrupt_blocks,
    ),
    Family(
        name="aiokv_store_skipped_blocks",
        kind=Kind.COUNTER,
        unit="blocks",
        labels=("reason",),
        help="Blocks offered to the CPU tier and not copied there.",
        read=readers.read_store_skips,
    ),
    Family(
        name="aiokv_alloc_failures",
        kind=Kind.COUNTER,
        labels=("tier", "reason"),
        help="Attempts to reserve blocks that had to wait.",
        read=readers.read_alloc_failures,
    ),
)

_LEASES: Final = (
    Family(
        name="aiokv_leases_opened",
        kind=Kind.COUNTER,
        help="Requests admitted.",
        read=readers.read_leases_opened,
    ),
    Family(
        name="aiokv_forks",
        kind=Kind.COUNTER,
        help="Requests admitted as a fork of another lease.",
        read=readers.read_forks,
    ),
    Family(
        name="aiokv_leases_closed",
        kind=Kind.COUNTER,
        labels=("how",),
        help="Leases that gave everything back; 'finalizer' is a leak in the code that embeds aiokv.",
        read=readers.read_leases_closed,
    ),
    Family(
        name="aiokv_leases",
        kind=Kind.GAUGE,
        labels=("state",),
        help="Leases that hold blocks now; 'overdue' ones for longer than lease_age_limit_s.",
        read=readers.read_leases,
    ),
    Family(
        name="aiokv_lease_age_seconds_max",
        kind=Kind.GAUGE,
        help="Seconds since the oldest open lease was admitted; 0 without leases.",
        read=readers.read_oldest_lease,
    ),
    Family(
        name="aiokv_lease_duration_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        help="From the admission of a request until it gave its blocks back.",
        read=readers.read_lease_duration,
    ),
)

_HINTS: Final = (
    Family(
        name="aiokv_hints",
        kind=Kind.GAUGE,
        labels=("state",),
        help="Residence hints that are held, by whether they hold all of their prefix.",
        read=hint_readers.read_hints,
    ),
    Family(
        name="aiokv_hint_blocks",
        kind=Kind.GAUGE,
        unit="blocks",
        labels=("tier",),
        help="Resident blocks that residence hints hold, each counted once.",
        read=hint_readers.read_hint_blocks,
    ),
    Family(
        name="aiokv_hints_opened",
        kind=Kind.COUNTER,
        help="Residence hints granted.",
        read=hint_readers.read_hints_opened,
    ),
    Family(
        name="aiokv_hints_declined",
        kind=Kind.COUNTER,
        labels=("reason",),
        help="Residence hints that were not granted, or not moved to another prefix.",
        read=hint_readers.read_hints_declined,
    ),
    Family(
        name="aiokv_hints_revoked",
        kind=Kind.COUNTER,
        labels=("reason",),
        help="Residence hints whose blocks were taken back, by who needed that; their owners may take hold again.",
        read=hint_readers.read_hints_revoked,
    ),
    Family(
        name="aiokv_hints_closed",
        kind=Kind.COUNTER,
        labels=("how",),
        help="Residence hints that have ended; 'finalizer' is a leak in the code that embeds aiokv.",
        read=hint_readers.read_hints_closed,
    ),
)

_EVENTS: Final = (
    Family(
        name="aiokv_kv_events_published",
        kind=Kind.COUNTER,
        help="Cache events handed to subscribers.",
        read=readers.read_events_published,
    ),
    Family(
        name="aiokv_kv_events_dropped",
        kind=Kind.COUNTER,
        help="Cache events that slow subscribers missed.",
        read=readers.read_events_dropped,
    ),
)

_DEGRADED: Final = Family(
    name="aiokv_degraded",
    kind=Kind.GAUGE,
    labels=("reason",),
    help="Whether the runtime serves less well than it was built to, by reason: 1 or 0.",
    read=readers.read_degraded,
)

_BUILD: Final = Family(
    name="aiokv_build",
    kind=Kind.INFO,
    labels=("version", "backend", "block_tokens"),
    help="Version, backend, and tokens per hash block.",
    read=readers.read_build_info,
)

ACCOUNTING_ERRORS: Final = Family(
    name="aiokv_accounting_errors",
    kind=Kind.COUNTER,
    labels=("invariant",),
    help="Checks that found an invariant of the counts violated; anything but 0 is a bug.",
    read=readers.read_accounting_errors,
)

FAMILIES: Final = (*_REQUESTS, *_TRANSFERS, *_POOLS, *_LEASES, *_HINTS, *_EVENTS, _DEGRADED, _BUILD, ACCOUNTING_ERRORS)
"""In the order in which they are shown; the errors last, so that they include those of the scrape itself."""
