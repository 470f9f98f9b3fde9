"""LOOKUP and RESERVE: letting a request in, whose prompt lies in the cache or does not."""

from __future__ import annotations

from typing import final

from aiokv.cli.bench.cases import Case
from aiokv.cli.bench.operations.measured import Batch, MeasuredPrompts
from aiokv.cli.bench.operations.timing import Prepared, Times
from aiokv.cli.bench.operations.world import BenchWorld

__all__ = ["Lookup"]


@final
class Lookup:
    """Timed: `acquire`, which is `CacheState.try_acquire`, and `name`, the slices until every claim has its slot and
    all loads are in the outbox. All requests are let in before the first of these slices.

    `acquire` looks up, plans, pins and claims, and names the first slice of what it has claimed. With the layout MISS
    every block is claimed and evicts another: that is RESERVE.
    """

    __slots__ = ("_prompts", "_world")

    def __init__(self, case: Case, *, world: BenchWorld) -> None:
        self._world = world
        self._prompts = MeasuredPrompts(case, world=world)

    def prepare(self) -> Prepared[Batch]:
        """See `TimedOperation`."""
        return self._prompts.arrange()

    def run(self, batch: Batch) -> Times:
        """See `TimedOperation`."""
        acquiring = batch.admit()
        return Times(counted={"acquire": acquiring, "name": batch.name_claims()})

    def restore(self, prepared: Prepared[Batch]) -> None:
        """See `TimedOperation`. Loads that were not submitted are dropped: nothing moves."""
        for batch in prepared.batches:
            batch.release()
        self._world.run_until_idle()
        for batch in prepared.batches:
            batch.check_hits()
