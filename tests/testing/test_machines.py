"""The state machine over other drivers than the core, and what it says when something is wrong."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

from aiokv.core.cache import CacheState
from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.errors import ConfigError, UsageError
from aiokv.model.plan import Outcome
from aiokv.testing import (
    BrokenInvariant,
    Device,
    Driver,
    Row,
    RuntimeDriver,
    Scheduler,
    run_cache_machine,
    run_scheduler_machine,
    scheduler,
)
from tests.testing.batching import BatchingScheduler, Job

LEAST = 3


@pytest.fixture
def _as_found() -> Iterator[None]:
    """Failures are raised as they are found: shrinking them takes minutes."""
    name = settings.get_current_profile_name()
    settings.register_profile("as found", settings.get_profile(name), phases=(Phase.generate,))
    settings.load_profile("as found")
    yield
    settings.load_profile(name)


# What works.


@pytest.mark.timeout(300)
def test_the_runtime_keeps_all_invariants_on_a_loop_that_is_stepped(caplog: pytest.LogCaptureFixture) -> None:
    """Invariants 1 to 13 over `KVRuntime`; who waits is cancelled, times out or is let in, and nobody is forgotten."""
    caplog.set_level(logging.ERROR, logger="aiokv")
    seen = run_cache_machine(RuntimeDriver, max_examples=120, steps=40)
    rare = (
        "stood in line",
        "came back",
        "gave up",
        "left while loading",
        "loads",
        "load error",
        "store ok",
        "replanned",
        "resumed",
        "forked",
        "rank ok",
        "reset",
        "hint kept",
        "hint declined quota",
    )
    missed = {kind: seen[kind] for kind in rare if seen[kind] < LEAST}
    assert not missed, (missed, seen)


@pytest.mark.timeout(300)
def test_a_scheduler_of_an_embedder_keeps_all_invariants() -> None:
    """A batching scheduler with preemption, as in `batching.py`."""
    seen = run_scheduler_machine(BatchingScheduler, max_examples=80, steps=40)
    rare = ("added", "rows", "cancelled", "load ok", "load error", "store ok", "reset")
    missed = {kind: seen[kind] for kind in rare if seen[kind] < LEAST}
    assert not missed, (missed, seen)


def test_the_example_of_the_documentation_runs() -> None:
    example = (scheduler.__doc__ or "").partition("after the other:\n")[2]
    example = textwrap.dedent(example).replace("(OneByOne)", "(OneByOne, max_examples=10, steps=20)")
    ran: dict[str, object] = {}
    exec(compile(example, "the example", "exec"), ran)
    assert "OneByOne" in ran


# What is caught: drivers.


class ConfirmsTooMuch(Driver):
    """Confirms a block more than was computed, where there is room."""

    def confirm(self, record: LeaseRecord, num_tokens: int, **options: object) -> None:
        most = min(record.keys.num_tokens, *record.capacity_tokens)
        self.cache.confirm(record, min(max(num_tokens, record.confirmed) + 4, most))


class NeverReleases(Driver):
    """Forgets that a request has left."""

    def release(self, record: LeaseRecord) -> None:
        pass


class ReleasesSomebodyElse(Driver):
    """Gives back the oldest lease, whoever leaves."""

    def release(self, record: LeaseRecord) -> None:
        self.cache.release(self.cache.leases()[0])


class CompletesAtSubmission(Driver):
    """Takes a copy that was started for one that has ended (law 3)."""

    def submit(self, transfer: Transfer) -> None:
        self.cache.mark_submitted(transfer)
        self.cache.complete(transfer.transfer_id, Outcome.OK)


class TellsNoFailure(Driver):
    """Takes every end of a copy for a good one."""

    def report(self, transfer: Transfer, rank: int, *, outcome: Outcome) -> None:
        self.cache.report(transfer.transfer_id, rank, Outcome.OK)

    def complete(self, transfer: Transfer, outcome: Outcome) -> None:
        self.cache.complete(transfer.transfer_id, Outcome.OK)


class DropsEvents(Driver):
    """Loses an event now and then."""

    def take_events(self) -> list[object]:  # type: ignore[override]  # any list will do
        return [event for number, event in enumerate(super().take_events()) if number != 1]


class NeverFinishesLeases(RuntimeDriver):
    """Keeps what a complete request has held, until the run is over."""

    def finish(self, record: LeaseRecord) -> None:
        pass


class ForgetsWhoWaits(RuntimeDriver):
    """A runtime's request that is never given back."""

    def release(self, record: LeaseRecord) -> None:
        pass


@pytest.mark.usefixtures("_as_found")
@pytest.mark.parametrize(
    "driver",
    [
        ConfirmsTooMuch,
        NeverReleases,
        ReleasesSomebodyElse,
        CompletesAtSubmission,
        TellsNoFailure,
        DropsEvents,
        NeverFinishesLeases,
        ForgetsWhoWaits,
    ],
)
def test_a_driver_with_a_fault_is_caught(driver: type[Driver]) -> None:
    with pytest.raises((BrokenInvariant, BaseExceptionGroup)) as caught:
        run_cache_machine(driver, max_examples=50, steps=40)
    assert broken(caught.value), caught.value


# What is caught: schedulers.


class ConfirmsUncomputed(BatchingScheduler):
    """Confirms a chunk without computing its first token."""

    def compute(self, job: Job, stop: int) -> int:
        lease = self.lease_of(job)
        self.core.confirm(lease, min(lease.confirmed + 1, stop - 1))
        return super().compute(job, stop)


class ReadsBeforeReady(BatchingScheduler):
    """Does not wait for loads."""

    def is_ready(self, job: Job) -> bool:
        return self.lease_of(job).state in (LeaseState.LOADING, LeaseState.READY)


class WritesForeignBlocks(BatchingScheduler):
    """Mixes up the tables of two requests."""

    def tables(self, job: Job) -> dict[str, list[int]]:
        other = self.running[-1] if self.lease_of(self.running[-1]).is_open else job
        mine, theirs = super().tables(job), super().tables(other)
        return {name: (theirs[name] + mine[name])[: len(mine[name])] for name in mine}


class NeverFinishes(BatchingScheduler):
    """Forgets to give back the lease of a request that was cancelled."""

    def leave(self, job: Job) -> None:
        self.running.remove(job)


class ComputesAfterRelease(BatchingScheduler):
    """Gives blocks back before the step that uses them."""

    def compute(self, job: Job, stop: int) -> int:
        lease, tables = self.lease_of(job), self.tables(job)
        start = lease.confirmed
        if stop == job.last - 1:
            self.core.release(lease)
        row = Row(request_id=job.request.request_id, token_ids=tuple(job.tokens), start=start, stop=stop, tables=tables)
        token = self.device.compute(row)
        if lease.is_open:
            self.core.confirm(lease, stop)
        return token


class IgnoresFailures(BatchingScheduler):
    """Takes every copy for a good one."""

    def hear(self) -> None:
        for ended in self.device.take_ended():
            self.core.complete(ended.transfer_id, Outcome.OK)


class LosesWakeUps(BatchingScheduler):
    """Tries who was deferred again when the next request arrives, not when capacity comes back."""

    tried = 0

    def let_in(self) -> None:
        if len(self.waiting) != self.tried:
            super().let_in()
            self.tried = len(self.waiting)


class ForgetsTables(BatchingScheduler):
    """Hands the kernel no table of the last group."""

    def tables(self, job: Job) -> dict[str, list[int]]:
        return dict(list(super().tables(job).items())[:-1])


class CutsTables(BatchingScheduler):
    """Hands the kernel tables that are a block too short."""

    def tables(self, job: Job) -> dict[str, list[int]]:
        return {name: table[:-1] for name, table in super().tables(job).items()}


class ComputesOtherTokens(BatchingScheduler):
    """Mixes up the tokens of a request."""

    def compute(self, job: Job, stop: int) -> int:
        lease = self.lease_of(job)
        tokens = [token + 1 for token in job.tokens]
        name, tables = job.request.request_id, self.tables(job)
        token = self.device.compute(
            Row(request_id=name, token_ids=tokens, start=lease.confirmed, stop=stop, tables=tables)
        )
        self.core.confirm(lease, stop)
        return token


class NeverCancels(BatchingScheduler):
    """Goes on with requests that nobody wants any more."""

    def cancel(self, request_id: str) -> None:
        pass


class StartsNoCopies(BatchingScheduler):
    """Marks copies as submitted and forgets them."""

    def start_copies(self) -> None:
        self.core.outbox.take_settled()
        for transfer in self.core.outbox.take_submissions():
            self.core.mark_submitted(transfer)


class StartsCopiesUnmarked(BatchingScheduler):
    """Starts copies of which the cache is not told."""

    def start_copies(self) -> None:
        self.core.outbox.take_settled()
        for transfer in self.core.outbox.take_submissions():
            self.device.submit(transfer)


class Raises(BatchingScheduler):
    """Has a fault of its own while requests hold blocks."""

    def step(self) -> None:
        super().step()
        if self.running:
            raise ZeroDivisionError("a fault of its own")


@pytest.mark.usefixtures("_as_found")
@pytest.mark.parametrize(
    "faulty",
    [
        ConfirmsUncomputed,
        ReadsBeforeReady,
        WritesForeignBlocks,
        NeverFinishes,
        ComputesAfterRelease,
        IgnoresFailures,
        LosesWakeUps,
    ],
)
def test_a_scheduler_with_a_fault_is_caught(faulty: type[BatchingScheduler]) -> None:
    def make(core: CacheState, device: Device) -> Scheduler:
        return faulty(core, device)

    with pytest.raises((BrokenInvariant, UsageError, BaseExceptionGroup)) as caught:
        run_scheduler_machine(make, max_examples=50, steps=40)
    is_refused = isinstance(caught.value, UsageError)  # the core may notice first: nothing is confirmed while loading
    assert is_refused or broken(caught.value), caught.value


# How it says so.


@pytest.mark.usefixtures("_as_found")
@pytest.mark.parametrize(
    ("faulty", "error", "message"),
    [
        (ForgetsTables, BrokenInvariant, "has no table of g"),
        (CutsTables, BrokenInvariant, r"has \d+ blocks of g\d, of the \d+ it needs"),
        (ComputesOtherTokens, BrokenInvariant, "computes tokens that no request has"),
        (NeverCancels, BrokenInvariant, "was cancelled and is still unfinished"),
        (StartsNoCopies, BrokenInvariant, "copies that the cache wants were never started"),
        (StartsCopiesUnmarked, BrokenInvariant, "a copy starts before mark_submitted"),
        (Raises, ZeroDivisionError, "a fault of its own"),
    ],
)
def test_what_a_scheduler_did_wrong_is_said_in_words(
    faulty: type[BatchingScheduler], error: type[Exception], message: str
) -> None:
    """The first fault is told, not what it leads to when the run is torn down."""

    def make(core: CacheState, device: Device) -> Scheduler:
        return faulty(core, device)

    with pytest.raises((BaseExceptionGroup, error)) as caught:
        run_scheduler_machine(make, max_examples=20, steps=20)
    found = caught.value.exceptions if isinstance(caught.value, BaseExceptionGroup) else (caught.value,)
    assert any(isinstance(one, error) and re.search(message, str(one)) for one in found), found


@pytest.mark.usefixtures("_as_found")
def test_a_failure_says_the_steps_that_lead_there() -> None:
    with pytest.raises(BrokenInvariant) as caught:
        run_cache_machine(NeverReleases, max_examples=50, steps=20)
    told = "\n".join(caught.value.__notes__)
    assert "state.start(setup=Setup(" in told
    assert re.search(r"state\.(acquire|fill|load|crowd)\(", told)


def test_without_hypothesis_it_says_what_to_install() -> None:
    code = """
import sys
sys.modules["hypothesis"] = None
import aiokv.testing
from aiokv.errors import ConfigError
for run in (aiokv.testing.run_cache_machine, aiokv.testing.run_scheduler_machine):
    try:
        run(print)
    except ConfigError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("aiokv[test]") == 2
    assert issubclass(ConfigError, Exception)


def broken(error: BaseException) -> bool:
    """Whether an invariant was found broken: the error itself, or one of a group that hypothesis makes of several."""
    if isinstance(error, BaseExceptionGroup):
        return any(broken(one) for one in error.exceptions)
    return isinstance(error, BrokenInvariant)
