"""Law 5 in the runtime: what reuses a slot waits for the fence of its last reader, a store for that of its writer."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from aiokv import (
    BackendLost,
    ConfigError,
    CopyFailed,
    Direction,
    InvalidTransition,
    KVRuntime,
    Lease,
    LeaseState,
    Outcome,
    UsageError,
)
from aiokv.runtime.fencing import RETRY_S
from aiokv.runtime.transfers import STREAM_DEPTH
from aiokv.testing import FakeBackend, make_resident
from aiokv.testing.fenced_backend import FencedBackend
from tests.runtime.support import BLOCK, GEOMETRY, GROUP, config_of, granted, prompt, turns, until

MAIN, SIDE = "main", "side"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A runtime over a backend with streams, and what an engine does with it."""

    kv: KVRuntime
    fake: FakeBackend
    backend: FencedBackend

    @property
    def violations(self) -> list[str]:
        return self.backend.order.violations

    @property
    def loads(self) -> list[tuple[Hashable, ...]]:
        """Per submitted load, the streams that it waits for."""
        return [streams for direction, streams in self.backend.waits if direction is Direction.LOAD]

    @property
    def stores(self) -> list[tuple[Hashable, ...]]:
        """The same of stores."""
        return [streams for direction, streams in self.backend.waits if direction is Direction.STORE]

    def compute(self, lease: Lease, *, stream: Hashable = MAIN, start: int = 0, stop: int | None = None) -> None:
        """Kernels read the prefix and write the blocks `[start, stop)`."""
        table = [slot for slot in lease.block_table(GROUP) if slot]
        self.backend.launch(stream, reads=table[:start], writes=table[start:stop])

    async def settle(self) -> None:
        """Complete copies until nothing is to be done."""
        drained = asyncio.ensure_future(self.kv.drain())
        while not drained.done():
            self.fake.complete_all()
            await asyncio.sleep(0)
        await drained


@asynccontextmanager
async def engine(
    *,
    gpu_blocks: int = 5,
    cpu_blocks: int = 16,
    compute_stream: object = MAIN,
    deaf_to: tuple[Direction, ...] = (),
) -> AsyncIterator[Engine]:
    """Four GPU slots and 16 CPU slots, unless told otherwise."""
    fake = FakeBackend()
    backend = FencedBackend(fake, deaf_to=deaf_to)
    config = config_of(
        backend=backend,
        gpu_blocks=gpu_blocks,
        cpu_blocks=cpu_blocks,
        watermark=0.0,
        compute_stream=compute_stream,
        geometry=GEOMETRY,
        close_grace_s=1.0,
    )
    async with KVRuntime(config) as kv:
        case = Engine(kv=kv, fake=fake, backend=backend)
        yield case
        await case.settle()


async def end_of_a_reader(case: Engine, end: Callable[[Lease], object]) -> None:
    """A lease fills the pool and its kernels still run when `end` ends it; then a load takes its slots."""
    make_resident(case.kv, prompt(3, seed=1), {GROUP: "ccc"})
    lease = granted(case.kv, prompt(3))
    case.compute(lease)
    end(lease)
    del lease
    gc.collect()
    await turns(3)
    loading = granted(case.kv, prompt(3, seed=1))
    await until(lambda: len(case.loads) == 1)
    await case.settle()
    await loading.ready()
    assert loading.prefix_tokens == 3 * BLOCK
    loading.release()


ENDS: dict[str, Callable[[Lease], object]] = {
    "release": lambda lease: lease.release(),
    "finish": lambda lease: lease.finish(),
    "preempt": lambda lease: lease.preempt(),
    "garbage": lambda lease: None,
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.filterwarnings("ignore:.*garbage collected.*:ResourceWarning")
async def test_a_load_waits_for_the_last_reader_of_its_targets(end: str) -> None:
    async with engine() as case:
        await end_of_a_reader(case, ENDS[end])
        assert case.loads == [(MAIN,)]
        assert not case.violations


async def test_without_the_fence_of_the_last_reader_a_load_overwrites_what_is_read() -> None:
    """The oracle sees it: so the test above can fail."""
    async with engine(deaf_to=(Direction.LOAD,)) as case:
        await end_of_a_reader(case, Lease.release)
        assert any("a load uses" in found for found in case.violations)


async def test_the_fence_that_is_given_stands_for_the_reader() -> None:
    async with engine() as case:
        make_resident(case.kv, prompt(3, seed=1), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        case.compute(lease, stream=SIDE)
        lease.release(after=case.kv.fence(SIDE))
        granted(case.kv, prompt(3, seed=1)).finish()
        await case.settle()
        assert case.loads in ([(SIDE,)], [])
        loading = granted(case.kv, prompt(3, seed=1))
        await until(lambda: len(case.loads) == 1)
        await case.settle()
        assert case.loads == [(SIDE,)]
        assert not case.violations
        loading.release()


async def store_behind_compute(case: Engine, *, stream: Hashable) -> None:
    lease = granted(case.kv, prompt(3))
    case.compute(lease, stream=stream)
    lease.confirm(3 * BLOCK, after=None if stream == MAIN else case.kv.fence(stream))
    await until(lambda: len(case.stores) > 0)
    assert case.stores == [(stream,)]
    await case.settle()
    lease.release()


@pytest.mark.parametrize("stream", [MAIN, SIDE])
async def test_a_store_waits_for_the_writer_of_its_source(stream: str) -> None:
    async with engine() as case:
        await store_behind_compute(case, stream=stream)
        assert not case.violations


async def test_without_the_fence_of_the_writer_a_store_reads_what_is_being_written() -> None:
    async with engine(deaf_to=(Direction.STORE,)) as case:
        await store_behind_compute(case, stream=MAIN)
        assert any("a store uses" in found for found in case.violations)


async def test_a_store_of_what_another_lease_has_hit_waits_for_who_wrote_it() -> None:
    """The copy was evicted while nobody held the block, and a hit stores it anew: no fence came with that."""
    async with engine() as case:
        lease = granted(case.kv, prompt(3))
        case.compute(lease)
        lease.confirm(3 * BLOCK)
        lease.release()
        hit = granted(case.kv, prompt(3))
        await until(lambda: len(case.stores) > 0)
        assert case.stores == [(MAIN,)]
        hit.release()
        assert not case.violations


async def test_a_fence_that_was_passed_is_not_waited_for() -> None:
    async with engine() as case:
        make_resident(case.kv, prompt(3, seed=1), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        case.compute(lease)
        lease.release()
        await turns(2)
        case.backend.advance(MAIN)
        fence = case.kv.fence()  # the backend is asked on the occasion
        assert fence is not None
        loading = granted(case.kv, prompt(3, seed=1))
        await until(lambda: len(case.loads) == 1)
        assert case.loads == [()]
        await case.settle()
        loading.release()
        assert not case.violations


async def test_fences_do_not_pile_up_while_the_stream_goes_on() -> None:
    async with engine(gpu_blocks=9) as case:
        lease = granted(case.kv, prompt(2), reserve_tokens=2 * BLOCK)
        most = 0
        for step in range(300):
            case.compute(lease)
            case.kv.fence()
            if step % 3 == 0:
                case.backend.advance(MAIN)
            most = max(most, len(case.kv.core.fences))
        assert most <= 10
        lease.release()


async def test_truncation_gives_slots_back_behind_a_fence() -> None:
    async with engine(gpu_blocks=7) as case:
        make_resident(case.kv, prompt(1, seed=1), {GROUP: "c"})
        lease = granted(case.kv, prompt(1), reserve_tokens=2 * BLOCK)
        lease.append(range(2 * BLOCK))
        case.compute(lease)
        lease.confirm(3 * BLOCK)
        await case.settle()
        case.compute(lease, start=4)  # reads all of it
        assert lease.truncate(BLOCK) == BLOCK
        other = granted(case.kv, prompt(1, seed=1))  # there are no other slots than the two that were given back
        await until(lambda: len(case.loads) == 1)
        assert case.loads == [(MAIN,)]
        await case.settle()
        other.release()
        lease.release()
        assert not case.violations


async def test_what_is_written_again_after_a_truncation_waits_for_who_read_it() -> None:
    """The block stays in the table, so nobody gives it back: another stream must still not overtake its reader."""
    async with engine() as case:
        lease = granted(case.kv, prompt(1, extra=0), reserve_tokens=BLOCK)
        await lease.ready()
        lease.wait_on(SIDE)
        case.compute(lease, stop=1)
        lease.confirm(BLOCK // 2, after=case.kv.fence(MAIN))
        lease.wait_on(SIDE)
        case.compute(lease, stream=SIDE, start=1, stop=1)
        assert lease.truncate(BLOCK // 4) == BLOCK // 4
        lease.wait_on(MAIN)
        case.compute(lease, stop=1)
        assert case.violations == []
        lease.release()


# wait_on.


async def test_a_stream_waits_for_loads_on_the_device() -> None:
    async with engine() as case:
        make_resident(case.kv, prompt(3, seed=1), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3, seed=1))
        assert lease.state is LeaseState.LOADING
        lease.wait_on(MAIN)
        case.compute(lease, start=3)
        assert lease.state is LeaseState.LOADING, "nobody has waited on the host"
        assert not case.violations
        await case.settle()
        lease.release()
        assert not case.violations


async def test_a_stream_that_does_not_wait_reads_what_is_not_there_yet() -> None:
    async with engine() as case:
        make_resident(case.kv, prompt(3, seed=1), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3, seed=1))
        lease.block_table(GROUP)
        case.compute(lease, start=3)
        assert case.violations
        await case.settle()
        lease.release()


async def test_compute_on_another_stream_waits_for_the_last_reader() -> None:
    async with engine() as case:
        lease = granted(case.kv, prompt(3))
        case.compute(lease)
        lease.release()
        other = granted(case.kv, prompt(3, seed=1))
        other.wait_on(SIDE)
        case.compute(other, stream=SIDE)
        assert not case.violations
        other.release()


async def test_a_hit_is_read_behind_its_writer_on_another_stream() -> None:
    async with engine(gpu_blocks=7) as case:
        lease = granted(case.kv, prompt(3))
        case.compute(lease)
        lease.confirm(3 * BLOCK)
        other = granted(case.kv, prompt(3), name="other")
        assert other.hit.gpu_tokens == 3 * BLOCK
        other.wait_on(SIDE)
        case.compute(other, stream=SIDE, start=3)
        assert not case.violations
        other.release()
        lease.release()


async def test_a_lease_that_was_waited_for_ends_behind_that_stream_too() -> None:
    """Its kernels run on a stream that is not the configured one, and nobody says so at its end."""
    async with engine() as case:
        make_resident(case.kv, prompt(3, seed=1), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        lease.wait_on(SIDE)
        case.compute(lease, stream=SIDE)
        lease.release()
        loading = granted(case.kv, prompt(3, seed=1))
        await until(lambda: len(case.loads) == 1)
        assert SIDE in case.loads[0]
        await case.settle()
        loading.release()
        assert not case.violations


async def test_a_failed_load_gives_its_targets_back_behind_whoever_waited_for_it() -> None:
    """Kernels that wait for the load run all the same, on slots that the lease has lost by then."""
    async with engine() as case:
        make_resident(case.kv, prompt(3, seed=1), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3, seed=1))
        lease.wait_on(SIDE)
        case.compute(lease, stream=SIDE, start=3)
        case.fake.fail(direction="load")
        await until(lambda: lease.state is LeaseState.READY)
        assert lease.prefix_tokens == 0
        lease.wait_on(MAIN)
        case.compute(lease, stream=MAIN)
        lease.release()
        await case.settle()
        assert not case.violations


@asynccontextmanager
async def with_full_stream() -> AsyncIterator[tuple[Engine, Lease]]:
    """As many loads run as a stream takes; that of the lease waits for room, behind another one."""
    async with engine(gpu_blocks=2 * STREAM_DEPTH + 8, cpu_blocks=STREAM_DEPTH + 2) as case:
        prompts = [prompt(1, seed=seed) for seed in range(STREAM_DEPTH + 2)]
        for token_ids in prompts:
            make_resident(case.kv, token_ids, {GROUP: "c"})
        leases = [granted(case.kv, token_ids) for token_ids in prompts]
        await turns(3)
        assert len(case.loads) == STREAM_DEPTH
        yield case, leases[-1]
        await case.settle()
        for lease in leases:
            await lease.ready()
            lease.release()
        assert not case.violations


async def test_wait_on_hands_over_a_load_that_waits_for_room_before_all_others() -> None:
    async with with_full_stream() as (case, lease):
        lease.wait_on(MAIN)
        assert len(case.loads) == STREAM_DEPTH + 1
        case.compute(lease, start=1)
        assert not case.violations


async def test_wait_on_goes_on_with_a_new_plan_where_the_backend_refuses_the_load() -> None:
    async with with_full_stream() as (case, lease):
        case.fake.fail_next_submit(CopyFailed(1, detail="a test wanted it"))
        lease.wait_on(MAIN)
        assert (lease.state, lease.prefix_tokens) == (LeaseState.READY, 0)
        case.compute(lease)


async def test_wait_on_is_refused_while_a_lease_waits_to_be_planned_again() -> None:
    async with engine() as case:
        make_resident(case.kv, prompt(2, seed=1), {GROUP: "cc"})
        leases = [granted(case.kv, prompt(2, seed=1)) for _ in range(2)]
        await until(lambda: len(case.loads) == 1)
        case.fake.fail(direction="load")
        await until(lambda: any(lease.state is LeaseState.HELD for lease in leases))
        (held,) = (lease for lease in leases if lease.state is LeaseState.HELD)
        with pytest.raises(InvalidTransition, match="planned again"):
            held.wait_on(MAIN)
        for lease in leases:
            lease.release()


# Where there are no streams, and where there must be one.


async def test_a_backend_with_streams_needs_the_engines() -> None:
    backend = FencedBackend(FakeBackend())
    with pytest.raises(ConfigError, match="compute_stream"):
        await KVRuntime(config_of(backend=backend)).open()
    assert backend.waits == []


async def test_what_is_no_stream_is_refused_before_anything_runs() -> None:
    """Leases would end behind a fence that cannot be had, and nothing would ever be copied."""
    backend = FencedBackend(FakeBackend())
    kv = KVRuntime(config_of(backend=backend, compute_stream=[1], close_grace_s=1.0))
    with pytest.raises(ConfigError, match="compute_stream"):
        await kv.open()
    with pytest.raises(UsageError, match="clos"):
        kv.try_acquire("request", prompt(1))


async def test_a_lease_is_not_waited_for_by_what_is_no_stream() -> None:
    async with engine() as case:
        lease = granted(case.kv, prompt(3))
        for thing in (None, [1]):
            with pytest.raises(UsageError, match="no stream"):
                lease.wait_on(thing)
        case.backend.capturing.add(SIDE)
        with pytest.raises(UsageError, match="captured"):
            lease.wait_on(SIDE)
        lease.release()
        make_resident(case.kv, prompt(3, seed=1), {GROUP: "ccc"})
        loading = granted(case.kv, prompt(3, seed=1))
        await case.settle()
        assert loading.state is LeaseState.READY
        loading.release()


async def test_a_callable_says_which_stream_it_is_now() -> None:
    streams = [SIDE]
    async with engine(compute_stream=lambda: streams[-1]) as case:
        make_resident(case.kv, prompt(3, seed=1), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        streams.append("now")
        case.compute(lease, stream="now")
        lease.release()
        loading = granted(case.kv, prompt(3, seed=1))
        await until(lambda: len(case.loads) == 1)
        assert case.loads == [("now",)]
        await case.settle()
        loading.release()


async def test_an_exit_survives_a_callable_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[str] = [MAIN, MAIN]

    def current() -> str:
        return answers.pop()

    async with engine(compute_stream=current) as case:
        first, second = granted(case.kv, prompt(1)), granted(case.kv, prompt(1, seed=1))
        first.release()
        second.release()
        assert "compute_stream() failed" in caplog.text
        assert case.kv.audit().leases == ()
        answers += [MAIN] * 3


async def test_without_streams_there_is_no_fence_and_nothing_is_kept() -> None:
    async with KVRuntime(config_of(backend=FakeBackend(manual=False))) as kv:
        assert kv.fence() is kv.fence(MAIN) is None
        lease = granted(kv, prompt(2))
        lease.wait_on(MAIN)
        lease.confirm(2 * BLOCK, after=kv.fence())
        lease.release(after=kv.fence())
        assert len(kv.core.fences) == 0


async def test_without_streams_none_can_wait_for_a_load() -> None:
    """It would read what is not there yet: better say so."""
    fake = FakeBackend()
    async with KVRuntime(config_of(backend=fake)) as kv:
        make_resident(kv, prompt(2), {GROUP: "cc"})
        lease = granted(kv, prompt(2))
        with pytest.raises(InvalidTransition, match="ready"):
            lease.wait_on(MAIN)
        fake.complete_all()
        await lease.ready()
        lease.wait_on(MAIN)
        lease.release()


# What is no fence.


async def test_what_is_no_fence_of_this_runtime_is_refused_and_changes_nothing() -> None:
    async with engine() as case, engine() as other:
        lease = granted(case.kv, prompt(2))
        before = case.kv.snapshot()
        for fence in (object(), "main", 0, other.kv.fence()):
            for use in (
                lambda fence: lease.confirm(BLOCK, after=fence),
                lambda fence: lease.release(after=fence),
                lambda fence: lease.finish(after=fence),
                lambda fence: lease.preempt(after=fence),
            ):
                with pytest.raises(UsageError, match="fence"):
                    use(fence)
        assert case.kv.snapshot() == before
        lease.release()


async def test_a_fence_on_a_stream_that_is_captured_is_refused() -> None:
    async with engine() as case:
        case.backend.capturing.add(SIDE)
        with pytest.raises(UsageError, match="captured"):
            case.kv.fence(SIDE)
        assert case.kv.fence(MAIN) is not None


async def test_no_fence_of_a_closed_runtime() -> None:
    async with engine() as case:
        kv = case.kv
    with pytest.raises(UsageError, match="closed"):
        kv.fence(MAIN)


async def test_fences_are_in_the_order_in_which_they_were_made() -> None:
    async with engine() as case:
        fences = [case.kv.fence(stream) for stream in (MAIN, SIDE, MAIN)]
        numbers = [fence.number for fence in fences if fence is not None]
        assert len(numbers) == 3
        assert numbers == sorted(set(numbers))


async def test_an_exit_during_a_capture_is_fenced_when_that_is_over() -> None:
    """Nothing is copied until the fence could be recorded; the exit itself does not fail."""
    async with engine() as case:
        make_resident(case.kv, prompt(3, seed=1), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        case.compute(lease)
        case.backend.capturing.add(MAIN)
        lease.release()
        loading = granted(case.kv, prompt(3, seed=1))
        await asyncio.sleep(3 * RETRY_S)
        assert case.loads == []
        case.backend.capturing.clear()
        for _ in range(100):
            await asyncio.sleep(RETRY_S)
        assert case.loads == [(MAIN,)]
        await case.settle()
        loading.release()
        assert not case.violations


async def test_a_backend_that_cannot_record_a_fence_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    async with engine() as case:
        make_resident(case.kv, prompt(3, seed=1), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3))
        case.compute(lease)
        case.backend.fault = BackendLost("fenced", detail="a test wanted it")
        lease.release()
        await turns(2)
        assert "the backend is lost" in caplog.text
        again = granted(case.kv, prompt(3, seed=1))
        assert again.hit.cpu_tokens == 0, "no load may overtake the reader"
        again.release()
        assert case.kv.audit().leases == ()
        assert case.loads == []


# quiesce.


async def test_nothing_of_the_backend_is_called_inside_quiesce() -> None:
    """Leases end, confirm, are collected and read meanwhile; afterwards all of it is ordered as it must be."""
    async with engine(gpu_blocks=13) as case:
        make_resident(case.kv, prompt(2, seed=1), {GROUP: "cc"})
        loading = granted(case.kv, prompt(2, seed=1))
        loading.wait_on(MAIN)
        lease, other = granted(case.kv, prompt(2)), granted(case.kv, prompt(2, seed=2))
        for each in (lease, other):
            case.compute(each)
        await until(lambda: len(case.loads) == 1)
        async with case.kv.quiesce():
            before = case.backend.calls
            case.fake.complete_all()
            lease.confirm(2 * BLOCK)
            lease.finish()
            other.release()
            loading.release()
            for stream in (None, MAIN):
                with pytest.raises(UsageError, match="quiesce"):
                    case.kv.fence(stream)
            assert not isinstance(case.kv.try_acquire("late", prompt(2, seed=3)), Lease)
            await turns(20)
            assert case.backend.calls == before
        await case.settle()
        assert case.stores == [(MAIN,)]
        assert not case.violations


async def test_wait_on_is_refused_inside_quiesce() -> None:
    async with engine() as case:
        lease = granted(case.kv, prompt(2))
        async with case.kv.quiesce():
            before = case.backend.calls
            with pytest.raises(UsageError, match="quiesce"):
                lease.wait_on(MAIN)
            assert case.backend.calls == before
        lease.wait_on(MAIN)
        lease.release()


async def test_a_rank_that_reports_inside_quiesce_makes_room_for_no_copy() -> None:
    fake = FakeBackend()
    backend = FencedBackend(fake)
    blocks = STREAM_DEPTH + 1
    config = config_of(
        backend=backend,
        compute_stream=MAIN,
        world_size=2,
        remote_ranks=(1,),
        cpu_blocks=blocks,
        gpu_blocks=2 * blocks + 1,
        watermark=0.0,
        close_grace_s=1.0,
    )
    async with KVRuntime(config) as kv:
        prompts = [prompt(1, seed=seed) for seed in range(blocks)]
        for token_ids in prompts:
            make_resident(kv, token_ids, {GROUP: "c"})
        leases = [granted(kv, token_ids) for token_ids in prompts]
        stream = kv.transfers()
        fake.complete_all()
        await turns(2 * blocks)
        first, *others = stream.take()
        async with kv.quiesce():
            before = backend.calls
            kv.report(first.transfer_id, 1, Outcome.OK)
            await turns(5)
            assert (backend.calls, len(backend.waits)) == (before, STREAM_DEPTH)
        await until(lambda: len(backend.waits) == blocks)
        fake.complete_all()
        for transfer in (*others, *stream.take()):
            kv.report(transfer.transfer_id, 1, Outcome.OK)
        for lease in leases:
            await lease.ready()
            lease.release()


async def test_what_ends_in_one_turn_is_fenced_at_once() -> None:
    """A step of an engine confirms many leases: a driver's call for each would hold the loop."""
    async with engine(gpu_blocks=2 * 64 + 1, cpu_blocks=0) as case:
        leases = [granted(case.kv, prompt(1, seed=seed)) for seed in range(64)]
        before = case.backend.calls
        for lease in leases:
            case.compute(lease)
            lease.confirm(BLOCK)
        await turns(2)
        assert 1 <= case.backend.calls - before <= 5
        for lease in leases:
            lease.release()
