"""What a scrape costs: no more than the same series kept by prometheus_client, however many blocks there are."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from aiokv.core.cache import CacheState
from aiokv.observe.metrics import Collector, RuntimeFacts
from aiokv.observe.stats import TRANSFER_BUCKETS, Stats
from tests.observe.support import Scrape
from tests.runtime.support import GEOMETRY

ROUNDS = 15
MOST_TIMES = 4.0
"""A scrape also looks at the invariants and at what each counter was; some 1.5 times are measured."""
NOISE = 1.5


def collector_of(*, blocks: int) -> Collector:
    collector = Collector()
    core = CacheState(GEOMETRY, gpu_blocks=blocks, cpu_blocks=2 * blocks)
    collector.attach(core, stats=Stats(), facts=RuntimeFacts(version="0", backend="none"))
    return collector


def registry_of(*, blocks: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector_of(blocks=blocks))
    return registry


def plain_registry(*, series: int) -> CollectorRegistry:
    """As many series of prometheus_client's own or some more, two thirds of them buckets."""
    registry = CollectorRegistry()
    histogram_series = len(TRANSFER_BUCKETS) + 3
    for number in range(2 * series // 3 // histogram_series):
        Histogram(f"reference_{number}_seconds", "Of the reference.", registry=registry, buckets=TRANSFER_BUCKETS)
    counter = Counter("reference", "Of the reference.", ["label"], registry=registry)
    for number in range(series // 3):
        counter.labels(f"value {number}").inc()
    return registry


def least_seconds(*calls: Callable[[], object]) -> list[float]:
    """Of several rounds in turns, so that what disturbs one disturbs all."""
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for index, call in enumerate(calls):
            began = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - began)
    return best


def openmetrics(registry: CollectorRegistry) -> bytes:
    text: bytes = generate_openmetrics(registry)  # type: ignore[no-untyped-call]  # the package types a part
    return text


def peak_bytes(call: Callable[[], object]) -> int:
    call()
    gc.collect()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_scrape_costs_a_few_times_what_the_same_series_cost_elsewhere() -> None:
    ours = registry_of(blocks=100)
    plain = plain_registry(series=len(Scrape(collector_of(blocks=100)).samples))
    scrape, reference = least_seconds(lambda: generate_latest(ours), lambda: generate_latest(plain))
    assert scrape <= MOST_TIMES * reference
    scrape, reference = least_seconds(lambda: openmetrics(ours), lambda: openmetrics(plain))
    assert scrape <= MOST_TIMES * reference


def test_a_scrape_takes_no_longer_and_no_more_memory_with_more_blocks() -> None:
    small, large = (registry_of(blocks=blocks) for blocks in (100, 300_000))
    few, many = least_seconds(lambda: generate_latest(small), lambda: generate_latest(large))
    assert many <= NOISE * few
    assert peak_bytes(lambda: generate_latest(large)) <= NOISE * peak_bytes(lambda: generate_latest(small))


def test_nothing_is_kept_from_one_scrape_to_the_next() -> None:
    registry = registry_of(blocks=100)
    generate_latest(registry)
    generate_latest(registry)
    tracemalloc.start()
    try:
        generate_latest(registry)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            generate_latest(registry)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < before / 2
    finally:
        tracemalloc.stop()
