"""The metrics of one runtime as a prometheus_client collector.

Rules: reads plain integers at scrape time, from any thread, without a lock; never touches the loop; never raises into
the scrape or into serving. A counter that would fall is held at its last value, and the fall is counted in
`aiokv_accounting_errors_total`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import accumulate
from typing import final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector as BaseCollector

from aiokv.core.cache import CacheState
from aiokv.errors import UsageError
from aiokv.observe.checks import check_invariants
from aiokv.observe.families import ACCOUNTING_ERRORS, FAMILIES, Family, Kind
from aiokv.observe.ledger import Page
from aiokv.observe.live import NOT_OPEN, LiveState, Standing, take_live, take_standing
from aiokv.observe.readers import Buckets, RuntimeFacts, ScrapeFaults, View
from aiokv.observe.stats import Stats

__all__ = ["Collector", "RuntimeFacts"]


@final
class Collector(BaseCollector):
    """Register it once per registry: `registry.register(kv.collector)`, before or after the runtime is opened.

    Empty until then; after the runtime is closed it goes on showing the last values. Render it in a thread
    (`prometheus_client.start_http_server` does), not on the event loop. Several runtimes in one registry:
    `aiokv.observe.pools.PoolsCollector`.
    """

    __slots__ = ("_clock", "_faults", "_opened_at", "_owner", "_take_view")

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._faults = ScrapeFaults()
        self._take_view: Callable[[], View] | None = None
        self._owner = 0
        self._opened_at = 0.0

    def attach(self, core: CacheState, *, stats: Stats, facts: RuntimeFacts) -> None:
        """From now on show these. Called once, in the thread that writes them."""
        capacities = {tier: sum(pool.by_state().values()) for tier, pool in core.pools().items()}
        self._owner = threading.get_ident()
        self._opened_at = self._clock()

        def take_view() -> View:
            return View(
                core=core,
                stats=stats,
                facts=facts,
                capacities=capacities,
                faults=self._faults,
                now=self._clock(),
            )

        self._take_view = take_view

    def describe(self) -> list[Metric]:
        """All families without samples, also before the runtime is open: a registry checks these for clashing names."""
        return [_new_metric(family) for family in FAMILIES]

    def collect(self) -> list[Metric]:
        """All families that have something to show, from the values of this moment."""
        if self._take_view is None:
            return []
        page = self._faults.ledger.open()
        view = self._take_view()
        self._check(view)
        metrics = [self._show(family, view, page=page) for family in FAMILIES if family is not ACCOUNTING_ERRORS]
        self._faults.ledger.close(page)
        errors = self._faults.ledger.open()
        metrics.append(self._show(ACCOUNTING_ERRORS, view, page=errors))
        self._faults.ledger.close(errors)
        return [metric for metric in metrics if metric.samples]

    def live(self, *, cells: int = 512) -> LiveState:
        """The state for people who watch, with a map of at most `cells` cells per tier; after closing, the last one.

        `UsageError` before the runtime is open. For any thread but the loop's: it looks at every slot.
        """
        if self._take_view is None:
            raise UsageError("this aiokv runtime is not open: there is no live state yet")
        view = self._take_view()
        return take_live(view, cells=cells, uptime_s=view.now - self._opened_at)

    def standing(self) -> Standing:
        """Whether the runtime serves, at any time, in any thread."""
        return NOT_OPEN if self._take_view is None else take_standing(self._take_view())

    def _check(self, view: View) -> None:
        """Look at the invariants here, or ask the thread that writes the counts to do it."""
        if threading.get_ident() == self._owner:
            check_invariants(view.core, view.stats)
        else:
            view.stats.check_due = True

    def _show(self, family: Family, view: View, *, page: Page) -> Metric:
        """One family; without samples if it cannot be read (law 7: counted, never raised)."""
        metric = _new_metric(family)
        try:
            for reading in family.read(view):
                _add(metric, family, values=reading.labels, value=reading.value, page=page)
        except Exception:
            self._faults.unreadable += 1
            metric.samples.clear()
        return metric


def _new_metric(family: Family) -> Metric:
    return Metric(family.name, family.help, family.kind.value, family.unit)


def _add(metric: Metric, family: Family, *, values: tuple[str, ...], value: float | Buckets, page: Page) -> None:
    """Add the samples of one series; whatever only grows is held."""
    labels = dict(zip(family.labels, values, strict=True))
    if isinstance(value, Buckets):
        _add_buckets(metric, labels, value=value, page=page)
    elif family.kind is Kind.COUNTER:
        metric.add_sample(f"{family.name}_total", labels, page.hold((family.name, values, 0), value))
    else:
        suffix = "_info" if family.kind is Kind.INFO else ""
        metric.add_sample(family.name + suffix, labels, value)


def _add_buckets(metric: Metric, labels: dict[str, str], *, value: Buckets, page: Page) -> None:
    key = tuple(labels.values())
    counts = [page.hold((metric.name, key, index), count) for index, count in enumerate(value.counts)]
    total = page.hold((metric.name, key, len(counts)), value.total)
    running = list(accumulate(counts))
    bounds = (*(repr(float(bound)) for bound in value.bounds), "+Inf")
    for bound, count in zip(bounds, running, strict=True):
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, count)
    metric.add_sample(f"{metric.name}_count", labels, running[-1])
    metric.add_sample(f"{metric.name}_sum", labels, total)
