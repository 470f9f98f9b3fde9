"""What the tests of the metrics share: a runtime with memory behind its blocks, and a scrape as a value."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, final

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from aiokv import KVRuntime, RuntimeConfig
from aiokv.testing import FakeBackend
from tests.runtime.support import GEOMETRY, GROUP, Case

BLOCK_BYTES = 64


class Collecting(Protocol):
    def collect(self) -> list[Metric]: ...


@asynccontextmanager
async def opened(
    *, gpu_blocks: int = 17, cpu_blocks: int = 16, manual: bool = True, block_bytes: int = BLOCK_BYTES
) -> AsyncIterator[Case]:
    """A runtime with `gpu_blocks - 1` usable GPU slots; what still runs at the end is completed first."""
    backend = FakeBackend(manual=manual, block_bytes=block_bytes)
    config = RuntimeConfig(
        geometry=GEOMETRY, gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks, watermark=0.0, backend=backend
    )
    arenas = {GROUP: [np.zeros((gpu_blocks, block_bytes), np.uint8)]} if block_bytes else {}
    async with KVRuntime(config, arenas=arenas) as kv:
        try:
            yield Case(kv=kv, backend=backend)
        finally:
            backend.complete_all()


@final
class Scrape:
    """All samples of one scrape, as a client reads them from the text."""

    def __init__(self, collector: Collecting) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        self.text = generate_latest(registry).decode()
        families = list(text_string_to_metric_families(self.text))
        self.types = {family.name: family.type for family in families}
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for sample in (sample for family in families for sample in family.samples):
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in self.samples, f"{key} is shown twice"
            self.samples[key] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        """The one sample with exactly these labels."""
        return self.samples[name, frozenset(labels.items())]

    def sum(self, name: str, **labels: str) -> float:
        """Over all samples of this name that have these labels."""
        wanted = frozenset(labels.items())
        return sum(value for (found, own), value in self.samples.items() if found == name and wanted <= own)

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The samples of this name that are not 0, by one label."""
        wanted = frozenset(labels.items())
        found: dict[str, float] = {}
        for (other, own), value in self.samples.items():
            if other == name and wanted <= own and value:
                key = dict(own)[label]
                found[key] = found.get(key, 0) + value
        return found

    def values_of(self, label: str) -> set[str]:
        """Every value that this label has in any series."""
        return {value for _, labels in self.samples for name, value in labels if name == label}

    @property
    def errors(self) -> dict[str, float]:
        """What the accounting says is wrong, by invariant."""
        return self.by("invariant", "aiokv_accounting_errors_total")
