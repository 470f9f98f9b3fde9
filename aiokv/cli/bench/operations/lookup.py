"""LOOKUP and RESERVE: letting a request in, whose prompt lies in the cache or does not."""

from __future__ import annotations

from typing import final

from aiokv.cli.bench.cases import Case
from aiokv.cli.bench.operations.measured import MeasuredPrompts
from aiokv.cli.bench.operations.timing import Times, now_ns
from aiokv.cli.bench.operations.world import BenchWorld

__all__ = ["Lookup"]


@final
class Lookup:
    """Timed: `acquire`, which is `CacheState.try_acquire`, and `name`, the slices until every claim has its slot and
    all loads are in the outbox.

    `acquire` looks up, plans, pins and claims, and names the first slice of what it has claimed. With the layout MISS
    every block is claimed and evicts another: that is RESERVE.
    """

    __slots__ = ("_prompts", "_world")

    def __init__(self, case: Case, *, world: BenchWorld) -> None:
        self._world = world
        self._prompts = MeasuredPrompts(case, world=world)

    def prepare(self) -> None:
        """See `TimedOperation`."""
        self._prompts.arrange()

    def run(self) -> Times:
        """See `TimedOperation`."""
        cache = self._world.cache
        acquiring = self._prompts.admit()
        record = self._prompts.record
        started = now_ns()
        while record.unnamed_claims:
            cache.run_slice()
        return Times(counted={"acquire": acquiring, "name": now_ns() - started})

    def restore(self) -> None:
        """See `TimedOperation`. Loads that were not submitted are dropped: nothing moves."""
        self._prompts.release()
        self._prompts.check_hit()
