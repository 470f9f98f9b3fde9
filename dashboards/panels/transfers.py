"""Copies between the tiers, and how the event loop learns that they have ended."""

from __future__ import annotations

from typing import Final

from dashboards.panel import Panel, Query, Row, Unit, quantiles
from dashboards.promql import latest, rate

__all__ = ["LOOP", "TRANSFERS"]

TRANSFERS: Final = Row(
    title="Transfers",
    panels=(
        Panel(
            title="Bandwidth",
            description=(
                "Bytes a second of copies that ended well: load is CPU to GPU, store is GPU to CPU. Flat below what "
                "the bus can do while blocks queue: copies are too small, unpinned, or throttled."
            ),
            queries=(Query(expr=rate("aiokv_transfer_bytes_total", by=("direction",)), legend="{{direction}}"),),
            unit=Unit.BYTES_PER_SECOND,
        ),
        Panel(
            title="Blocks copied",
            description=(
                "Blocks whose copy ended, by outcome. Outcomes other than ok cost compute (loads) or later hits "
                "(stores)."
            ),
            queries=(
                Query(
                    expr=rate("aiokv_transfer_blocks_total", by=("direction", "outcome")),
                    legend="{{direction}} {{outcome}}",
                ),
            ),
            axis="blocks/s",
        ),
        Panel(
            title="Blocks submitted",
            description="Blocks handed to the backend. It runs ahead of Blocks copied when copies get stuck.",
            queries=(
                Query(expr=rate("aiokv_transfer_submitted_blocks_total", by=("direction",)), legend="{{direction}}"),
            ),
            axis="blocks/s",
        ),
        Panel(
            title="Copies dropped",
            description=(
                "Blocks whose copy was dropped before it was submitted, as nobody wanted it any more. Many loads: "
                "requests leave while they wait for their blocks."
            ),
            queries=(
                Query(expr=rate("aiokv_transfer_dropped_blocks_total", by=("direction",)), legend="{{direction}}"),
            ),
            axis="blocks/s",
        ),
        Panel(
            title="Queued and in flight",
            description=(
                "Blocks that wait for their stream and blocks that are being copied. A queue that grows while what is "
                "in flight stays the same: copies are stuck."
            ),
            queries=(
                Query(expr=latest("aiokv_transfer_queue_blocks", by=("direction",)), legend="{{direction}} queued"),
                Query(
                    expr=latest("aiokv_transfer_inflight_blocks", by=("direction",)), legend="{{direction}} in flight"
                ),
            ),
            axis="blocks",
        ),
        Panel(
            title="Time of a transfer",
            description=(
                "From the submission of a transfer until its completion was seen. Loads are a part of the time to "
                "first token; stores hold their blocks for so long."
            ),
            queries=quantiles("aiokv_transfer_duration_seconds", label="direction"),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Time in the queue",
            description=(
                "From the moment a transfer could run until it was submitted. Longer than the transfers themselves: "
                "more is asked of the direction than it can do."
            ),
            queries=quantiles("aiokv_transfer_queue_wait_seconds", label="direction"),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Reports of ranks",
            description=(
                "Reports of ranks that their part of a transfer has ended, by outcome. The worst outcome of any rank "
                "is that of the transfer: one bad rank spoils them all."
            ),
            queries=(Query(expr=rate("aiokv_rank_reports_total", by=("outcome",)), legend="{{outcome}}"),),
            unit=Unit.PER_SECOND,
        ),
        Panel(
            title="Transfers partly reported",
            description=(
                "Transfers that some ranks have reported and others have not. It should fall back to 0: a transfer "
                "that one rank never reports keeps its slots."
            ),
            queries=(Query(expr=latest("aiokv_transfers_partly_reported"), legend="partly reported"),),
            axis="transfers",
        ),
    ),
)

LOOP: Final = Row(
    title="Event loop",
    panels=(
        Panel(
            title="Waking up after a load",
            description=(
                "From the end of a request's last load until its coroutine went on, by how aiokv learns of the end. "
                "It is added to the time to first token. p99 over 5 ms: the loop is held, by somebody (see Lag of the "
                "event loop)."
            ),
            queries=quantiles("aiokv_bridge_wake_latency_seconds", label="bridge"),
            unit=Unit.SECONDS,
            nothing="no loads",
        ),
        Panel(
            title="Lag of the event loop",
            description=(
                "How late the event loop ran what aiokv had asked for, in turns that aiokv needed anyway. Over some "
                "milliseconds: something holds the loop, most likely not aiokv (compare Time of a lookup)."
            ),
            queries=quantiles("aiokv_loop_lag_seconds"),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Looks at device events",
            description=(
                "How often the bridge looked whether copies had ended, and whether one had. Mostly empty looks waste "
                "the loop's time. None at all while this machine copies: the loop is held (or a graph is captured, in "
                "kv.quiesce()). Ranks elsewhere are not asked, they report."
            ),
            queries=(Query(expr=rate("aiokv_bridge_polls_total", by=("result",)), legend="{{result}}"),),
            unit=Unit.PER_SECOND,
        ),
    ),
)
