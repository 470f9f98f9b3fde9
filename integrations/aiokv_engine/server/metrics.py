"""What the server counts of its own, as a prometheus_client collector; the runtime's metrics stand beside it.

Written on the loop, read by a scrape in any thread: plain integers and floats, no lock. Labels are closed sets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Final, final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from aiokv import Hit
from aiokv.core.counters import Source
from aiokv_engine.server.errors import RequestOutcome
from aiokv_engine.server.gate import Gate

__all__ = ["ServerMetrics"]

_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
_BOUNDS: Final = (*map(str, _BUCKETS), "+Inf")


@final
class ServerMetrics(Collector):
    """Register it beside the runtime's collector. Every request is counted once, by how it ended."""

    __slots__ = ("_counts", "_gate", "_generated", "_requests", "_sums")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._requests = dict.fromkeys(RequestOutcome, 0)
        self._generated = 0
        self._counts = {source: [0] * len(_BOUNDS) for source in Source}
        self._sums = dict.fromkeys(Source, 0.0)

    def count_request(self, outcome: RequestOutcome) -> None:
        """One request to generate has ended."""
        self._requests[outcome] += 1

    def count_token(self) -> None:
        """One token was generated."""
        self._generated += 1

    def observe_first_token(self, hit: Hit, *, seconds: float) -> None:
        """The first token of a request came so many seconds after the request."""
        source = Source.CPU if hit.cpu_tokens else Source.GPU if hit.gpu_tokens else Source.COMPUTE
        self._counts[source][bisect_left(_BUCKETS, seconds)] += 1
        self._sums[source] += seconds

    def requests(self, outcome: RequestOutcome) -> int:
        """Requests that have ended so, so far."""
        return self._requests[outcome]

    @property
    def generated_tokens(self) -> int:
        """Tokens that were generated so far."""
        return self._generated

    def collect(self) -> Iterator[Metric]:
        """All families, from the values of this moment."""
        requests = CounterMetricFamily(
            "aiokv_serve_requests", "Requests to generate that have ended, by how.", labels=["outcome"]
        )
        for outcome, count in self._requests.items():
            requests.add_metric([outcome.value], count)
        yield requests
        yield self._first_tokens()
        yield GaugeMetricFamily(
            "aiokv_serve_queue_requests",
            "Prompts that wait for room or for their blocks; a request may hold several.",
            value=self._gate.queued,
        )
        yield GaugeMetricFamily(
            "aiokv_serve_running_requests",
            "Prompts that have their blocks; a request may hold several.",
            value=self._gate.running,
        )
        yield CounterMetricFamily("aiokv_serve_generated_tokens", "Tokens that were generated.", value=self._generated)

    def _first_tokens(self) -> Metric:
        family = HistogramMetricFamily(
            "aiokv_serve_time_to_first_token_seconds",
            "From a request to its first token, by source: cpu if any of the prompt was loaded, else gpu if any was a "
            "GPU hit, else compute.",
            labels=["source"],
        )
        for source in Source:
            counts = list(zip(_BOUNDS, accumulate(list(self._counts[source])), strict=True))
            family.add_metric([source.value], buckets=counts, sum_value=self._sums[source])
        return family
