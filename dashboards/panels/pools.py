"""What the pools hold, what leaves them, and what never gets in."""

from __future__ import annotations

from typing import Final

from aiokv.core.block_ages import SAMPLE
from dashboards.panel import BY_STATE, HALF, Kind, Panel, Query, Row, Unit, quantiles
from dashboards.promql import latest, rate

__all__ = ["HINTS", "POOLS"]


def _pool(tier: str, *, name: str, hint: str) -> Panel:
    return Panel(
        title=f"{name} pool",
        description=(
            f"Slots of the {name} pool by state; they sum to its capacity. {hint} quarantined slots are lost until a "
            "restart: a copy may still write to them."
        ),
        queries=(Query(expr=latest("aiokv_pool_blocks", by=("state",), where=f'tier="{tier}"'), legend="{{state}}"),),
        kind=Kind.STACK,
        colors=BY_STATE,
        axis="blocks",
        width=HALF,
        nothing="no such tier",
    )


POOLS: Final = Row(
    title="Pools",
    panels=(
        _pool("gpu", name="GPU", hint="Mostly reserved: running requests leave no room for a cache."),
        _pool("cpu", name="CPU", hint="It should fill up and stay full."),
        Panel(
            title="Evictions",
            description=(
                "Blocks that stopped being findable. capacity on the CPU tier at the rate of stores, with few hits: "
                "the CPU pool turns over before anybody comes back. corrupt: see the alert."
            ),
            queries=(Query(expr=rate("aiokv_evictions_total", by=("tier", "reason")), legend="{{tier}} {{reason}}"),),
            axis="blocks/s",
        ),
        Panel(
            title="Blocks not stored",
            description=(
                "Blocks offered to the CPU tier and not copied there. already_cached, in_flight, seen_too_seldom (the "
                "store policy) and unhashed (last blocks, not full) are well. pool_full: everything there is held. "
                "backpressure: the GPU pool is promised to requests, none is left to hold for a copy. request_gone: "
                "the request was released, or a tier reset, before it was their turn."
            ),
            queries=(Query(expr=rate("aiokv_store_skipped_blocks_total", by=("reason",)), legend="{{reason}}"),),
            axis="blocks/s",
        ),
        Panel(
            title="Reservations that had to wait",
            description=(
                "Attempts to reserve blocks that had to wait. capacity and watermark on the GPU tier: too many or too "
                "long requests at once for the pool. queued: others wait in front."
            ),
            queries=(
                Query(expr=rate("aiokv_alloc_failures_total", by=("tier", "reason")), legend="{{tier}} {{reason}}"),
            ),
            unit=Unit.PER_SECOND,
        ),
        Panel(
            title="Idle before eviction",
            description=(
                f"How long evicted blocks had not been used, by tier, of one block in {SAMPLE:,}. Shorter than the "
                "time between two turns of a conversation: the tier forgets them before they come back."
            ),
            queries=quantiles("aiokv_eviction_idle_seconds", label="tier"),
            unit=Unit.SECONDS,
            width=HALF,
            nothing="no evictions",
        ),
        Panel(
            title="Time until reuse",
            description=(
                f"How long blocks had not been used when a request hit them, by tier, of one block in {SAMPLE:,}. Near "
                "Idle before eviction: a larger pool would have more hits."
            ),
            queries=quantiles("aiokv_block_reuse_gap_seconds", label="tier"),
            unit=Unit.SECONDS,
            width=HALF,
            nothing="no hits",
        ),
    ),
)

HINTS: Final = Row(
    title="Residence hints",
    panels=(
        Panel(
            title="Hints held",
            description=(
                "Residence hints by whether they hold all of their prefix. Many partial: hints are revoked under "
                "pressure."
            ),
            queries=(Query(expr=latest("aiokv_hints", by=("state",)), legend="{{state}}"),),
            axis="hints",
        ),
        Panel(
            title="Blocks held by hints",
            description=(
                "Blocks that hints keep resident, each counted once. Near the quota of every tenant: room is short."
            ),
            queries=(Query(expr=latest("aiokv_hint_blocks", by=("tier",)), legend="{{tier}}"),),
            axis="blocks",
        ),
        Panel(
            title="Hints that come and go",
            description=(
                "Hints granted, declined, revoked and ended. revoked for capacity: requests needed the room. ended by "
                "a finalizer: a leak in the code that embeds aiokv."
            ),
            queries=(
                Query(expr=rate("aiokv_hints_opened_total"), legend="granted"),
                Query(expr=rate("aiokv_hints_declined_total", by=("reason",)), legend="declined {{reason}}"),
                Query(expr=rate("aiokv_hints_revoked_total", by=("reason",)), legend="revoked {{reason}}"),
                Query(expr=rate("aiokv_hints_closed_total", by=("how",)), legend="ended {{how}}"),
            ),
            unit=Unit.PER_SECOND,
        ),
    ),
)
