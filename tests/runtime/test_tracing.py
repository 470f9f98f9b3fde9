"""Spans around admissions and copies: whose they are, what they say, that each ends once and costs no request."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Final, final

import pytest
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NoOpTracerProvider, SpanKind, StatusCode

from aiokv import AcquireTimeout, BackendLost, CapacityError, ConfigError, CopyFailed, KVRuntime, Lease, UsageError
from aiokv.model.plan import Deferred, Outcome
from aiokv.runtime.entry import AcquireCall
from aiokv.runtime.tracer_guard import find_tracer
from aiokv.testing import FakeBackend, make_resident
from tests.cancellation.ways import WAYS, Suspensions, Way
from tests.runtime.support import (
    BLOCK,
    GROUP,
    Case,
    assert_all_given_back,
    assert_nothing_held,
    complete_copies_until,
    config_of,
    finish_copies,
    granted,
    prompt,
    turns,
    until,
)

ROOT: Final = Path(__file__).resolve().parents[2]
BLOCK_BYTES: Final = 4096


@pytest.fixture(autouse=True)
def _no_span_is_touched_after_its_end(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The SDK ends a span once whoever asks, and logs that it was asked again."""
    yield
    assert not [record.message for record in caplog.get_records("call") if record.name.startswith("opentelemetry")]


@final
class Ledger(SpanProcessor):
    """Counts, per span, how often it was begun and ended."""

    def __init__(self) -> None:
        self.begun: Counter[int] = Counter()
        self.ended: Counter[int] = Counter()

    def on_start(self, span: Span, parent_context: object = None) -> None:
        self.begun[span.context.span_id] += 1

    def on_end(self, span: ReadableSpan) -> None:
        self.ended[span.context.span_id] += 1

    def assert_balanced(self) -> None:
        assert self.begun == self.ended
        assert set(self.ended.values()) <= {1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced(Case):
    """A runtime whose spans are kept."""

    provider: TracerProvider
    exporter: InMemorySpanExporter
    ledger: Ledger

    def spans(self, name: str) -> list[ReadableSpan]:
        """Those of this name that have ended, in the order of their ends."""
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def span(self, name: str = "aiokv.acquire") -> ReadableSpan:
        """The only one."""
        (span,) = self.spans(name)
        return span


@asynccontextmanager
async def traced(
    *, provider: TracerProvider | None = None, gpu_blocks: int = 9, manual: bool = True, close_grace_s: float = 30.0
) -> AsyncIterator[Traced]:
    """A runtime over the fake backend that is given a provider; closed afterwards, what still runs completed first."""
    provider = provider or TracerProvider(shutdown_on_exit=False)
    exporter, ledger = InMemorySpanExporter(), Ledger()
    provider.add_span_processor(ledger)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    backend = FakeBackend(manual=manual, block_bytes=BLOCK_BYTES)
    config = config_of(
        backend=backend, gpu_blocks=gpu_blocks, cpu_blocks=16, watermark=0.0, tracer_provider=provider,
        close_grace_s=close_grace_s,
    )  # fmt: skip
    async with KVRuntime(config) as kv:
        case = Traced(kv=kv, backend=backend, provider=provider, exporter=exporter, ledger=ledger)
        yield case
        await complete_copies_until(case, asyncio.ensure_future(kv.aclose()))
    ledger.assert_balanced()


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def event_names(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return span.parent is not None and span.parent.span_id == parent.context.span_id


# Admissions.


async def test_acquire_is_a_child_of_the_callers_span_and_says_where_its_tokens_come_from() -> None:
    async with traced() as case:
        make_resident(case.kv, prompt(3), {GROUP: "gc-"})
        with case.provider.get_tracer("host").start_as_current_span("request"):
            acquiring = asyncio.create_task(case.kv.acquire("req-1", prompt(3)))
        await until(lambda: len(case.backend.pending) == 1)
        case.backend.complete_all()
        (await acquiring).finish()
        await finish_copies(case)
        span = case.span()
        assert is_child(span, case.span("request"))
        assert attributes_of(span) == {
            "aiokv.request_id": "req-1",
            "aiokv.outcome": "ready",
            "aiokv.prompt_tokens": 3 * BLOCK + 1,
            "aiokv.gpu_tokens": BLOCK,
            "aiokv.cpu_tokens": BLOCK,
            "aiokv.compute_tokens": BLOCK + 1,
        }
        assert event_names(span) == ["granted"]
        assert span.kind is SpanKind.INTERNAL
        assert span.status.status_code is StatusCode.UNSET


async def test_span_is_not_the_current_one_of_who_holds_the_lease() -> None:
    async with traced() as case:
        tracer = case.provider.get_tracer("host")
        with tracer.start_as_current_span("request"):
            async with case.kv.acquire("req-1", prompt(1)):
                tracer.start_span("forward").end()
        assert is_child(case.span("forward"), case.span("request"))


async def test_load_and_store_are_below_the_admission_that_they_are_for() -> None:
    async with traced() as case:
        make_resident(case.kv, prompt(3), {GROUP: "cc-"})
        lease = await case.kv.admit("req-1", prompt(3))
        case.backend.complete_all()
        await lease.ready()
        lease.confirm(3 * BLOCK)
        lease.finish()
        await finish_copies(case)
        load, store, acquire = case.span("aiokv.load"), case.span("aiokv.store"), case.span()
        assert is_child(load, acquire)
        assert is_child(store, acquire)
        waited = attributes_of(load).pop("aiokv.queued_s")
        assert waited >= 0
        assert attributes_of(load) | {"aiokv.queued_s": 0} == {
            "aiokv.blocks": 2, "aiokv.bytes": 2 * BLOCK_BYTES, "aiokv.outcome": "ok", "aiokv.queued_s": 0,
        }  # fmt: skip
        assert attributes_of(store)["aiokv.blocks"] == 1
        assert attributes_of(acquire)["aiokv.outcome"] == "granted"
        assert load.start_time is not None
        assert load.end_time is not None
        assert load.start_time <= load.end_time


async def test_spans_hold_no_tokens_no_hashes_and_no_salts() -> None:
    async with traced() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"}, salt="a secret")
        lease = granted(case.kv, prompt(2), salt="a secret", adapter="an adapter")
        lease.confirm(2 * BLOCK) if lease.prefix_tokens else None
        lease.release()
        await finish_copies(case)
        written = [str(span.to_json()) for span in case.exporter.get_finished_spans()]
        assert written
        for text in written:
            assert "secret" not in text
            assert "adapter" not in text
            assert str(prompt(2)[0]) not in text


async def test_waiting_for_room_is_told_by_events() -> None:
    async with traced() as case:
        holding = granted(case.kv, prompt(8, extra=0), name="holding")
        waiting = asyncio.create_task(case.kv.acquire("waiting", prompt(2, seed=1)))
        await turns(5)
        holding.release()
        (await waiting).release()
        span = case.spans("aiokv.acquire")[-1]
        assert event_names(span) == ["deferred", "granted"]
        assert dict(span.events[0].attributes or {}) == {"aiokv.reason": "capacity"}


async def test_one_reason_to_wait_is_told_once_however_often_it_is_tried() -> None:
    async with traced() as case:
        holding = [granted(case.kv, prompt(1, seed=seed, extra=0), name=f"holding {seed}") for seed in range(8)]
        waiting = asyncio.create_task(case.kv.acquire("waiting", prompt(7, seed=20)))
        for lease in holding:
            await turns(3)
            lease.release()
        (await waiting).release()
        assert event_names(case.spans("aiokv.acquire")[-1]) == ["deferred", "granted"]


async def test_joined_load_is_linked_to_the_others_who_wait_for_it() -> None:
    async with traced() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        leases = [await case.kv.admit(f"req-{number}", prompt(2)) for number in range(3)]
        case.backend.complete_all()
        for lease in leases:
            await lease.ready()
            lease.release()
        load = case.span("aiokv.load")
        owner, *others = case.spans("aiokv.acquire")
        assert is_child(load, owner)
        assert [link.context.span_id for link in load.links] == [span.context.span_id for span in others]


async def test_a_load_that_many_wait_for_is_linked_to_the_first_of_them() -> None:
    async with traced(gpu_blocks=64) as case:
        make_resident(case.kv, prompt(1), {GROUP: "c"})
        leases = [granted(case.kv, prompt(1), name=f"req-{number}") for number in range(40)]
        await until(lambda: len(case.backend.pending) == 1)
        case.backend.complete_all()
        await turns(3)
        for lease in leases:
            lease.release()
        _, *others = case.spans("aiokv.acquire")
        linked = [link.context.span_id for link in case.span("aiokv.load").links]
        assert linked == [span.context.span_id for span in others[:32]]


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_the_place_of_a_lease_is_forgotten_after_thousands_of_others() -> None:
    """What is remembered does not grow with the requests that have been served."""
    asyncio.get_running_loop().set_debug(False)
    async with traced(manual=False) as case:
        old, recent = granted(case.kv, prompt(1, seed=1)), None
        for _ in range(4096):
            if recent is not None:
                recent.release()
            recent = granted(case.kv, prompt(1, seed=2))
        assert recent is not None
        for lease in (old, recent):
            lease.confirm(BLOCK)
            lease.finish()
            await case.kv.drain()
        first, second = case.spans("aiokv.store")
        assert first.parent is None
        assert second.parent is not None


async def test_timeout_in_line_is_an_error_with_its_prompt() -> None:
    async with traced() as case:
        holding = granted(case.kv, prompt(8, extra=0), name="holding")
        with pytest.raises(AcquireTimeout):
            await case.kv.acquire("waiting", prompt(2, seed=1), timeout=0.01)
        holding.release()
        span = case.spans("aiokv.acquire")[-1]
        assert attributes_of(span) == {
            "aiokv.request_id": "waiting", "aiokv.prompt_tokens": 2 * BLOCK + 1, "aiokv.outcome": "timeout",
            "error.type": "AcquireTimeout",
        }  # fmt: skip
        assert span.status.status_code is StatusCode.ERROR


async def test_request_that_can_never_fit_is_an_error() -> None:
    async with traced() as case:
        with pytest.raises(CapacityError):
            await case.kv.acquire("large", prompt(100))
        assert attributes_of(case.span())["error.type"] == "CapacityError"


async def test_cancelled_request_is_no_error_and_its_load_ends_well_afterwards() -> None:
    """Law 4: the copy goes on, and so does its span."""
    async with traced() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        acquiring = asyncio.create_task(case.kv.acquire("req-1", prompt(2)))
        await until(lambda: len(case.backend.pending) == 1)
        acquiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquiring
        assert attributes_of(case.span())["aiokv.outcome"] == "cancelled"
        assert case.span().status.status_code is StatusCode.UNSET
        assert not case.spans("aiokv.load")
        await finish_copies(case)
        assert attributes_of(case.span("aiokv.load"))["aiokv.outcome"] == "ok"


async def test_polling_is_traced_when_it_is_granted_and_not_at_each_look() -> None:
    async with traced() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        holding = granted(case.kv, prompt(7, seed=3, extra=0), name="holding")
        for _ in range(20):
            assert isinstance(case.kv.try_acquire("polling", prompt(2)), Deferred)
        holding.release()
        with case.provider.get_tracer("host").start_as_current_span("step"):
            lease = granted(case.kv, prompt(2), name="polling")
        await finish_copies(case)
        lease.release()
        first, second = case.spans("aiokv.acquire")
        assert attributes_of(first)["aiokv.request_id"] == "holding"
        assert attributes_of(second) == {
            "aiokv.request_id": "polling", "aiokv.outcome": "granted", "aiokv.prompt_tokens": 2 * BLOCK + 1,
            "aiokv.gpu_tokens": 0, "aiokv.cpu_tokens": 2 * BLOCK, "aiokv.compute_tokens": 1,
        }  # fmt: skip
        assert is_child(second, case.span("step"))
        assert is_child(case.span("aiokv.load"), case.span("step"))


async def test_resumption_and_fork_are_admissions() -> None:
    async with traced() as case:
        lease = granted(case.kv, prompt(2), name="first")
        lease.confirm(2 * BLOCK)
        fork = lease.try_fork("fork")
        assert isinstance(fork, Lease)
        fork.release()
        preempted = lease.preempt()
        resuming = asyncio.ensure_future(preempted.resume())
        await until(resuming.done)
        (await resuming).release()
        names = [attributes_of(span)["aiokv.request_id"] for span in case.spans("aiokv.acquire")]
        assert names == ["first", "fork", "first"]


async def test_resumption_that_is_polled_after_it_was_awaited_tells_the_ended_span_nothing() -> None:
    async with traced() as case:
        preempted = granted(case.kv, prompt(2), name="first").preempt()
        holding = granted(case.kv, prompt(8, seed=1, extra=0), name="holding")
        ahead = asyncio.create_task(case.kv.acquire("ahead", prompt(2, seed=2)))
        await turns(3)
        resuming = asyncio.ensure_future(preempted.resume())
        await turns(3)
        for task in (resuming, ahead):
            task.cancel()
            await asyncio.wait([task])
        assert isinstance(preempted.try_resume(), Deferred), "for another reason than while somebody was ahead"
        holding.release()
        resumed = preempted.try_resume()
        assert isinstance(resumed, Lease)
        resumed.release()
        spans = [span for span in case.spans("aiokv.acquire") if attributes_of(span)["aiokv.request_id"] == "first"]
        assert [attributes_of(span)["aiokv.outcome"] for span in spans] == ["granted", "cancelled", "granted"]
        assert [event_names(span) for span in spans] == [[], ["deferred"], []]


# Copies that do not end well.


async def test_failed_load_is_an_error_and_the_request_says_what_was_delivered() -> None:
    async with traced() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        acquiring = asyncio.create_task(case.kv.acquire("req-1", prompt(2)))
        await until(lambda: len(case.backend.pending) == 1)
        case.backend.fail()
        (await acquiring).release()
        load = case.span("aiokv.load")
        assert attributes_of(load)["aiokv.outcome"] == "error"
        assert load.status.status_code is StatusCode.ERROR
        assert attributes_of(case.span())["aiokv.compute_tokens"] == 2 * BLOCK + 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(CopyFailed(1, detail="no"), "error"), (BackendLost("fake", detail="no"), "error"), (OSError("no"), "lost")],
    ids=["refused", "lost", "foreign"],
)
async def test_transfer_that_the_backend_does_not_take_ends_its_span(error: Exception, outcome: str) -> None:
    async with traced() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        case.backend.fail_next_submit(error)
        lease = granted(case.kv, prompt(2))
        await lease.ready()
        lease.release()
        assert attributes_of(case.span("aiokv.load"))["aiokv.outcome"] == outcome


async def test_transfer_of_several_ranks_ends_with_the_last_report() -> None:
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    backend = FakeBackend(block_bytes=BLOCK_BYTES)
    config = config_of(backend=backend, tracer_provider=provider, world_size=3, remote_ranks=(1, 2))
    async with KVRuntime(config) as kv:
        make_resident(kv, prompt(2), {GROUP: "cc"})
        lease = granted(kv, prompt(2))
        (transfer,) = kv.transfers().take()
        backend.complete_all()
        kv.report(transfer.transfer_id, 1, Outcome.OK)
        await turns(3)
        assert [span.name for span in exporter.get_finished_spans()] == ["aiokv.acquire"]
        kv.report(transfer.transfer_id, 2, Outcome.FAILED)
        load = exporter.get_finished_spans()[-1]
        assert load.name == "aiokv.load"
        assert attributes_of(load)["aiokv.outcome"] == "error"
        lease.release()


async def test_stuck_copy_is_lost_when_the_runtime_closes_and_ends_once(caplog: pytest.LogCaptureFixture) -> None:
    async with traced(close_grace_s=0.0) as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        granted(case.kv, prompt(2)).release()
        assert len(case.backend.pending) == 1
        await case.kv.aclose()
        assert attributes_of(case.span("aiokv.load"))["aiokv.outcome"] == "lost"
        case.ledger.assert_balanced()
        case.backend.complete_all()
        await turns(3)
    assert "copies that never ended" in caplog.text


# Ends.


async def test_who_waits_while_the_runtime_closes_ends_once() -> None:
    async with traced() as case:
        holding = granted(case.kv, prompt(8, extra=0), name="holding")
        waiting = asyncio.create_task(case.kv.acquire("waiting", prompt(1, seed=1)))
        await turns(3)
        await case.kv.aclose()
        holding.release()
        with pytest.raises(UsageError):
            await waiting
        case.ledger.assert_balanced()


async def test_coroutine_that_is_closed_calls_no_tracer_and_its_span_ends_with_the_next_one() -> None:
    async with traced() as case:
        holding = granted(case.kv, prompt(8, extra=0), name="holding")
        call = case.kv.acquire("closed", prompt(1, seed=1))
        call.send(None)
        holding.release()
        ended = sum(case.ledger.ended.values())
        call.close()
        assert sum(case.ledger.ended.values()) == ended
        with pytest.raises(CapacityError):
            await case.kv.acquire("next", prompt(100))
        closed = next(span for span in case.spans("aiokv.acquire") if attributes_of(span)["aiokv.outcome"] == "closed")
        following = case.spans("aiokv.acquire")[-1]
        assert closed.end_time is not None
        assert following.start_time is not None
        assert closed.end_time <= following.start_time


async def test_span_of_a_coroutine_that_was_closed_ends_with_the_next_copy_as_of_its_close() -> None:
    async with traced() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        holding = granted(case.kv, prompt(7, seed=1, extra=0), name="holding")
        call = case.kv.acquire("closed", prompt(2, seed=2))
        call.send(None)
        call.close()
        closed_ns = time.time_ns()
        holding.release()
        following = granted(case.kv, prompt(2), name="next")
        await until(lambda: len(case.backend.pending) == 1)
        closed = next(span for span in case.spans("aiokv.acquire") if attributes_of(span)["aiokv.outcome"] == "closed")
        assert closed.end_time is not None
        assert closed.end_time <= closed_ns
        following.release()


async def test_granted_attempt_lasts_from_its_beginning() -> None:
    async with traced() as case:
        before = time.time_ns()
        granted(case.kv, prompt(2)).release()
        span = case.span()
        assert span.start_time is not None
        assert span.end_time is not None
        assert before <= span.start_time <= span.end_time <= time.time_ns()


def test_spans_of_a_loop_that_died_end_with_close() -> None:
    exporter, ledger, provider = InMemorySpanExporter(), Ledger(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(ledger)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    loop = asyncio.new_event_loop()
    config = config_of(backend=FakeBackend(), cpu_blocks=16, watermark=0.0, tracer_provider=provider)
    kv = KVRuntime(config)

    async def main() -> tuple[Lease, AcquireCall]:
        await kv.open()
        holding = granted(kv, prompt(8, extra=0), name="holding")
        call = kv.acquire("waiting", prompt(1, seed=1))
        call.send(None)
        return holding, call

    holding, call = loop.run_until_complete(main())
    loop.close()
    kv.close()
    ledger.assert_balanced()
    assert [attributes_of(span)["aiokv.outcome"] for span in exporter.get_finished_spans()] == ["granted", "closed"]
    call.close()
    holding.release()
    ledger.assert_balanced()


def test_loop_that_goes_on_after_close_ends_no_span_again() -> None:
    ledger, provider = Ledger(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(ledger)
    kv = KVRuntime(config_of(backend=FakeBackend(), cpu_blocks=16, watermark=0.0, tracer_provider=provider))

    async def main() -> tuple[Lease, asyncio.Task[Lease]]:
        await kv.open()
        holding = granted(kv, prompt(8, extra=0), name="holding")
        waiting = asyncio.create_task(kv.acquire("waiting", prompt(1, seed=1)))
        await turns(3)
        return holding, waiting

    async def find_error(waiting: asyncio.Task[Lease]) -> BaseException | None:
        await asyncio.wait([waiting])
        return waiting.exception()

    loop = asyncio.new_event_loop()
    holding, waiting = loop.run_until_complete(main())
    kv.close()
    ledger.assert_balanced()
    assert isinstance(loop.run_until_complete(find_error(waiting)), UsageError)
    holding.release()
    loop.close()
    ledger.assert_balanced()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
async def test_every_span_ends_wherever_an_acquire_is_ended_from_outside(way: Way) -> None:
    moment = 0
    is_struck = True
    while is_struck:
        moment += 1
        async with traced() as case:
            make_resident(case.kv, prompt(3), {GROUP: "cc-"})
            holding = granted(case.kv, prompt(5, seed=2, extra=0), name="holding")

            async def request() -> None:
                async with case.kv.acquire("req-1", prompt(3)):  # ends within its turn of this loop
                    pass

            run = Suspensions(request(), at=moment)
            ending = asyncio.ensure_future(way(run))
            await turns(3)
            holding.release()
            await turns(3)
            await complete_copies_until(case, ending)
            is_struck = run.struck
            await assert_all_given_back(case)
    assert moment > 2


async def test_storm_of_requests_ends_every_span_once() -> None:
    asyncio.get_running_loop().set_debug(False)
    dice = random.Random(7)
    async with traced(gpu_blocks=17) as case:
        for seed in range(3):
            make_resident(case.kv, prompt(5, seed=seed), {GROUP: "ccccc"})

        async def request(number: int) -> str:
            tokens = prompt(dice.randrange(1, 6), seed=dice.randrange(8))
            try:
                async with case.kv.acquire(f"req-{number}", tokens, timeout=dice.choice([None, 0.0, 1.0])) as lease:
                    await asyncio.sleep(0)
                    lease.confirm(len(tokens))
            except AcquireTimeout:
                return "timeout"
            return "ready"

        async def weather() -> None:
            while True:
                dice.choice([case.backend.complete, case.backend.complete, case.backend.fail])(dice.randrange(3))
                await asyncio.sleep(0)

        blowing = asyncio.create_task(weather())
        running = [asyncio.create_task(request(number)) for number in range(300)]
        for task in dice.sample(running, 60):
            await turns(dice.randrange(4))
            task.cancel()
        results = await asyncio.gather(*running, return_exceptions=True)
        blowing.cancel()
        await finish_copies(case)
        faults = [result for result in results if isinstance(result, Exception)]
        assert faults == []
        outcomes = Counter(attributes_of(span)["aiokv.outcome"] for span in case.spans("aiokv.acquire"))
        begun = sum(outcomes.values())
        assert outcomes["ready"] >= results.count("ready") > 100
        assert outcomes["cancelled"] > 5
        assert begun <= 300  # a task that is cancelled before its first step asks for nothing
        assert case.spans("aiokv.load")
        assert case.spans("aiokv.store")
        assert_nothing_held(case.kv)


# Tracers that fail, and none.


class Fault(Exception):
    """What an exporter might raise."""


class FaultySpan:
    """Raises at every call."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        raise Fault(name)


class FaultyProvider:
    """Gives a tracer whose spans cannot be begun, or whose spans raise at every call."""

    def __init__(self, *, begins: bool) -> None:
        self._begins = begins

    def get_tracer(self, *_: object) -> FaultyProvider:
        return self

    def start_span(self, *_: object, **__: object) -> FaultySpan:
        if not self._begins:
            raise Fault("start")
        return FaultySpan()


class FaultyProcessor(SpanProcessor):
    """Raises on the way to the exporter."""

    def on_end(self, span: ReadableSpan) -> None:
        raise Fault("export")


def broken_exporter() -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(FaultyProcessor())
    return provider


@pytest.mark.parametrize(
    "make_provider",
    [lambda: FaultyProvider(begins=False), lambda: FaultyProvider(begins=True), broken_exporter],
    ids=["start", "every call", "export"],
)
async def test_tracer_that_raises_costs_no_request_and_is_logged_once(
    make_provider: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    """Law 7."""
    backend = FakeBackend(manual=False)
    config = config_of(backend=backend, cpu_blocks=16, watermark=0.0, tracer_provider=make_provider())
    with caplog.at_level(logging.WARNING):
        async with KVRuntime(config) as kv:
            make_resident(kv, prompt(2), {GROUP: "cc"})
            for number in range(5):
                async with kv.acquire(f"req-{number}", prompt(2)) as lease:
                    assert lease.delivered.cpu_tokens + lease.delivered.gpu_tokens == 2 * BLOCK
            granted(kv, prompt(3)).finish()
            holding = granted(kv, prompt(8, extra=0, seed=1))
            with pytest.raises(AcquireTimeout):
                await kv.acquire("waiting", prompt(2), timeout=0.0)
            holding.release()
            await kv.drain()
            assert_nothing_held(kv)
    assert len([record for record in caplog.records if record.name == "aiokv.runtime.tracer_guard"]) == 1
    assert "Fault" in caplog.text


async def test_later_report_of_a_tracer_counts_what_has_failed_since_the_one_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("aiokv.runtime.tracer_guard.time", SimpleNamespace(monotonic=lambda: clock[0]))
    guard = await find_tracer(FaultyProvider(begins=False))
    assert guard is not None
    for now in (1000.0, 1001.0, 1059.0, 1061.0, 1062.0, 1125.0):
        clock[0] = now
        assert guard.start("span", {}) is None
    assert [words.split(" times")[0] for words in caplog.messages] == [
        f"the tracer has failed {count}" for count in (1, 3, 2)
    ]


@pytest.mark.parametrize("provider", ["globl", "", 7, object(), True])
def test_what_is_no_provider_is_refused(provider: object) -> None:
    with pytest.raises(ConfigError, match="tracer_provider"):
        config_of(tracer_provider=provider)


async def test_provider_that_gives_no_tracer_is_refused_at_opening() -> None:
    provider = SimpleNamespace(get_tracer=lambda *_: [][0])
    kv = KVRuntime(config_of(tracer_provider=provider))
    with pytest.raises(ConfigError, match="gives no tracer"):
        await kv.open()


async def test_spans_that_are_not_sampled_are_not_exported() -> None:
    async with traced(provider=TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)) as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        lease = await case.kv.admit("req-1", prompt(2))
        case.backend.complete_all()
        await lease.ready()
        lease.release()
        assert case.exporter.get_finished_spans() == ()


@pytest.mark.parametrize("provider", [None, "global", NoOpTracerProvider()], ids=["none", "global", "no-op"])
async def test_without_anybody_who_takes_spans_there_is_no_tracer(provider: object) -> None:
    assert await find_tracer(provider) is None


async def test_who_is_not_traced_runs_nothing_of_tracing() -> None:
    called: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and Path(frame.f_code.co_filename).name in ("tracing.py", "tracer_guard.py"):
            called.append(frame.f_code.co_qualname)

    async def serve(kv: KVRuntime) -> None:
        make_resident(kv, prompt(2), {GROUP: "cc"})
        async with kv.acquire("req-1", prompt(3)) as lease:
            lease.confirm(3 * BLOCK)
        granted(kv, prompt(3)).release()
        await kv.drain()

    for provider in (None, TracerProvider(shutdown_on_exit=False)):
        config = config_of(backend=FakeBackend(manual=False), cpu_blocks=16, tracer_provider=provider)
        async with KVRuntime(config) as kv:
            sys.setprofile(note)
            try:
                await serve(kv)
            finally:
                sys.setprofile(None)
        assert bool(called) == (provider is not None)


RUN: Final = """
import asyncio, sys
{before}
from aiokv import CacheGeometry, FullAttention, KVRuntime, RuntimeConfig
from aiokv.testing import FakeBackend
geometry = CacheGeometry(groups=(FullAttention("full", block_size=16),), hash_block_size=16)
config = RuntimeConfig(geometry=geometry, gpu_blocks=9, backend=FakeBackend(), tracer_provider={provider})
async def main():
    async with KVRuntime(config) as kv:
        async with kv.acquire("req-1", list(range(40))):
            pass
asyncio.run(main())
{after}
"""
SET_GLOBAL: Final = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
"""


def run_program(*, provider: str, before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN.format(provider=provider, before=before, after=after)],
        capture_output=True, text=True, timeout=55, check=False, env=environment,
    )  # fmt: skip


def test_global_provider_is_the_one_that_the_process_has_set() -> None:
    after = "print([span.name for span in exporter.get_finished_spans()])"
    done = run_program(provider="'global'", before=SET_GLOBAL, after=after)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['aiokv.acquire']\n"


def test_without_a_provider_opentelemetry_is_not_imported() -> None:
    done = run_program(provider="None", after="print('opentelemetry' in sys.modules)")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False\n"


def test_opentelemetry_that_is_asked_for_and_missing_says_how_to_install_it() -> None:
    done = run_program(provider="'global'", before="sys.modules['opentelemetry'] = None")
    assert done.returncode != 0
    assert "ConfigError: tracer_provider needs opentelemetry: pip install 'aiokv[tracing]'" in done.stderr
