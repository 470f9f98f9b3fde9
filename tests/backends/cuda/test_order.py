"""Copies and the engine's streams: fences, waits, captures; and that the caller's context is as before (law 5)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aiokv.backends.base import EventStatus
from aiokv.backends.cuda import CudaBackend
from aiokv.errors import UsageError
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch
from tests.backends.cuda.rig import Rig, Tensor, api, call
from tests.backends.support import GUARD_S, end_of, layout_of, load, store, wait_until
from tests.fakecuda import Kernel

BLOCK = 64


class Engine:
    """A tensor, its backend, and two streams of the engine on which kernels write and read blocks."""

    def __init__(self, rig: Rig) -> None:
        self.fake = rig.fake
        self.tensor: Tensor = rig.dense(8, BLOCK)
        self.backend: CudaBackend = rig.open({"full": [self.tensor]}, gpu_blocks=8)
        self.stream, self.other = rig.stream(), rig.stream()

    def fill(self, block: int, *, value: int, stream: int | None = None) -> None:
        kernel = Kernel(duration_us=300).fill(self.tensor.pointer + block * BLOCK, value=value, num_bytes=BLOCK)
        self.fake.launch(self.stream if stream is None else stream, kernel)

    def read(self, block: int, *, stream: int | None = None) -> Callable[[], list[bytes] | None]:
        kernel = Kernel(duration_us=300).read(self.tensor.pointer + block * BLOCK, num_bytes=BLOCK)
        return self.fake.launch(self.stream if stream is None else stream, kernel).result


@pytest.fixture
def engine(watched_rig: Rig) -> Engine:
    return Engine(watched_rig)


def behind(batch: CopyBatch, after: object) -> CopyBatch:
    return CopyBatch(
        direction=batch.direction,
        group=batch.group,
        source_blocks=batch.source_blocks,
        target_blocks=batch.target_blocks,
        after=after,
    )


def test_a_store_waits_for_the_kernels_before_its_fence(engine: Engine) -> None:
    engine.fill(1, value=5)
    event = engine.backend.submit(behind(store({1: 3}), engine.backend.fence(engine.stream)))
    assert end_of(event) is EventStatus.DONE
    assert set(engine.backend.cpu_slot(3).tolist()) == {5}


def test_without_its_fence_a_store_is_seen_to_race(rig: Rig) -> None:
    """That the judge judges: what the test before asserts is not so by luck."""
    rig.fake.adversaries()
    engine = Engine(rig)
    rig.fake.hold()
    engine.fill(1, value=5)
    engine.backend.submit(store({1: 3}))
    assert rig.fake.violations()


def test_a_load_waits_for_the_last_reader_of_its_target(engine: Engine) -> None:
    engine.backend.cpu_slot(3)[:] = 9
    before = engine.tensor.blocks()[2]
    read = engine.read(2)
    event = engine.backend.submit(behind(load({3: 2}), engine.backend.fence(engine.stream)))
    assert end_of(event) is EventStatus.DONE
    assert read() == [before]
    assert engine.tensor.blocks()[2] == bytes([9]) * BLOCK


def test_a_batch_waits_for_all_its_fences(engine: Engine) -> None:
    engine.fill(1, value=5)
    engine.fill(2, value=6, stream=engine.other)
    fences = engine.backend.fence(engine.stream), None, engine.backend.fence(engine.other)
    event = engine.backend.submit(behind(store({1: 3, 2: 4}), fences))
    assert end_of(event) is EventStatus.DONE
    assert {engine.backend.cpu_slot(3)[0], engine.backend.cpu_slot(4)[0]} == {5, 6}


def test_a_fence_is_of_what_was_launched_before_it(engine: Engine) -> None:
    fence = engine.backend.fence(engine.stream)
    engine.fake.hold(engine.stream)
    engine.fill(1, value=5)
    assert engine.backend.fence_done(fence)
    later = engine.backend.fence(engine.stream)
    assert not engine.backend.fence_done(later)
    assert end_of(engine.backend.submit(behind(store({2: 3}), fence))) is EventStatus.DONE
    held = engine.backend.submit(behind(store({3: 4}), later))
    assert held.query() is EventStatus.PENDING
    engine.fake.release(engine.stream)
    assert end_of(held) is EventStatus.DONE
    assert engine.backend.fence_done(later)


def test_events_of_fences_are_used_again(engine: Engine) -> None:
    engine.backend.fence(engine.stream)
    made = engine.fake.calls("cuEventCreate")
    for _ in range(100):
        engine.backend.fence(engine.stream)
    assert engine.fake.calls("cuEventCreate") == made


def test_a_fence_that_was_let_go_is_still_waited_for(engine: Engine) -> None:
    engine.fake.hold(engine.stream)
    engine.fill(1, value=5)
    event = engine.backend.submit(behind(store({1: 3}), engine.backend.fence(engine.stream)))
    engine.backend.fence(engine.other)
    assert event.query() is EventStatus.PENDING
    engine.fake.release(engine.stream)
    assert end_of(event) is EventStatus.DONE
    assert set(engine.backend.cpu_slot(3).tolist()) == {5}


def test_a_stream_waits_for_a_load_on_the_device(engine: Engine) -> None:
    engine.backend.cpu_slot(3)[:] = 9
    engine.fake.hold(engine.backend.stream_of(Direction.LOAD))
    event = engine.backend.submit(load({3: 2}))
    engine.backend.wait(engine.stream, event)
    read = engine.read(2)
    engine.fake.release(engine.backend.stream_of(Direction.LOAD))
    wait_until(lambda: read() is not None)
    assert read() == [bytes([9]) * BLOCK]
    assert end_of(event) is EventStatus.DONE


def test_a_stream_waits_for_a_load_that_has_ended_at_once(engine: Engine) -> None:
    event = engine.backend.submit(load({3: 2}))
    assert end_of(event) is EventStatus.DONE
    engine.backend.wait(engine.stream, event)
    read = engine.read(2)
    wait_until(lambda: read() is not None)


def test_a_stream_waits_for_all_pieces_of_a_long_load(watched_rig: Rig) -> None:
    layers = [watched_rig.dense(512, 4, seed=seed) for seed in range(40)]
    backend, stream = watched_rig.open({"full": layers}, gpu_blocks=512, cpu_blocks=512), watched_rig.stream()
    for slot in range(512):
        backend.cpu_slot(slot)[:] = slot % 251
    event = backend.submit(load({slot: slot for slot in range(512)}))
    backend.wait(stream, event)
    read = watched_rig.fake.launch(stream, Kernel().read(layers[-1].pointer, num_bytes=512 * 4)).result
    wait_until(lambda: read() is not None)
    assert read() == [bytes(slot % 251 for slot in range(512) for _ in range(4))]
    assert end_of(event) is EventStatus.DONE


def test_a_stream_cannot_wait_for_what_cannot_be_handed_over(watched_rig: Rig) -> None:
    engine = Engine(watched_rig)
    engine.fake.hold()
    events = [engine.backend.submit(store({1: 3})) for _ in range(400)]
    with pytest.raises(UsageError, match="have not begun"):
        engine.backend.wait(engine.stream, events[-1])
    engine.backend.wait(engine.stream, events[0])
    engine.fake.release()
    assert end_of(events[-1]) is EventStatus.DONE


def test_a_stream_waits_for_another_by_a_fence(engine: Engine) -> None:
    engine.fake.hold(engine.other)
    engine.fill(1, value=5, stream=engine.other)
    engine.backend.wait(engine.stream, engine.backend.fence(engine.other))
    read = engine.read(1)
    assert read() is None
    engine.fake.release(engine.other)
    wait_until(lambda: read() is not None)
    assert read() == [bytes([5]) * BLOCK]


@pytest.mark.parametrize("after", ["fence", 5, object()])
def test_what_is_no_fence_is_refused_and_nothing_is_started(engine: Engine, after: object) -> None:
    with pytest.raises(UsageError, match="no fence"):
        engine.backend.submit(behind(store({1: 3}), after))
    with pytest.raises(UsageError, match="no fence"):
        engine.backend.submit(behind(store({1: 3}), (None, after)))
    with pytest.raises(UsageError, match="no fence"):
        engine.backend.wait(engine.stream, after)
    with pytest.raises(UsageError, match="no fence"):
        engine.backend.fence_done(after)
    assert engine.fake.inflight() == 0


def test_a_fence_of_another_backend_is_refused(watched_rig: Rig) -> None:
    one, other = Engine(watched_rig), Engine(watched_rig)
    with pytest.raises(UsageError, match="no fence"):
        one.backend.submit(behind(store({1: 3}), other.backend.fence(other.stream)))


def test_a_stream_that_is_captured_gets_no_fence_and_its_capture_goes_on(engine: Engine) -> None:
    event = engine.backend.submit(store({1: 3}))
    fence = engine.backend.fence(engine.other)
    engine.fake.begin_capture(engine.stream)
    for refused in (
        lambda: engine.backend.fence(engine.stream),
        lambda: engine.backend.wait(engine.stream, event),
        lambda: engine.backend.wait(engine.stream, fence),
    ):
        with pytest.raises(UsageError, match="captured"):
            refused()
    engine.fake.end_capture(engine.stream)
    assert end_of(event) is EventStatus.DONE
    assert isinstance(engine.backend.fence(engine.stream), object)


def test_copies_and_their_events_leave_a_global_capture_whole(engine: Engine) -> None:
    """What `cuThreadExchangeStreamCaptureMode` is for: an unguarded query would break the engine's capture."""
    fence = engine.backend.fence(engine.other)
    engine.fake.begin_capture(engine.stream, mode=0)
    stored = engine.backend.submit(behind(store({1: 3}), fence))
    assert end_of(stored) is EventStatus.DONE
    assert engine.backend.fence_done(engine.backend.fence(engine.other))
    engine.backend.wait(engine.other, stored)
    engine.fake.end_capture(engine.stream)


def test_a_long_batch_leaves_a_global_capture_whole(watched_rig: Rig) -> None:
    layers = [watched_rig.dense(512, 4, seed=seed) for seed in range(40)]
    backend, stream = watched_rig.open({"full": layers}, gpu_blocks=512, cpu_blocks=512), watched_rig.stream()
    watched_rig.fake.begin_capture(stream, mode=0)
    assert end_of(backend.submit(store({slot: slot for slot in range(512)}))) is EventStatus.DONE
    assert backend.close(deadline_s=GUARD_S)
    watched_rig.fake.end_capture(stream)


def test_the_callers_context_is_as_before(watched_rig: Rig) -> None:
    fake, tensor = watched_rig.fake, watched_rig.dense(8, BLOCK)
    backend = CudaBackend()
    watched_rig.backends.append(backend)
    own = call(api.cuDevicePrimaryCtxRetain, call(api.cuDeviceGet, 0))
    for bottom in (None, own):
        if bottom is not None:
            call(api.cuCtxPushCurrent, bottom)
        assert fake.context_depth() == (bottom is not None)
        if bottom is None:
            backend.open(layout_of({"full": [tensor]}, gpu_blocks=8))
        event = backend.submit(store({1: 3}))
        assert end_of(event) is EventStatus.DONE
        backend.wait(0, backend.fence(0))
        with pytest.raises(UsageError):
            backend.fence(None)
        assert fake.context_depth() == (bottom is not None)
        assert int(call(api.cuCtxGetCurrent) or 0) == int(bottom or 0)
    assert backend.close(deadline_s=GUARD_S)
    assert int(call(api.cuCtxGetCurrent)) == int(own)
    call(api.cuCtxPopCurrent)


def test_no_call_but_open_and_close_waits_or_pins(watched_rig: Rig) -> None:
    """The fake driver flags calls of this thread that wait for the device, pin, or free."""
    engine = Engine(watched_rig)
    engine.fake.watch_loop_thread()
    engine.fill(1, value=5)
    stored = engine.backend.submit(behind(store({1: 3}), engine.backend.fence(engine.stream)))
    engine.backend.wait(engine.stream, stored)
    wait_until(lambda: stored.query() is EventStatus.DONE)
    assert end_of(engine.backend.submit(load({3: 2}))) is EventStatus.DONE
    assert engine.fake.violations() == []
    engine.fake.unwatch_loop_thread()


def test_copies_run_on_streams_of_the_lowest_priority_that_are_not_the_default(watched_rig: Rig) -> None:
    engine = Engine(watched_rig)
    streams = {engine.backend.stream_of(direction) for direction in Direction}
    assert len(streams) == 2
    assert not streams & {0, 1, 2}
    with watched_rig.driver.current():
        lowest = int(api.cuCtxGetStreamPriorityRange()[1])
        assert {int(call(api.cuStreamGetPriority, stream)) for stream in streams} == {lowest}
        assert {int(call(api.cuStreamGetFlags, stream)) for stream in streams} == {1}
