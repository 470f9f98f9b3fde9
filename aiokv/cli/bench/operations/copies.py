"""STORE and LOAD: what is decided about copies, and what becomes of the blocks when they have ended.

The copies themselves are made by nobody: they end at once, and well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from aiokv.cli.bench.cases import BLOCK, Case
from aiokv.cli.bench.operations.measured import Batch, MeasuredPrompts
from aiokv.cli.bench.operations.timing import Prepared, Times, VoidRoundError, now_ns
from aiokv.cli.bench.operations.world import BenchWorld
from aiokv.core.lease_table import LeaseRecord
from aiokv.model.ids import Tier
from aiokv.model.plan import Outcome

__all__ = ["Load", "Store"]


@final
class Store:
    """Timed: `plan`, the slices that plan the copies of prompts that were just computed, and `complete`, from handing
    them over to their last block being registered in the CPU tier, whose every slot held another one.

    All prompts are confirmed, then planned, then completed. Beside it `confirm`: what registers the blocks on the GPU.
    Slices of both kinds take turns and are told apart by whether a lease has registered more, or given more back.
    """

    __slots__ = ("_case", "_prompts", "_world")

    def __init__(self, case: Case, *, world: BenchWorld) -> None:
        self._case = case
        self._world = world
        self._prompts = MeasuredPrompts(case, world=world)

    def prepare(self) -> Prepared[Batch]:
        """See `TimedOperation`."""
        prepared = self._prompts.arrange()
        for batch in prepared.batches:
            batch.admit()
            self._world.run_until_idle()
        return prepared

    def run(self, batch: Batch) -> Times:
        """See `TimedOperation`."""
        cache, records, tokens = self._world.cache, batch.records, batch.blocks * BLOCK
        planning = 0
        started = now_ns()
        for record in records:
            cache.confirm(record, tokens)
        confirming = now_ns() - started
        while cache.has_work:
            before = _progress(records)
            started = now_ns()
            cache.run_slice()
            took = now_ns() - started
            if _progress(records) == before:
                planning += took
            else:
                confirming += took
        started = now_ns()
        self._world.end_copies(cache.outbox.take_submissions())
        cache.run_slices()
        completing = now_ns() - started
        return Times(counted={"plan": planning, "complete": completing}, beside={"confirm": confirming})

    def restore(self, prepared: Prepared[Batch]) -> None:
        """See `TimedOperation`."""
        missing = sum(self._count_missing(batch) for batch in prepared.batches)
        for batch in prepared.batches:
            batch.release()
        self._world.run_until_idle()
        if missing:
            raise VoidRoundError(f"{missing} blocks were not stored")

    def _count_missing(self, batch: Batch) -> int:
        """Blocks of its prompts that are not in the CPU tier."""
        present = sum(self._world.count_present(record.keys, tier=Tier.CPU) for record in batch.records)
        return len(batch.records) * batch.blocks * self._case.groups - present


@final
class Load:
    """Timed: `submit`, taking planned copies from the outbox; `complete`, from the end of the copies to the leases
    being READY, their blocks registered.

    Beside it what LOOKUP times: `acquire`, the admission, which plans the copies, and `name`, the slices that name the
    targets, every one of which evicts.
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
        cache = self._world.cache
        acquiring = batch.admit()
        naming = batch.name_claims()
        cache.run_slices()  # what the admission offered to be stored
        started = now_ns()
        submissions = cache.outbox.take_submissions()
        for transfer in submissions:
            cache.mark_submitted(transfer)
        submitted = now_ns()
        for transfer in submissions:
            cache.complete(transfer.transfer_id, Outcome.OK)
        batch.run_until_ready()
        completed = now_ns()
        return Times(
            counted={"submit": submitted - started, "complete": completed - submitted},
            beside={"acquire": acquiring, "name": naming},
        )

    def restore(self, prepared: Prepared[Batch]) -> None:
        """See `TimedOperation`."""
        for batch in prepared.batches:
            batch.release()
        self._world.run_until_idle()
        for batch in prepared.batches:
            batch.check_hits()


def _progress(records: Iterable[LeaseRecord]) -> list[tuple[int, ...]]:
    """Changes with every slice that registers blocks of a lease or gives some back."""
    return [(*record.registered, *record.given_back) for record in records]
