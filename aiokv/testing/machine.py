"""The state machine: requests, copies, faults, resets and pressure in any order, over one cache and one driver.

Small pools and short prompts, so that every request meets the others. After every step `Host.check()` compares the
cache with a model of what each slot really holds; at the end nothing may be held. Needs hypothesis; `run_cache_machine`
runs it. A feature gets its rules here, or in `tier_machine.py` if no request steers it, and its checks in `checks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, Final

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.errors import CapacityError, UsageError
from aiokv.model.ids import Tier
from aiokv.model.plan import Deferred, Outcome
from aiokv.testing.driver import Driver, Setup, Step, Witness
from aiokv.testing.hint_machine import HintMachine
from aiokv.testing.host import Host, host_of
from aiokv.testing.strategies import CHUNKS, LONGEST_PROMPT, PICKS, PROMPTS, STREAMS, setups
from aiokv.testing.tier_machine import require_refused

__all__ = ["CacheMachine"]

_CROWD_ENDS: Final = (Outcome.FAILED, Outcome.CORRUPT, Outcome.OK)


class CacheMachine(HintMachine):
    """One cache, its requests and its copies."""

    make_driver: ClassVar[Callable[[Setup, Witness], Driver]]

    host: Host

    @initialize(setup=setups())
    def start(self, setup: Setup) -> None:
        """Make the cache."""
        self.host = host_of(setup, make_driver=type(self).make_driver)

    # Requests.

    @rule(
        stream=STREAMS,
        tokens=PROMPTS,
        reserve=st.sampled_from([0, 0, 1, 9]),
        first_chunk=CHUNKS,
        align=st.sampled_from([1, 1, 1, 1, 8, 12]),
    )
    def acquire(self, stream: int, tokens: int, reserve: int, first_chunk: int | None, align: int) -> None:
        """A request is admitted at once or not at all."""
        with suppress(CapacityError):
            self.host.acquire(stream, tokens, reserve_tokens=reserve, first_chunk=first_chunk, align=align)

    @rule(stream=STREAMS, longest=st.integers(9, LONGEST_PROMPT))
    def fill(self, stream: int, longest: int) -> None:
        """The longest prompt that is let in: the pool is full then."""
        for tokens in range(longest, 0, -8):
            with suppress(CapacityError):
                if isinstance(self.host.acquire(stream, tokens), LeaseRecord):
                    return

    @precondition(lambda self: self.host.capacity[Tier.CPU])
    @rule(stream=STREAMS, data=st.data(), tokens=st.lists(st.integers(17, LONGEST_PROMPT), min_size=1, max_size=3))
    def load(self, stream: int, data: st.DataObject, tokens: list[int]) -> None:
        """Requests for prompts of one stream, of which much is in the CPU tier."""
        alphabet = data.draw(st.sampled_from(["c", "cccg", "gccb", "gccc-"]))
        for group in range(len(self.host.sizes)):
            letters = data.draw(st.text(alphabet, min_size=4, max_size=12))
            for tier, names in ((Tier.GPU, "gb"), (Tier.CPU, "cb")):
                self.place(stream, [i for i, letter in enumerate(letters) if letter in names], group=group, tier=tier)
        for length in tokens:
            self.acquire(stream, length, 0, data.draw(CHUNKS), 1)

    @precondition(lambda self: self.host.capacity[Tier.CPU])
    @rule(stream=STREAMS, tokens=st.sampled_from([17, 25, 33]), outcome=st.sampled_from(_CROWD_ENDS))
    def crowd(self, stream: int, tokens: int, outcome: Outcome) -> None:
        """As many requests for one prompt as are let in, all waiting for one copy per group, which ends this way."""
        for group, block in enumerate(self.host.sizes):
            self.host.make_room(Tier.GPU)
            self.place(stream, list(range(tokens // block)), group=group, tier=Tier.CPU)
        with suppress(CapacityError):
            for _ in range(6):
                if isinstance(self.host.acquire(stream, tokens), Deferred):
                    break
        self.host.submit_all()
        for _ in range(2):
            if self.host.running:
                self.end_one(self.host.endable(0), outcome)
        self.seen["crowded"] += self.host.cache.waits_for_capacity

    @precondition(lambda self: self.leases())
    @rule(pick=PICKS, tokens=st.integers(0, 12), taken=st.sampled_from(["taken", "taken", "given back"]))
    def extend(self, pick: int, tokens: int, taken: str) -> None:
        """More room is asked for, and perhaps given back by somebody who was cancelled meanwhile."""
        record = self.lease(pick)
        if not record.is_open:
            self.refused(record)
            return
        before = list(record.capacity_tokens)
        with suppress(CapacityError):
            granted = self.host.extend(record, tokens)
            if taken == "given back" and not isinstance(granted, Deferred) and self.offers(Step.UNDO_EXTEND):
                self.host.run_slice()
                if record.is_open:
                    self.host.undo_extend(record, before)

    @precondition(lambda self: self.leases())
    @rule(pick=PICKS, tokens=st.integers(1, 9))
    def decode(self, pick: int, tokens: int) -> None:
        """Grow, ask for room, compute what there is room for."""
        record = self.lease(pick)
        if not record.is_open:
            self.refused(record)
            return
        self.host.append(record, tokens)
        missing = record.keys.num_tokens - min(record.capacity_tokens)
        if missing > 0:
            self.extend(pick, missing, "taken")
        self.compute(pick, tokens, None, "a state")

    @precondition(lambda self: self.leases())
    @rule(
        pick=PICKS,
        tokens=st.integers(0, 50) | st.just(LONGEST_PROMPT),
        publish=st.none() | st.integers(0, 60),
        captured=st.sampled_from(["a state", "nothing"]),
    )
    def compute(self, pick: int, tokens: int, publish: int | None, captured: str) -> None:
        """The KV of more tokens is written and confirmed."""
        record = self.lease(pick)
        if not record.is_open or record.state is not LeaseState.READY:
            self.refused(record)
            return
        stop = min(record.confirmed + tokens, record.keys.num_tokens, *record.capacity_tokens)
        states = self.states(record, stop) if captured == "a state" else ()
        self.seen["captured"] += len(states)
        self.host.confirm(record, stop, publish_to=publish, states=states)

    @precondition(lambda self: self.leases())
    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        """A request leaves, whatever it waits for."""
        self.host.release(self.lease(pick))

    @precondition(lambda self: self.leases())
    @rule(pick=PICKS, fewer=st.sampled_from([0, 0, 1, 5, 17]), go_on=PICKS)
    def fork(self, pick: int, fewer: int, go_on: int) -> None:
        """Both go on: the fork first, then its parent."""
        record = self.lease(pick)
        tokens = record.confirmed - fewer if record.confirmed > fewer else record.keys.num_tokens
        if not record.is_open or record.state is not LeaseState.READY:
            self.refused(record)
            return
        try:
            forked = self.host.fork(record, tokens)
        except (UsageError, CapacityError) as error:
            self.seen[f"fork refused: {type(error).__name__}"] += 1
            return
        if isinstance(forked, LeaseRecord) and go_on:
            self.decode(self.leases().index(forked), go_on)
            self.decode(pick, go_on)

    @precondition(lambda self: self.ready())
    @rule(pick=PICKS, rejected=st.integers(1, 24), stream=STREAMS, forks=st.integers(0, 2))
    def edit(self, pick: int, rejected: int, stream: int, forks: int) -> None:
        """Compute, perhaps fork, write the last tokens anew, which may be those of another stream."""
        record = self.ready()[pick % len(self.ready())]
        pick = self.leases().index(record)
        self.decode(pick, rejected)
        self.compute(pick, LONGEST_PROMPT, None, "a state")
        for _ in range(forks):
            self.fork(pick, 0, 0)
        try:
            self.host.truncate(record, record.keys.num_tokens - rejected, stream=stream)
        except (UsageError, CapacityError) as error:
            self.seen[f"truncation refused: {type(error).__name__}"] += 1
        self.decode(pick, rejected)

    @precondition(lambda self: self.leases())
    @rule(pick=PICKS, comes_back=PICKS)
    def preempt(self, pick: int, comes_back: int) -> None:
        """A request gives its blocks back and goes on later, perhaps at once."""
        record = self.lease(pick)
        self.compute(pick, LONGEST_PROMPT, None, "a state")
        if record.is_open:
            self.host.preempt(record)
            if comes_back:
                self.resume(len(self.host.preempted) - 1)

    @precondition(lambda self: self.host.preempted)
    @rule(pick=PICKS)
    def resume(self, pick: int) -> None:
        """A preempted request asks again."""
        try:
            self.host.resume(pick % len(self.host.preempted))
        except CapacityError:
            self.seen["never fits again"] += 1

    @precondition(lambda self: self.leases())
    @rule(pick=PICKS)
    def compute_and_finish(self, pick: int) -> None:
        """A request ends well."""
        self.compute(pick, LONGEST_PROMPT, None, "a state")
        self.host.finish(self.lease(pick))

    # Helpers.

    def leases(self) -> list[LeaseRecord]:
        """Leases that the driver can use, oldest first."""
        return [record for record in self.host.leases.values() if self.host.driver.has_lease(record)]

    def lease(self, pick: int) -> LeaseRecord:
        """One of them."""
        return self.leases()[pick % len(self.leases())]

    def ready(self) -> list[LeaseRecord]:
        """Leases that can compute."""
        return [record for record in self.leases() if record.is_open and record.state is LeaseState.READY]

    def states(self, record: LeaseRecord, stop: int) -> tuple[int, ...]:
        """The last length up to `stop` at which a state could be captured, if there is a slot for it."""
        length = stop - stop % self.host.geometry.alignment()
        slots = [self.host.driver.state_slots(record, group=group)[1] for group in record.state_slots]
        return (length,) if slots and all(slots) and length > record.confirmed else ()

    def refused(self, record: LeaseRecord) -> None:
        """A lease that is on its way out refuses everything, one that is not ready cannot be confirmed."""
        driver, before = self.host.driver, self.host.cache.snapshot()
        calls: list[Callable[[], object]] = [
            lambda: driver.confirm(record, 0),
            lambda: driver.truncate(record, 1),
            lambda: driver.fork(record, request_id="fork", num_tokens=1),
        ]
        if not record.is_open:
            calls += [lambda: driver.try_extend(record, 1), lambda: driver.block_ids(record, group=0)]
        for call in calls:
            require_refused(call)
        self.host.require_unchanged(before, "a refused call")
