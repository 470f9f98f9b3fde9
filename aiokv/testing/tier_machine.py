"""The half of the state machine that steers no request: copies, ranks, tiers, and what holds after every step.

Needs hypothesis.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiokv.core.inflight import Transfer
from aiokv.errors import AiokvError, UsageError
from aiokv.model.ids import Direction, Tier
from aiokv.model.plan import Outcome
from aiokv.testing.copy_host import CopyHost
from aiokv.testing.driver import Step
from aiokv.testing.strategies import OUTCOMES, PICKS, RARELY, SELDOM, STREAMS
from aiokv.testing.verdict import BrokenInvariant, require

__all__ = ["TierMachine", "require_refused"]


class TierMachine(RuleBasedStateMachine):
    """One cache and its copies. `seen` counts what all runs together have met."""

    seen: ClassVar[Counter[str]]

    host: CopyHost

    # Copies and slices.

    @precondition(lambda self: self.host.cache.has_work)
    @rule(count=st.integers(1, 3))
    def run_slices(self, count: int) -> None:
        """Some slices of pending work."""
        self.seen["sliced"] += 1
        for _ in range(count):
            self.host.run_slice()

    @precondition(lambda self: self.host.cache.has_work or self.host.cache.waits_for_capacity)
    @rule()
    def turn(self) -> None:
        """All pending work, and another try for leases that wait for slots."""
        self.seen["waited"] += self.host.cache.waits_for_capacity
        self.host.turn()

    @precondition(lambda self: self.host.queued)
    @rule(pick=PICKS, outcome=st.none() | OUTCOMES)
    def submit(self, pick: int, outcome: Outcome | None) -> None:
        """Start a copy, and end it at once unless `outcome` is None."""
        transfer = self.host.queued[pick % len(self.host.queued)]
        self.host.submit(transfer)
        if outcome is not None:
            self.end_one(transfer, outcome)

    @precondition(lambda self: self.host.running)
    @rule(pick=PICKS, outcome=OUTCOMES, lost=RARELY)
    def end(self, pick: int, outcome: Outcome, *, lost: bool) -> None:
        """A copy ends on all ranks."""
        self.end_one(self.host.endable(pick), Outcome.LOST if lost else outcome)

    @precondition(lambda self: any(t.direction is Direction.LOAD for t in self.host.queued + self.host.running))
    @rule(pick=PICKS)
    def find_corrupt(self, pick: int) -> None:
        """A load ends that has brought corrupt blocks."""
        self.host.submit_all()
        endable = self.host.driver.endable(self.host.running)
        loads = [transfer for transfer in endable if transfer.direction is Direction.LOAD]
        if loads:
            self.end_one(loads[pick % len(loads)], Outcome.CORRUPT)

    @precondition(lambda self: (self.host.running or self.host.queued) and self.offers(Step.REPORT))
    @rule(
        pick=PICKS,
        ranks=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        outcome=OUTCOMES,
        lost=RARELY,
        contradicts=st.booleans(),
    )
    def report(self, pick: int, ranks: list[int], outcome: Outcome, *, lost: bool, contradicts: bool) -> None:
        """Parts of one copy end, the first one this way; a second time counts once, a contradiction not at all."""
        self.host.submit_all()
        if not self.host.running:
            return
        transfer = self.host.endable(pick)
        outcomes = [self.possible(transfer, Outcome.LOST if lost else outcome), *[Outcome.OK] * (len(ranks) - 1)]
        for rank, ended in zip(ranks, outcomes, strict=True):
            if transfer in self.host.running:
                self.report_one(transfer, rank, outcome=ended)
                self.host.check()
        if contradicts and transfer in self.host.running:
            told = self.host.reports.get(transfer.transfer_id, {})
            for rank, said in list(told.items())[:1]:
                self.report_one(transfer, rank, outcome=_other_than(said))

    @precondition(lambda self: self.host.queued or self.host.running)
    @rule(outcome=OUTCOMES)
    def end_all(self, outcome: Outcome) -> None:
        """Every copy is started and ends, those that follow from it too."""
        self.host.end_all(outcome)

    @precondition(lambda self: self.host.queued)
    @rule(pick=PICKS)
    def refuse_submission(self, pick: int) -> None:
        """A copy cannot be started."""
        self.end_one(self.host.queued[pick % len(self.host.queued)], Outcome.FAILED)

    # Tiers.

    @rule(stream=STREAMS, group=st.integers(0, 2), position=st.integers(0, 10), tier=st.sampled_from(Tier))
    def evict(self, stream: int, group: int, position: int, tier: Tier) -> None:
        """A block is evicted unless somebody holds it."""
        group %= len(self.host.sizes)
        try:
            self.host.evict(stream, [position], group=group, tier=tier)
        except UsageError:
            return
        is_there = self.host.letters(stream, group)[position] in {Tier.GPU: "gb", Tier.CPU: "cb"}[tier]
        require(not is_there, "an evicted block can be found")

    @precondition(lambda self: self.host.leases or self.host.running)
    @rule(tiers=st.sampled_from([(), (), (Tier.GPU,), (Tier.CPU,)]), really=SELDOM)
    def reset(self, tiers: tuple[Tier, ...], *, really: bool) -> None:
        """Tiers forget everything."""
        if really:
            self.seen["reset"] += 1
            self.host.reset(*tiers)

    # What holds.

    @invariant()
    def holds(self) -> None:
        """All invariants."""
        self.host.check()

    def teardown(self) -> None:
        """Everything is given back in the end. After a failed step nobody asks: the answer would hide that step."""
        if hasattr(self, "host"):
            try:
                if not self._has_failed():
                    self.host.tear_down()
            finally:
                self.host.driver.close()
            self.seen.update(self.host.seen)
            for reason, revoked in self.host.cache.counters.hints_revoked.items():
                self.seen[f"hints revoked {reason.value}"] += revoked

    # Helpers.

    def _has_failed(self) -> bool:
        """Whether a step of this run has raised: hypothesis tears down while that goes on its way."""
        error = sys.exception()
        frames = traceback.walk_tb(error.__traceback__ if error is not None else None)
        return any(frame.f_locals.get("self") is self for frame, _ in frames)

    def offers(self, step: Step) -> bool:
        """Whether the driver takes this step."""
        return step in self.host.driver.steps

    def possible(self, transfer: Transfer, outcome: Outcome) -> Outcome:
        """The outcome, or a failure where this copy cannot be lost or bring corrupt blocks.

        Two loads may read one slot, one of which is known to fail: neither says that it is corrupt, as the other would
        have to say so too.
        """
        if outcome is Outcome.LOST and not self.offers(Step.LOSE):
            return Outcome.FAILED
        if outcome is not Outcome.CORRUPT:
            return outcome
        loads = self.host.in_flight(direction=Direction.LOAD)
        readers = sum(bool(np.isin(load.sources, transfer.sources).any()) for load in loads)
        is_alone = transfer in self.host.running and readers == 1 and transfer.direction is Direction.LOAD
        return outcome if is_alone and self.offers(Step.SPOIL) else Outcome.FAILED

    def place(self, stream: int, positions: list[int], *, group: int, tier: Tier) -> None:
        """Place blocks, if need be in the room of those that nobody holds."""
        for _ in range(2):
            before = self.host.cache.snapshot()
            try:
                self.host.place(stream, positions, group=group, tier=tier)
            except UsageError:
                self.host.require_unchanged(before, "a refused placement")
                self.host.make_room(tier)
            else:
                return

    def end_one(self, transfer: Transfer, outcome: Outcome) -> None:
        """The first rank that has not reported says this, the others OK; what was never submitted ends at once."""
        outcome = self.possible(transfer, outcome)
        if transfer not in self.host.running or not self.offers(Step.REPORT):
            self.host.end(transfer, outcome)
            return
        first, *others = self.host.cache.missing_ranks(transfer)
        self.report_one(transfer, first, outcome=outcome)
        for rank in others:
            self.host.check()
            self.report_one(transfer, first, outcome=outcome)
            self.report_one(transfer, first, outcome=_other_than(outcome))
            self.report_one(transfer, rank, outcome=Outcome.OK)

    def report_one(self, transfer: Transfer, rank: int, *, outcome: Outcome) -> None:
        """A rank reports; where it may not, that changes nothing."""
        told = self.host.reports.get(transfer.transfer_id, {})
        corrupt = corrupt_copies(transfer) if outcome is Outcome.CORRUPT else ()
        before = self.host.cache.snapshot()
        if rank >= self.host.cache.world_size or told.get(rank, outcome) is not outcome:
            require_refused(lambda: self.host.tell(transfer, rank, outcome=outcome, corrupt=corrupt))
            self.host.require_unchanged(before, "a refused report")
            self.seen["report refused"] += 1
        elif rank in told:
            self.host.tell(transfer, rank, outcome=outcome, corrupt=corrupt)
            self.host.require_unchanged(before, "a repeated report")
            self.seen["report repeated"] += 1
        else:
            self.seen[f"rank {outcome.value}"] += self.host.cache.world_size > 1
            self.host.report(transfer, rank, outcome=outcome, corrupt=corrupt)


def corrupt_copies(transfer: Transfer) -> tuple[int, ...]:
    """Which copies of a load are corrupt when it brings corrupt blocks: about a third, and one at least."""
    return tuple(np.flatnonzero(transfer.sources % 3 == 0).tolist()) or (0,)


def _other_than(outcome: Outcome) -> Outcome:
    return Outcome.FAILED if outcome is Outcome.OK else Outcome.OK


def require_refused(call: Callable[[], object]) -> None:
    """`BrokenInvariant` unless this is a `UsageError`."""
    try:
        call()
    except UsageError:
        return
    except AiokvError as error:
        raise BrokenInvariant(f"a call that must be refused failed otherwise: {error!r}") from error
    raise BrokenInvariant("a call that must be refused was not")
