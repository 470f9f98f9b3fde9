"""Metric families of copies between the tiers, and of waiting for them."""

from __future__ import annotations

from typing import Final

from aiokv.observe import transfer_readers
from aiokv.observe.family import Family, Kind

__all__ = ["TRANSFERS"]

TRANSFERS: Final = (
    Family(
        name="aiokv_transfer_bytes",
        kind=Kind.COUNTER,
        unit="bytes",
        labels=("direction",),
        help="Bytes of transfers that ended well.",
        read=transfer_readers.read_transfer_bytes,
    ),
    Family(
        name="aiokv_transfer_blocks",
        kind=Kind.COUNTER,
        unit="blocks",
        labels=("direction", "outcome"),
        help="Blocks whose copy has ended; all outcomes and what is in flight sum to what was submitted.",
        read=transfer_readers.read_transfer_blocks,
    ),
    Family(
        name="aiokv_transfer_submitted_blocks",
        kind=Kind.COUNTER,
        unit="blocks",
        labels=("direction",),
        help="Blocks handed to the backend to be copied.",
        read=transfer_readers.read_submitted_blocks,
    ),
    Family(
        name="aiokv_transfer_dropped_blocks",
        kind=Kind.COUNTER,
        unit="blocks",
        labels=("direction",),
        help="Blocks whose copy was dropped before it was submitted, as nobody wanted it any more.",
        read=transfer_readers.read_dropped_blocks,
    ),
    Family(
        name="aiokv_transfer_duration_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        labels=("direction",),
        help="From the submission of a transfer until its completion was seen.",
        read=transfer_readers.read_transfer_duration,
    ),
    Family(
        name="aiokv_transfer_queue_wait_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        labels=("direction",),
        help="From the moment a transfer was ready until it was submitted.",
        read=transfer_readers.read_queue_wait,
    ),
    Family(
        name="aiokv_transfer_queue_blocks",
        kind=Kind.GAUGE,
        unit="blocks",
        labels=("direction",),
        help="Blocks of transfers that wait for room in their stream.",
        read=transfer_readers.read_queue_blocks,
    ),
    Family(
        name="aiokv_transfer_inflight_blocks",
        kind=Kind.GAUGE,
        unit="blocks",
        labels=("direction",),
        help="Blocks submitted whose copy has not ended.",
        read=transfer_readers.read_inflight_blocks,
    ),
    Family(
        name="aiokv_rank_reports",
        kind=Kind.COUNTER,
        labels=("outcome",),
        help="Reports of ranks that their part of a transfer has ended.",
        read=transfer_readers.read_rank_reports,
    ),
    Family(
        name="aiokv_transfers_partly_reported",
        kind=Kind.GAUGE,
        help="Transfers that some ranks have reported and others have not.",
        read=transfer_readers.read_partly_reported,
    ),
    Family(
        name="aiokv_bridge_polls",
        kind=Kind.COUNTER,
        labels=("result",),
        help="Looks at device events, by whether a copy had ended.",
        read=transfer_readers.read_bridge_polls,
    ),
    Family(
        name="aiokv_bridge_wake_latency_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        labels=("bridge",),
        help=(
            "From the end of a request's last load until its coroutine went on. 'poll': the end is estimated from the "
            "copy's size and speed, and is no earlier than the last look that found it running; 'doorbell': it is when "
            "the backend rang; of a remote rank, when its report came."
        ),
        read=transfer_readers.read_wake_latency,
    ),
    Family(
        name="aiokv_loop_lag_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        help="How late the event loop ran a step of its next turn, or a timer, that aiokv had asked for.",
        read=transfer_readers.read_loop_lag,
    ),
)
