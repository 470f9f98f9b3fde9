"""The machine over a whole scheduler: requests come and are cancelled, it does the rest. Needs hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from aiokv.core.cache import CacheState
from aiokv.model.ids import Direction, Tier
from aiokv.model.plan import Outcome
from aiokv.testing.driver import Setup
from aiokv.testing.scheduler import Device, Scheduler, SchedulerDriver
from aiokv.testing.scheduler_host import SchedulerHost
from aiokv.testing.strategies import PICKS, PROMPTS, STREAMS, setups
from aiokv.testing.tier_machine import TierMachine
from aiokv.testing.verdict import require

__all__ = ["SchedulerMachine"]

CROWD: Final = 8
"""With so many unfinished requests no others come."""


class SchedulerMachine(TierMachine):
    """One scheduler and its cache."""

    make_scheduler: ClassVar[Callable[[CacheState, Device], Scheduler]]

    host: SchedulerHost

    @initialize(setup=setups(kinds=("full", "full", "window", "chunked")))
    def start(self, setup: Setup) -> None:
        """Make the cache and the scheduler."""
        make_driver = partial(SchedulerDriver, make_scheduler=type(self).make_scheduler)
        self.host = SchedulerHost(setup, make_driver=make_driver)
        self.added = 0

    @precondition(lambda self: len(self.host.scheduler.unfinished) < CROWD)
    @rule(stream=STREAMS, tokens=PROMPTS, max_new_tokens=st.integers(1, 12), steps=st.integers(0, 2))
    def add(self, stream: int, tokens: int, max_new_tokens: int, steps: int) -> None:
        """A request arrives."""
        self.added += 1
        prompt = self.host.keys(stream, tokens).tokens(0, tokens).tolist()
        self.host.scheduler.add(f"request {self.added}", prompt, max_new_tokens=max_new_tokens)
        self.seen["added"] += 1
        self.step(steps)

    @precondition(lambda self: self.host.capacity[Tier.CPU] and len(self.host.scheduler.unfinished) < CROWD)
    @rule(
        stream=STREAMS,
        data=st.data(),
        tokens=st.lists(st.integers(17, 60), min_size=1, max_size=3),
        outcome=st.sampled_from([None, Outcome.OK, Outcome.OK, Outcome.FAILED, Outcome.FAILED]),
    )
    def load(self, stream: int, data: st.DataObject, tokens: list[int], outcome: Outcome | None) -> None:
        """Requests for prompts of one stream, of which much is in the CPU tier; a copy for them may end like this."""
        self.step(2)
        self.host.make_room(Tier.GPU)
        for group in range(len(self.host.sizes)):
            letters = data.draw(st.text("cccg", min_size=4, max_size=12))
            for tier, name in ((Tier.GPU, "g"), (Tier.CPU, "c")):
                self.place(stream, [i for i, letter in enumerate(letters) if letter == name], group=group, tier=tier)
        for length in tokens:
            self.add(stream, length, 2, 0)
        self.step(1)
        loads = [transfer for transfer in self.host.running if transfer.direction is Direction.LOAD]
        for number, transfer in enumerate(loads):
            if outcome is not None:
                self.end_one(transfer, Outcome.OK if number else outcome)
        self.step(1)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        """The scheduler goes on."""
        for _ in range(count):
            self.host.scheduler.step()
            self.host.check()

    @precondition(lambda self: self.host.scheduler.unfinished)
    @rule(pick=PICKS)
    def cancel(self, pick: int) -> None:
        """A request is not wanted any more."""
        unfinished = sorted(self.host.scheduler.unfinished)
        name = unfinished[pick % len(unfinished)]
        self.host.scheduler.cancel(name)
        require(name not in self.host.scheduler.unfinished, f"{name} was cancelled and is still unfinished")
        self.seen["cancelled"] += 1
