"""Several runtimes of one process in one registry: the same families, each series labelled with its runtime's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector as BaseCollector

from aiokv.observe.metrics import Collector

__all__ = ["PoolsCollector"]


@final
class PoolsCollector(BaseCollector):
    """`registry.register(PoolsCollector({"chat": kv.collector, "batch": other.collector}))`: adds the label `pool`.

    Register this one instead of theirs: a family may be shown once only.
    """

    __slots__ = ("_collectors",)

    def __init__(self, collectors: Mapping[str, Collector]) -> None:
        self._collectors = dict(collectors)

    def describe(self) -> list[Metric]:
        """All families without samples."""
        return next((collector.describe() for collector in self._collectors.values()), [])

    def collect(self) -> list[Metric]:
        """All families, the series of every runtime side by side."""
        shown: dict[str, Metric] = {}
        for pool, collector in self._collectors.items():
            for metric in collector.collect():
                joint = shown.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit)
                )
                joint.samples.extend(s._replace(labels={"pool": pool, **s.labels}) for s in metric.samples)
        return list(shown.values())
