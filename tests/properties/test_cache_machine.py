"""The core under everything at once: requests, copies, faults, resets and pressure in any order.

Small pools and short prompts, so that every request meets the others. After every step `Host.check()` compares the core
with a model of what each slot really holds (see `aiokv/testing/host.py`); at the end nothing may be held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.core.store_policy import StoreSettings
from aiokv.errors import CapacityError, UsageError
from aiokv.model.ids import Tier
from aiokv.model.plan import Deferred, Outcome, StorePolicy
from aiokv.model.spec import CacheGeometry, ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from aiokv.testing.host import Host
from aiokv.testing.streams import FORKS

EXAMPLES: Final = 300
STEPS: Final = 80
LONGEST_PROMPT: Final = 60
STREAMS: Final = st.integers(0, len(FORKS) - 1)
PICKS: Final = st.integers(0, 7)
CHUNKS: Final = st.sampled_from([None, None, None, 1, 4, 8])
OUTCOMES: Final = st.sampled_from([Outcome.OK, Outcome.OK, Outcome.FAILED])
RARELY: Final = st.sampled_from(range(6)).map(lambda dice: dice == 4)


@st.composite
def groups(draw: st.DrawFn, name: str) -> GroupSpec:
    block = draw(st.sampled_from([4, 4, 4, 8]))
    reach = draw(st.integers(1, 4 * block))
    lookahead = draw(RARELY)
    match draw(st.sampled_from(["full", "full", "window", "chunked", "recurrent"])):
        case "full":
            return FullAttention(name, block_size=block, lookahead=lookahead)
        case "window":
            return SlidingWindow(name, block_size=block, window=reach, lookahead=lookahead)
        case "chunked":
            return ChunkedLocal(name, block_size=block, chunk=reach)
        case _:
            return RecurrentState(name, block_size=block)


@st.composite
def store_settings(draw: st.DrawFn) -> StoreSettings:
    return StoreSettings(
        policy=draw(st.sampled_from(StorePolicy)),
        lazy_fraction=draw(st.sampled_from([0.1, 0.3, 1.0])),
        selective_count=draw(st.integers(1, 3)),
    )


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    count = draw(st.sampled_from([1, 1, 2, 3]))
    geometry = CacheGeometry(groups=tuple(draw(groups(f"g{i}")) for i in range(count)), hash_block_size=4)
    return Host(
        geometry,
        gpu_blocks=draw(st.sampled_from([40, 30, 23, 16, 11, 7, 3])),
        cpu_blocks=draw(st.sampled_from([64, 64, 40, 20, 5, 0])),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1])),
        slice_blocks=draw(st.sampled_from([1024, 1, 2, 3, 5])),
        stores=draw(store_settings()),
        world_size=draw(st.sampled_from([2, 3, 1])),
    )


class CacheMachine(RuleBasedStateMachine):
    """One cache, its requests and its copies."""

    seen: ClassVar[Counter[str]] = Counter()

    host: Host

    @initialize(host=hosts())
    def start(self, host: Host) -> None:
        self.host = host

    # Requests.

    @rule(
        stream=STREAMS,
        tokens=st.integers(1, LONGEST_PROMPT) | st.sampled_from([33, 41, 49, 57]),
        reserve=st.sampled_from([0, 0, 1, 9]),
        first_chunk=CHUNKS,
        align=st.sampled_from([1, 1, 1, 1, 8, 12]),
    )
    def acquire(self, stream: int, tokens: int, reserve: int, first_chunk: int | None, align: int) -> None:
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
    @rule(stream=STREAMS, tokens=st.sampled_from([17, 25, 33]), outcome=st.sampled_from([Outcome.FAILED, Outcome.OK]))
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
        for transfer in list(self.host.running)[:2]:
            self.end_one(transfer, outcome)
        self.seen["crowded"] += self.host.cache.waits_for_capacity

    @precondition(lambda self: self.host.leases)
    @rule(pick=PICKS, tokens=st.integers(0, 12), taken=st.sampled_from(["taken", "taken", "given back"]))
    def extend(self, pick: int, tokens: int, taken: str) -> None:
        record = self.lease(pick)
        if not record.is_open:
            self.refused(record)
            return
        before = list(record.capacity_tokens)
        with suppress(CapacityError):
            granted = self.host.extend(record, tokens)
            if taken == "given back" and not isinstance(granted, Deferred):
                self.host.cache.run_slice()
                self.host.settle()
                if record.is_open:
                    self.host.undo_extend(record, before)

    @precondition(lambda self: self.host.leases)
    @rule(pick=PICKS, tokens=st.integers(1, 9))
    def decode(self, pick: int, tokens: int) -> None:
        """Grow, ask for room, compute what there is room for."""
        record = self.lease(pick)
        self.host.append(record, tokens)
        missing = record.keys.num_tokens - min(record.capacity_tokens)
        if missing > 0:
            self.extend(pick, missing, "taken")
        self.compute(pick, tokens, None, "a state")

    @precondition(lambda self: self.host.leases)
    @rule(
        pick=PICKS,
        tokens=st.integers(0, 50) | st.just(LONGEST_PROMPT),
        publish=st.none() | st.integers(0, 60),
        captured=st.sampled_from(["a state", "nothing"]),
    )
    def compute(self, pick: int, tokens: int, publish: int | None, captured: str) -> None:
        record = self.lease(pick)
        if not record.is_open or record.state is not LeaseState.READY:
            self.refused(record)
            return
        stop = min(record.confirmed + tokens, record.keys.num_tokens, *record.capacity_tokens)
        states = self.states(record, stop) if captured == "a state" else ()
        self.seen["captured"] += len(states)
        self.host.confirm(record, stop, publish_to=publish, states=states)

    @precondition(lambda self: self.host.leases)
    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        self.host.release(self.lease(pick))

    @precondition(lambda self: self.host.leases)
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
            self.decode(list(self.host.leases.values()).index(forked), go_on)
            self.decode(pick, go_on)

    @precondition(lambda self: self.ready())
    @rule(pick=PICKS, rejected=st.integers(1, 24), stream=STREAMS, forks=st.integers(0, 2))
    def edit(self, pick: int, rejected: int, stream: int, forks: int) -> None:
        """Compute, perhaps fork, write the last tokens anew, which may be those of another stream."""
        record = self.ready()[pick % len(self.ready())]
        pick = list(self.host.leases.values()).index(record)
        self.decode(pick, rejected)
        self.compute(pick, LONGEST_PROMPT, None, "a state")
        for _ in range(forks):
            self.fork(pick, 0, 0)
        try:
            self.host.truncate(record, record.keys.num_tokens - rejected, stream=stream)
        except (UsageError, CapacityError) as error:
            self.seen[f"truncation refused: {type(error).__name__}"] += 1
        self.decode(pick, rejected)

    @precondition(lambda self: self.host.leases)
    @rule(pick=PICKS, comes_back=PICKS)
    def preempt(self, pick: int, comes_back: int) -> None:
        record = self.lease(pick)
        self.compute(pick, LONGEST_PROMPT, None, "a state")
        if record.is_open:
            self.host.preempt(record)
            if comes_back:
                self.resume(len(self.host.preempted) - 1)

    @precondition(lambda self: self.host.preempted)
    @rule(pick=PICKS)
    def resume(self, pick: int) -> None:
        try:
            self.host.resume(pick % len(self.host.preempted))
        except CapacityError:
            self.seen["never fits again"] += 1

    @precondition(lambda self: self.host.leases)
    @rule(pick=PICKS)
    def compute_and_finish(self, pick: int) -> None:
        self.compute(pick, LONGEST_PROMPT, None, "a state")
        self.host.finish(self.lease(pick))

    # Copies and slices.

    @precondition(lambda self: self.host.cache.has_work)
    @rule(count=st.integers(1, 3))
    def run_slices(self, count: int) -> None:
        self.seen["sliced"] += 1
        for _ in range(count):
            self.host.cache.run_slice()
            self.host.settle()

    @precondition(lambda self: self.host.cache.has_work or self.host.cache.waits_for_capacity)
    @rule()
    def turn(self) -> None:
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
    def end(self, pick: int, outcome: Outcome, lost: object) -> None:
        self.end_one(self.host.running[pick % len(self.host.running)], Outcome.LOST if lost else outcome)

    @precondition(lambda self: self.host.queued or self.host.running)
    @rule(pick=PICKS, ranks=st.lists(st.integers(0, 2), min_size=1, max_size=4), outcome=OUTCOMES, lost=RARELY)
    def report(self, pick: int, ranks: list[int], outcome: Outcome, lost: object) -> None:
        """Parts of one copy end, the first one this way; a second time counts once, a contradiction not at all."""
        self.host.submit_all()
        transfer = self.host.running[pick % len(self.host.running)]
        outcomes = [Outcome.LOST if lost else outcome, *[Outcome.OK] * (len(ranks) - 1)]
        for rank, ended in zip(ranks, outcomes, strict=True):
            if transfer in self.host.running:
                self.report_one(transfer, rank, outcome=ended)
                self.host.check()

    @precondition(lambda self: self.host.queued or self.host.running)
    @rule(outcome=OUTCOMES)
    def end_all(self, outcome: Outcome) -> None:
        self.host.end_all(outcome)

    @precondition(lambda self: self.host.queued)
    @rule(pick=PICKS)
    def refuse_submission(self, pick: int) -> None:
        self.end_one(self.host.queued[pick % len(self.host.queued)], Outcome.FAILED)

    # Tiers.

    @rule(stream=STREAMS, group=st.integers(0, 2), position=st.integers(0, 10), tier=st.sampled_from(Tier))
    def evict(self, stream: int, group: int, position: int, tier: Tier) -> None:
        group %= len(self.host.sizes)
        try:
            self.host.evict(stream, [position], group=group, tier=tier)
        except UsageError:
            return
        assert self.host.letters(stream, group)[position] not in {Tier.GPU: "gb", Tier.CPU: "cb"}[tier]

    @precondition(lambda self: self.host.leases or self.host.running)
    @rule(tiers=st.sampled_from([(), (), (Tier.GPU,), (Tier.CPU,)]), really=RARELY)
    def reset(self, tiers: tuple[Tier, ...], really: object) -> None:
        if really:
            self.seen["reset"] += 1
            self.host.reset(*tiers)

    # What holds.

    @invariant()
    def holds(self) -> None:
        self.host.check()

    def teardown(self) -> None:
        if hasattr(self, "host"):
            self.host.tear_down()
            self.seen.update(self.host.seen)

    # Helpers.

    def lease(self, pick: int) -> LeaseRecord:
        return list(self.host.leases.values())[pick % len(self.host.leases)]

    def ready(self) -> list[LeaseRecord]:
        """Leases that can be used."""
        return [record for record in self.host.leases.values() if record.is_open and record.state is LeaseState.READY]

    def place(self, stream: int, positions: list[int], *, group: int, tier: Tier) -> None:
        """Place blocks, if need be in the room of those that nobody holds."""
        for _ in range(2):
            before = self.host.cache.snapshot()
            try:
                self.host.place(stream, positions, group=group, tier=tier)
            except UsageError:
                assert self.host.cache.snapshot() == before
                self.host.make_room(tier)
            else:
                return

    def end_one(self, transfer: Transfer, outcome: Outcome) -> None:
        """The first rank that has not reported says this, the others OK; what was never submitted ends at once."""
        self.seen[f"{transfer.direction.value} {outcome.value}"] += 1
        if transfer not in self.host.running:
            self.host.end(transfer, outcome)
            return
        first, *others = self.host.cache.missing_ranks(transfer)
        self.report_one(transfer, first, outcome=outcome)
        for rank in others:
            self.host.check()
            self.report_one(transfer, first, outcome=outcome)
            self.report_one(transfer, rank, outcome=Outcome.OK)

    def report_one(self, transfer: Transfer, rank: int, *, outcome: Outcome) -> None:
        told = self.host.reports.get(transfer.transfer_id, {})
        if rank >= self.host.cache.world_size or told.get(rank, outcome) is not outcome:
            self.refused_report(transfer, rank, outcome=outcome)
        elif rank in told:
            self.repeated_report(transfer, rank, outcome=outcome)
        else:
            self.seen[f"rank {outcome.value}"] += self.host.cache.world_size > 1
            self.host.report(transfer, rank, outcome=outcome)

    def refused_report(self, transfer: Transfer, rank: int, *, outcome: Outcome) -> None:
        before = self.host.cache.snapshot()
        with pytest.raises(UsageError):
            self.host.cache.report(transfer.transfer_id, rank, outcome)
        assert self.host.cache.snapshot() == before
        self.seen["report refused"] += 1

    def repeated_report(self, transfer: Transfer, rank: int, *, outcome: Outcome) -> None:
        before = self.host.cache.snapshot()
        self.host.cache.report(transfer.transfer_id, rank, outcome)
        assert self.host.cache.snapshot() == before
        self.seen["report repeated"] += 1

    def states(self, record: LeaseRecord, stop: int) -> tuple[int, ...]:
        """The last length up to `stop` at which a state could be captured, if there is a slot for it."""
        length = stop - stop % self.host.geometry.alignment()
        slots = [self.host.cache.state_slots(record, group=group)[1] for group in record.state_slots]
        return (length,) if slots and all(slots) and length > record.confirmed else ()

    def refused(self, record: LeaseRecord) -> None:
        """A lease that is on its way out refuses everything, one that is not ready cannot be confirmed."""
        cache, before = self.host.cache, self.host.cache.snapshot()
        calls: list[Callable[[], object]] = [
            lambda: cache.confirm(record, 0),
            lambda: cache.truncations.truncate(record, 1),
        ]
        if not record.is_open:
            calls += [lambda: cache.try_extend(record, 1), lambda: cache.block_ids(record, group=0)]
        calls.append(lambda: cache.forks.plan(record, request_id="fork", num_tokens=1))
        for call in calls:
            with pytest.raises(UsageError):
                call()
        assert cache.snapshot() == before


@pytest.mark.timeout(480)
def test_the_core_keeps_its_invariants_under_everything_at_once() -> None:
    CacheMachine.seen.clear()
    budget = settings(max_examples=max(EXAMPLES, settings().max_examples), stateful_step_count=STEPS)
    run_state_machine_as_test(CacheMachine, settings=budget)
    rare = (
        "load error",
        "load ok",
        "store ok",
        "replanned",
        "waited",
        "crowded",
        "joins",
        "captured",
        "sliced",
        "reset",
        "left while loading",
        "truncated what was written",
        "forked with a prefix",
        "resumed with a prefix",
        "rank ok",
        "rank error",
        "report repeated",
        "report refused",
    )
    missed = {kind: CacheMachine.seen[kind] for kind in rare if CacheMachine.seen[kind] < 5}
    assert not missed, (missed, CacheMachine.seen)
