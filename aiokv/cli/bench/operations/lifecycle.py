"""LIFECYCLE: all that the core does for one request."""

from __future__ import annotations

from typing import final

from aiokv.cli.bench.cases import Case
from aiokv.cli.bench.operations.measured import Batch, MeasuredPrompts
from aiokv.cli.bench.operations.timing import Prepared, Times, now_ns
from aiokv.cli.bench.operations.world import BenchWorld

__all__ = ["Lifecycle"]


@final
class Lifecycle:
    """Timed, each until nothing is left to do: `acquire` with its loads, `confirm` of the whole prompt with the stores
    of what is new, `finish`. Hashing comes before."""

    __slots__ = ("_prompts", "_world")

    def __init__(self, case: Case, *, world: BenchWorld) -> None:
        self._world = world
        self._prompts = MeasuredPrompts(case, world=world)

    def prepare(self) -> Prepared[Batch]:
        """See `TimedOperation`."""
        return self._prompts.arrange()

    def run(self, batch: Batch) -> Times:
        """See `TimedOperation`."""
        world = self._world
        started = now_ns()
        batch.admit()
        world.run_until_idle()
        acquired = now_ns()
        for record in batch.records:
            world.cache.confirm(record, record.request.prompt_tokens)
        world.run_until_idle()
        confirmed = now_ns()
        for record in batch.records:
            world.cache.finish(record)
        world.run_until_idle()
        finished = now_ns()
        return Times(
            counted={
                "acquire": acquired - started,
                "confirm": confirmed - acquired,
                "finish": finished - confirmed,
            }
        )

    def restore(self, prepared: Prepared[Batch]) -> None:
        """See `TimedOperation`."""
        for batch in prepared.batches:
            batch.check_hits()
        if self._world.cache.live_leases or self._world.cache.unfinished_transfers:
            raise RuntimeError("the request has left something behind")
