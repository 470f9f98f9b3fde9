"""Where prompts come from, what a request feels of it, and what admission finds."""

from __future__ import annotations

from typing import Final

from dashboards.panel import BY_SOURCE, HALF, Kind, Panel, Query, Row, Unit, quantiles
from dashboards.promql import busy, latest, rate

__all__ = ["HITS", "SERVER"]

_FIRST = 'phase="first"'

HITS: Final = Row(
    title="Hits",
    panels=(
        Panel(
            title="Prompt tokens by source",
            description=(
                "Prompt tokens of new requests by where their KV came from: GPU memory, CPU memory, or compute. The "
                "three sum to the prompts. Much compute with repeating prompts means that the cache is too small."
            ),
            queries=(Query(expr=rate("aiokv_prompt_tokens_total", by=("source",), where=_FIRST), legend="{{source}}"),),
            kind=Kind.STACK,
            colors=BY_SOURCE,
            axis="tokens/s",
            width=HALF,
            nothing="no requests",
        ),
        Panel(
            title="Share by source",
            description=(
                "The same as shares of all prompt tokens of new requests. A fall of gpu with a rise of cpu is the CPU "
                "tier doing its work; a rise of compute is not."
            ),
            queries=(
                Query(
                    expr=(
                        f"{rate('aiokv_prompt_tokens_total', by=('source',), where=_FIRST)} / ignoring (source) "
                        f"group_left () {busy(rate('aiokv_prompt_tokens_total', where=_FIRST))}"
                    ),
                    legend="{{source}}",
                ),
            ),
            kind=Kind.STACK,
            colors=BY_SOURCE,
            unit=Unit.RATIO,
            width=HALF,
            highest=1.0,
            nothing="no requests",
        ),
        Panel(
            title="Prompt tokens after a preemption",
            description=(
                "The same for requests that were preempted and let in again. Much compute here is work done twice: "
                "the blocks of preempted requests are evicted before they come back."
            ),
            queries=(
                Query(
                    expr=rate("aiokv_prompt_tokens_total", by=("source",), where='phase="resumed"'),
                    legend="{{source}}",
                ),
            ),
            kind=Kind.STACK,
            colors=BY_SOURCE,
            axis="tokens/s",
            nothing="no preemptions",
        ),
        Panel(
            title="Lookups",
            description=(
                "Admission attempts by what they found; a request that waits makes several. Many deferred: requests "
                "wait for room on the GPU."
            ),
            queries=(Query(expr=rate("aiokv_lookups_total", by=("result",)), legend="{{result}}"),),
            unit=Unit.PER_SECOND,
        ),
        Panel(
            title="Time of a lookup",
            description=(
                "How long one admission attempt (lookup, plan, pin) took on the event loop, by the clock. Over 2 ms: "
                "a machine that is too busy, or aiokv breaks its promise."
            ),
            queries=quantiles("aiokv_lookup_duration_seconds"),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Interleaving",
            description=(
                "Switches between GPU and CPU blocks along one prefix. High values mean that eviction tears holes "
                "into prefixes; each run of CPU blocks is a copy of its own."
            ),
            queries=quantiles("aiokv_interleaved_runs"),
            axis="switches",
        ),
        Panel(
            title="Failed loads",
            description=(
                "Prompt tokens that were promised and had to be computed, because a load from the CPU tier failed; GPU "
                "hits behind it are among them. Requests were answered all the same, later. It should be 0."
            ),
            queries=(Query(expr=rate("aiokv_load_failed_tokens_total", by=("reason",)), legend="{{reason}}"),),
            axis="tokens/s",
        ),
        Panel(
            title="Truncated",
            description="Tokens whose KV was written and given up again by lease.truncate(): wasted compute.",
            queries=(Query(expr=rate("aiokv_truncated_tokens_total"), legend="truncated"),),
            axis="tokens/s",
        ),
    ),
)

SERVER: Final = Row(
    title="Server (aiokv serve)",
    panels=(
        Panel(
            title="Time to first token",
            description=(
                "From the arrival of a request to its first token, by where its prompt came from: cpu if any of it was "
                "loaded, else gpu if any of it was a GPU hit, else compute. cpu no better than compute: loads cost "
                "more than the prefill that they save."
            ),
            queries=quantiles("aiokv_serve_time_to_first_token_seconds", label="source"),
            unit=Unit.SECONDS,
            width=HALF,
            nothing="no requests, or not aiokv serve",
        ),
        Panel(
            title="Requests",
            description=(
                "Requests by how they ended. rejected: the queue was full (add capacity), or the server was about to "
                "end. failed: look at the log. cancelled: the client left, or the server ended before the answer. "
                "invalid: what was asked for cannot be answered."
            ),
            queries=(Query(expr=rate("aiokv_serve_requests_total", by=("outcome",)), legend="{{outcome}}"),),
            unit=Unit.REQUESTS_PER_SECOND,
            width=HALF,
            nothing="not aiokv serve",
        ),
        Panel(
            title="Queue",
            description="Prompts that wait and prompts that run. A queue that stays is too little capacity.",
            queries=(
                Query(expr=latest("aiokv_serve_queue_requests"), legend="waiting"),
                Query(expr=latest("aiokv_serve_running_requests"), legend="running"),
            ),
            axis="prompts",
            width=HALF,
            nothing="not aiokv serve",
        ),
        Panel(
            title="Generated tokens",
            description="Tokens generated for all requests. A fall under constant load: the engine is slower.",
            queries=(Query(expr=rate("aiokv_serve_generated_tokens_total"), legend="generated"),),
            axis="tokens/s",
            width=HALF,
            nothing="not aiokv serve",
        ),
    ),
)
