"""The table of all metric families: name, kind, unit, labels, help, and who reads it.

Names follow the Prometheus rules: base units, plural, last in the name; counters are shown with `_total` behind it. A
sum over all labels of a family has a meaning. The rows of requests, transfers and pools stand in files of their own.
"""

from __future__ import annotations

from typing import Final

from aiokv.observe import hint_readers, readers
from aiokv.observe.family import Family, Kind
from aiokv.observe.pool_families import POOLS
from aiokv.observe.request_families import LEASES, REQUESTS
from aiokv.observe.transfer_families import TRANSFERS

__all__ = ["ACCOUNTING_ERRORS", "FAMILIES", "Family", "Kind"]

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
        labels=("type",),
        help="Cache events published while somebody subscribed, each counted once.",
        read=readers.read_events_published,
    ),
    Family(
        name="aiokv_kv_events_dropped",
        kind=Kind.COUNTER,
        help="Cache events that slow subscribers missed, each counted for every one of them.",
        read=readers.read_events_dropped,
    ),
    Family(
        name="aiokv_kv_events_rejected",
        kind=Kind.COUNTER,
        labels=("reason",),
        help="Blocks that became findable without an event, though somebody subscribed: it would be no dense run.",
        read=readers.read_events_rejected,
    ),
    Family(
        name="aiokv_kv_event_queue_batches",
        kind=Kind.GAUGE,
        help="Cache events, each a run of blocks, that the slowest subscriber has not taken.",
        read=readers.read_event_queue,
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

FAMILIES: Final = (
    *REQUESTS,
    *TRANSFERS,
    *POOLS,
    *LEASES,
    *_HINTS,
    *_EVENTS,
    _DEGRADED,
    _BUILD,
    ACCOUNTING_ERRORS,
)
"""In the order in which they are shown; the errors last, so that they include those of the scrape itself."""
