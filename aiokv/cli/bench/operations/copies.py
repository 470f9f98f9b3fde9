"""STORE and LOAD: what is decided about copies, and what becomes of the blocks when they have ended.

The copies themselves are made by nobody: they end at once, and well.
"""

from __future__ import annotations

from typing import final

from aiokv.cli.bench.cases import BLOCK, Case
from aiokv.cli.bench.operations.measured import MeasuredPrompts
from aiokv.cli.bench.operations.timing import Times, VoidRoundError, now_ns
from aiokv.cli.bench.operations.world import BenchWorld
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.model.ids import Tier
from aiokv.model.plan import Outcome

__all__ = ["Load", "Store"]


@final
class Store:
    """Timed: `plan`, the slices that plan the copies of a prompt that was just computed, and `complete`, from handing
    them over to their last block being registered in the CPU tier, whose every slot held another one.

    Beside it `confirm`: what registers the blocks on the GPU. Slices of both kinds take turns and are told apart by
    whether the lease has registered more, or given more back.
    """

    __slots__ = ("_case", "_prompts", "_world")

    def __init__(self, case: Case, *, world: BenchWorld) -> None:
        self._case = case
        self._world = world
        self._prompts = MeasuredPrompts(case, world=world)

    def prepare(self) -> None:
        """See `TimedOperation`."""
        self._prompts.arrange()
        self._prompts.admit()
        self._world.run_until_idle()

    def run(self) -> Times:
        """See `TimedOperation`."""
        cache, record = self._world.cache, self._prompts.record
        confirming = planning = 0
        started = now_ns()
        cache.confirm(record, self._case.blocks * BLOCK)
        confirming += now_ns() - started
        while cache.has_work:
            before = _progress(record)
            started = now_ns()
            cache.run_slice()
            took = now_ns() - started
            if _progress(record) == before:
                planning += took
            else:
                confirming += took
        started = now_ns()
        self._world.end_copies(cache.outbox.take_submissions())
        cache.run_slices()
        completing = now_ns() - started
        return Times(counted={"plan": planning, "complete": completing}, beside={"confirm": confirming})

    def restore(self) -> None:
        """See `TimedOperation`."""
        stored = self._world.count_present(self._prompts.record.keys, tier=Tier.CPU)
        self._prompts.release()
        if stored != self._case.blocks * self._case.groups:
            raise VoidRoundError(f"{stored} blocks were stored")


@final
class Load:
    """Timed: `name`, the slices that name the targets, every one of which evicts, and put the copies into the outbox;
    `submit`, taking them from there; `complete`, from the end of the copies to the lease being READY.

    Beside it `acquire`, the admission, which plans the copies and names the targets of the first slice.
    """

    __slots__ = ("_case", "_prompts", "_world")

    def __init__(self, case: Case, *, world: BenchWorld) -> None:
        self._case = case
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
        naming = now_ns() - started
        cache.run_slices()  # what the admission offered to be stored
        started = now_ns()
        submissions = cache.outbox.take_submissions()
        for transfer in submissions:
            cache.mark_submitted(transfer)
        submitted = now_ns()
        for transfer in submissions:
            cache.complete(transfer.transfer_id, Outcome.OK)
        while record.state is not LeaseState.READY:
            cache.run_slice()
        completed = now_ns()
        times = {"name": naming, "submit": submitted - started, "complete": completed - submitted}
        return Times(counted=times, beside={"acquire": acquiring})

    def restore(self) -> None:
        """See `TimedOperation`."""
        self._prompts.release()
        self._prompts.check_hit()


def _progress(record: LeaseRecord) -> tuple[int, ...]:
    """Changes with every slice that registers blocks of the lease or gives some back."""
    return (*record.registered, *record.given_back)
