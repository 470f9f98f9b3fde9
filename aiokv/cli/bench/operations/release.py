"""RELEASE: giving everything back."""

from __future__ import annotations

from typing import final

from aiokv.cli.bench.cases import Case
from aiokv.cli.bench.operations.measured import Batch, MeasuredPrompts
from aiokv.cli.bench.operations.timing import Prepared, Times, now_ns
from aiokv.cli.bench.operations.world import BenchWorld

__all__ = ["Release"]


@final
class Release:
    """Timed: `CacheState.release` of leases whose prompts were hit on the GPU, and the slices that follow."""

    __slots__ = ("_prompts", "_world")

    def __init__(self, case: Case, *, world: BenchWorld) -> None:
        self._world = world
        self._prompts = MeasuredPrompts(case, world=world)

    def prepare(self) -> Prepared[Batch]:
        """See `TimedOperation`."""
        prepared = self._prompts.arrange()
        for batch in prepared.batches:
            batch.admit()
        self._world.run_until_idle()
        self._prompts.arrange_others()  # so that the caches hold something else than what was just admitted
        return prepared

    def run(self, batch: Batch) -> Times:
        """See `TimedOperation`."""
        cache, records = self._world.cache, batch.records
        started = now_ns()
        for record in records:
            cache.release(record)
        cache.run_slices()
        return Times(counted={"release": now_ns() - started})

    def restore(self, prepared: Prepared[Batch]) -> None:
        """See `TimedOperation`."""
        if self._world.cache.live_leases:
            raise RuntimeError("a lease was not released")
        for batch in prepared.batches:
            batch.check_hits()
