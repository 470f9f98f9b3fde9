"""Metric families of requests and of the leases they hold."""

from __future__ import annotations

from typing import Final

from aiokv.observe import request_readers
from aiokv.observe.family import Family, Kind

__all__ = ["LEASES", "REQUESTS"]

REQUESTS: Final = (
    Family(
        name="aiokv_prompt_tokens",
        kind=Kind.COUNTER,
        unit="tokens",
        labels=("source", "phase"),
        help="Prompt tokens of admitted requests by where their KV came from; the sources sum to the prompts.",
        read=request_readers.read_prompt_tokens,
    ),
    Family(
        name="aiokv_prompt_blocks",
        kind=Kind.COUNTER,
        unit="blocks",
        labels=("source", "phase"),
        help="The same in full hash blocks; tails of prompts that are no full block are in the tokens only.",
        read=request_readers.read_prompt_blocks,
    ),
    Family(
        name="aiokv_lookups",
        kind=Kind.COUNTER,
        labels=("result",),
        help="Admission attempts by what they found; a request that waits makes several.",
        read=request_readers.read_lookups,
    ),
    Family(
        name="aiokv_lookup_duration_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        help="Time of the event loop in one admission attempt: lookup, plan and pin.",
        read=request_readers.read_lookup_duration,
    ),
    Family(
        name="aiokv_interleaved_runs",
        kind=Kind.HISTOGRAM,
        help="Switches between GPU and CPU blocks along the prefix of one admitted request; 64 stands for 64 and more.",
        read=request_readers.read_interleaved_runs,
    ),
    Family(
        name="aiokv_load_failed_tokens",
        kind=Kind.COUNTER,
        unit="tokens",
        labels=("source", "reason"),
        help="Prompt tokens promised and then computed, by how their load failed; GPU hits behind it included.",
        read=request_readers.read_load_failed_tokens,
    ),
    Family(
        name="aiokv_truncated_tokens",
        kind=Kind.COUNTER,
        unit="tokens",
        help="Tokens whose KV was written and that a truncation gave up, back to where compute goes on.",
        read=request_readers.read_truncated_tokens,
    ),
    Family(
        name="aiokv_cancellations",
        kind=Kind.COUNTER,
        labels=("stage",),
        help="Requests cancelled or timed out: at their 'lookup' or hashing, 'queued' for room, with loads 'inflight'.",
        read=request_readers.read_cancellations,
    ),
    Family(
        name="aiokv_cancel_cleanup_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        help="From the cancellation of an admitted request until its pins and those of its running copies were back.",
        read=request_readers.read_cancel_cleanup,
    ),
)

LEASES: Final = (
    Family(
        name="aiokv_leases_opened",
        kind=Kind.COUNTER,
        help="Requests admitted, forks and resumed ones included.",
        read=request_readers.read_leases_opened,
    ),
    Family(
        name="aiokv_forks",
        kind=Kind.COUNTER,
        help="Requests admitted as a fork of another lease.",
        read=request_readers.read_forks,
    ),
    Family(
        name="aiokv_leases_closed",
        kind=Kind.COUNTER,
        labels=("how",),
        help="Leases that gave everything back; 'finalizer' is a leak in the code that embeds aiokv.",
        read=request_readers.read_leases_closed,
    ),
    Family(
        name="aiokv_leases",
        kind=Kind.GAUGE,
        labels=("state",),
        help="Leases that hold blocks now; 'overdue' ones for longer than lease_age_limit_s.",
        read=request_readers.read_leases,
    ),
    Family(
        name="aiokv_lease_age_seconds_max",
        kind=Kind.GAUGE,
        help="Seconds since the oldest open lease was admitted; 0 without leases.",
        read=request_readers.read_oldest_lease,
    ),
    Family(
        name="aiokv_lease_duration_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        help="From the admission of a request until it gave its blocks back.",
        read=request_readers.read_lease_duration,
    ),
)
