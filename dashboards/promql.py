"""The few shapes of query that the dashboard uses, so that none of them can be written wrongly.

A counter is shown as a rate only, a histogram as quantiles only, summed over everything but the labels that are named.
All series are those of the chosen instances. `$__rate_interval` is Grafana's: at least four scrapes.
"""

from __future__ import annotations

__all__ = ["busy", "grown", "latest", "quantile", "rate"]

_RANGE = "$__rate_interval"


def rate(counter: str, *, by: tuple[str, ...] = (), where: str = "") -> str:
    """The increase of a counter a second."""
    return f"sum{_by(by)} (rate({_series(counter, where)}[{_RANGE}]))"


def grown(counter: str, *, by: tuple[str, ...] = (), where: str = "") -> str:
    """How much a counter has grown over the time that is shown: for what should never happen."""
    return f"sum{_by(by)} (increase({_series(counter, where)}[$__range]))"


def latest(gauge: str, *, by: tuple[str, ...] = (), where: str = "", how: str = "sum") -> str:
    """The value of a gauge, over all instances."""
    return f"{how}{_by(by)} ({_series(gauge, where)})"


def quantile(q: float, histogram: str, *, by: tuple[str, ...] = ()) -> str:
    """An estimate from a histogram's buckets; no value where nothing was observed."""
    buckets = rate(f"{histogram}_bucket", by=("le", *by))
    return f"histogram_quantile({q:g}, {buckets})"


def busy(expression: str) -> str:
    """As a divisor: no value, instead of NaN, while nothing happens."""
    return f"({expression} > 0)"


def _series(metric: str, where: str) -> str:
    matchers = ", ".join(part for part in ('instance=~"$instance"', where) if part)
    return f"{metric}{{{matchers}}}"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""
