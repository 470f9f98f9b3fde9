"""Leases, how requests end, and the events that tell others what is cached."""

from __future__ import annotations

from typing import Final

from aiokv.observe.publisher import DEFAULT_BACKLOG
from dashboards.panel import Panel, Query, Row, Unit, quantiles
from dashboards.promql import latest, rate

__all__ = ["EVENTS", "REQUESTS"]

REQUESTS: Final = Row(
    title="Requests",
    panels=(
        Panel(
            title="Leases",
            description=(
                "Requests that hold blocks now. Overdue ones are stuck or forgotten: ask kv.audit() who they are."
            ),
            queries=(Query(expr=latest("aiokv_leases", by=("state",)), legend="{{state}}"),),
            axis="leases",
        ),
        Panel(
            title="Oldest lease",
            description="Age of the oldest lease of each instance. A line that only rises is a leak.",
            queries=(
                Query(expr=latest("aiokv_lease_age_seconds_max", by=("instance",), how="max"), legend="{{instance}}"),
            ),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Time of a lease",
            description="From the admission of a request until it gave its blocks back.",
            queries=quantiles("aiokv_lease_duration_seconds"),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Leases that come and go",
            description=(
                "Requests admitted, forks and resumed ones among them, and leases by how they ended. finalizer: the "
                "code that embeds aiokv lost a lease without releasing it. Many preempted: the GPU pool is too small "
                "for what runs."
            ),
            queries=(
                Query(expr=rate("aiokv_leases_opened_total"), legend="admitted"),
                Query(expr=rate("aiokv_forks_total"), legend="forks"),
                Query(expr=rate("aiokv_leases_closed_total", by=("how",)), legend="{{how}}"),
            ),
            unit=Unit.REQUESTS_PER_SECOND,
        ),
        Panel(
            title="Cancellations",
            description=(
                "Requests cancelled or timed out, by what they were waiting for. lookup: hashing of their prompt. "
                "queued: they waited for room for too long. inflight: they left while their blocks were being loaded."
            ),
            queries=(Query(expr=rate("aiokv_cancellations_total", by=("stage",)), legend="{{stage}}"),),
            unit=Unit.REQUESTS_PER_SECOND,
        ),
        Panel(
            title="Clean-up after a cancellation",
            description=(
                "From the cancellation of an admitted request until its pins, and those of its running copies, were "
                "back. As long as a copy: that is right, a running copy keeps its blocks. Much longer: copies are "
                "stuck."
            ),
            queries=quantiles("aiokv_cancel_cleanup_seconds"),
            unit=Unit.SECONDS,
            nothing="no cancellations",
        ),
    ),
)

EVENTS: Final = Row(
    title="Cache events",
    panels=(
        Panel(
            title="Events published",
            description="Cache events published while somebody subscribed, by type: runs of blocks, and cleared tiers.",
            queries=(Query(expr=rate("aiokv_kv_events_published_total", by=("type",)), legend="{{type}}"),),
            axis="events/s",
        ),
        Panel(
            title="Events lost",
            description=(
                "Events that a slow subscriber missed; it was told so, and its picture of the cache is wrong until it "
                "starts again. Blocks that became findable without an event: unknown_tokens comes with a subscriber "
                "that found the cache warm. Both should be 0."
            ),
            queries=(
                Query(expr=rate("aiokv_kv_events_dropped_total"), legend="events dropped"),
                Query(
                    expr=rate("aiokv_kv_events_rejected_total", by=("reason",)),
                    legend="blocks without event: {{reason}}",
                ),
            ),
            unit=Unit.PER_SECOND,
        ),
        Panel(
            title="Events not yet read",
            description=(
                f"Cache events that the slowest subscriber has not taken. Near its backlog ({DEFAULT_BACKLOG:,} unless "
                "it asked for another): it is about to miss some."
            ),
            queries=(Query(expr=latest("aiokv_kv_event_queue_batches", how="max"), legend="slowest subscriber"),),
            axis="events",
        ),
    ),
)
