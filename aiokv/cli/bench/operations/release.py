"""RELEASE: giving everything back."""

from __future__ import annotations

from typing import final

from aiokv.cli.bench.cases import Case
from aiokv.cli.bench.operations.measured import MeasuredPrompts
from aiokv.cli.bench.operations.timing import Times, now_ns
from aiokv.cli.bench.operations.world import BenchWorld

__all__ = ["Release"]


@final
class Release:
    """Timed: `CacheState.release` of a lease whose prompt was hit on the GPU, and the slices that follow."""

    __slots__ = ("_prompts", "_world")

    def __init__(self, case: Case, *, world: BenchWorld) -> None:
        self._world = world
        self._prompts = MeasuredPrompts(case, world=world)

    def prepare(self) -> None:
        """See `TimedOperation`."""
        self._prompts.arrange()
        self._prompts.admit()
        self._world.run_until_idle()
        self._prompts.arrange_another()  # so that the caches hold something else than what was just admitted

    def run(self) -> Times:
        """See `TimedOperation`."""
        cache, record = self._world.cache, self._prompts.record
        started = now_ns()
        cache.release(record)
        cache.run_slices()
        return Times(counted={"release": now_ns() - started})

    def restore(self) -> None:
        """See `TimedOperation`."""
        if self._world.cache.live_leases:
            raise RuntimeError("the lease was not released")
