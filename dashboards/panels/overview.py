"""The tiles on top: is it well, and does the cache pay?"""

from __future__ import annotations

from typing import Final

from dashboards.panel import QUARTER, SIXTH, Kind, Limit, Panel, Query, Row, Unit
from dashboards.promql import busy, grown, latest, rate

__all__ = ["OVERVIEW"]

_FIRST = 'phase="first"'
_ALL_FIRST = busy(rate("aiokv_prompt_tokens_total", where=_FIRST))
_COMPUTED = rate("aiokv_prompt_tokens_total", where=f'{_FIRST}, source="compute"')
_LOADED = rate("aiokv_prompt_tokens_total", where=f'{_FIRST}, source="cpu"')

OVERVIEW: Final = Row(
    title="At a glance",
    panels=(
        Panel(
            title="Hit ratio",
            description=(
                "Prompt tokens of new requests that were in the cache, on either tier, among all of them. Requests "
                "that resume after a preemption are left out: they find what they wrote themselves. Low with "
                "repeating prompts: the pools are too small, or prompts differ early (see Evictions)."
            ),
            queries=(Query(expr=f"1 - {_COMPUTED} / {_ALL_FIRST}", legend="hits"),),
            kind=Kind.TILE,
            unit=Unit.RATIO,
            width=SIXTH,
            highest=1.0,
            nothing="no requests",
        ),
        Panel(
            title="Served from CPU memory",
            description=(
                "Prompt tokens of new requests that were loaded from the CPU tier, among all of them: what the CPU "
                "tier adds to the GPU's own cache. 0 while the GPU tier evicts: the CPU tier does not help, look at "
                "Blocks not stored."
            ),
            queries=(
                Query(
                    expr=f"{_LOADED} / {_ALL_FIRST}",
                    legend="CPU hits",
                ),
            ),
            kind=Kind.TILE,
            unit=Unit.RATIO,
            width=SIXTH,
            highest=1.0,
            nothing="no requests",
        ),
        Panel(
            title="Leases",
            description=(
                "Requests that hold blocks now. Overdue ones have held them for longer than lease_age_limit_s: they "
                "are stuck, or somebody forgot to release them."
            ),
            queries=(Query(expr=latest("aiokv_leases", by=("state",)), legend="{{state}}"),),
            kind=Kind.TILE,
            width=SIXTH,
            nothing="not scraped",
        ),
        Panel(
            title="Oldest lease",
            description=(
                "Age of the oldest lease. It rises and falls with the longest request; a line that only rises is a "
                "leak."
            ),
            queries=(Query(expr=latest("aiokv_lease_age_seconds_max", how="max"), legend="oldest"),),
            kind=Kind.TILE,
            unit=Unit.SECONDS,
            width=SIXTH,
            limits=(Limit(value=600, color="orange"), Limit(value=3600)),
            nothing="not scraped",
        ),
        Panel(
            title="Degraded",
            description=(
                "Whether aiokv serves less well than it was built to. unpinned: the CPU arena could not be registered "
                "with the device, copies are slower. backend_lost: no copies are possible, there is no CPU tier."
            ),
            queries=(Query(expr=latest("aiokv_degraded", by=("reason",), how="max"), legend="{{reason}}"),),
            kind=Kind.TILE,
            width=SIXTH,
            limits=(Limit(value=1),),
            words={0: "no", 1: "YES"},
            nothing="not scraped",
        ),
        Panel(
            title="Accounting errors",
            description=(
                "Checks that found aiokv's own counts in contradiction, in the time shown. Anything but 0 is a bug of "
                "aiokv: other figures of that instance cannot be trusted until it is restarted."
            ),
            queries=(Query(expr=grown("aiokv_accounting_errors_total"), legend="errors"),),
            kind=Kind.TILE,
            width=SIXTH,
            limits=(Limit(value=0.5),),
            nothing="not scraped",
        ),
        Panel(
            title="Alerts",
            description=(
                "Alerts of aiokv's rules that fire now, for any instance. dashboards/README.md says of each what to do."
            ),
            queries=(
                Query(
                    expr='count by (alertname) (ALERTS{alertstate="firing", alertname=~"Aiokv.+"})',
                    legend="{{alertname}}",
                ),
            ),
            kind=Kind.NAMED_TILE,
            width=QUARTER,
            limits=(Limit(value=1),),
            nothing="none",
        ),
        Panel(
            title="Instances",
            description=(
                "Runtimes that are scraped, by version and backend. A mixture outside of a rollout is a mistake."
            ),
            queries=(
                Query(
                    expr=latest("aiokv_build_info", by=("version", "backend"), how="count"),
                    legend="{{version}} {{backend}}",
                ),
            ),
            kind=Kind.NAMED_TILE,
            width=QUARTER,
            nothing="none is scraped",
        ),
        Panel(
            title="Memory of the pools",
            description=(
                "Bytes behind each pool, and how much of the CPU pool is pinned. On a device the CPU pool should be "
                "pinned whole; while it is not, nothing is stored or copies are slow."
            ),
            queries=(
                Query(expr=latest("aiokv_pool_capacity_bytes", by=("tier",)), legend="{{tier}}"),
                Query(expr=latest("aiokv_pinned_bytes"), legend="pinned"),
            ),
            kind=Kind.TILE,
            unit=Unit.BYTES,
            width=12,
            nothing="not scraped",
        ),
    ),
)
