"""Streams are queues that run behind the caller's back; events are places in them."""

from __future__ import annotations

import threading
from types import ModuleType

import pytest

from tests.fakecuda import FakeDriver, Kernel
from tests.fakecuda.calls import NOT_READY, code, device_memory, new_event, new_stream, succeed


def test_a_stream_runs_in_order_and_by_itself(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream, event = device_memory(cu, 256), new_stream(cu), new_event(cu)
    fake_driver.set_timing(latency_us=200)
    for value in range(1, 20):
        succeed(cu.cuMemsetD8Async(device, value, 64, stream))
        succeed(cu.cuMemcpyDtoDAsync(device + 64, device, 64, stream))
    succeed(cu.cuEventRecord(event, stream))
    assert code(cu.cuEventQuery(event)) == NOT_READY
    assert code(cu.cuStreamQuery(stream)) == NOT_READY
    succeed(cu.cuStreamSynchronize(stream))
    assert fake_driver.read(device + 64, 64) == bytes([19]) * 64
    assert code(cu.cuEventQuery(event)) == 0
    assert code(cu.cuStreamQuery(stream)) == 0


def test_synchronising_lets_other_threads_run(cu: ModuleType, fake_driver: FakeDriver) -> None:
    """What `cuda.bindings` 12.8.0 got wrong, and every version since 12.9.10 gets right."""
    device, stream, event = device_memory(cu, 64), new_stream(cu), new_event(cu)
    fake_driver.hold()
    succeed(cu.cuMemcpyDtoDAsync(device, device + 32, 32, stream))
    succeed(cu.cuEventRecord(event, stream))
    thread = threading.Thread(target=lambda: [succeed(cu.cuEventSynchronize(event))])
    thread.start()
    fake_driver.release()
    thread.join(10)
    assert not thread.is_alive()


def test_an_event_never_recorded_is_done_and_nobody_waits_for_it(cu: ModuleType, fake_driver: FakeDriver) -> None:
    event, stream = new_event(cu), new_stream(cu)
    assert code(cu.cuEventQuery(event)) == 0
    assert code(cu.cuEventSynchronize(event)) == 0
    fake_driver.hold()
    succeed(cu.cuStreamWaitEvent(stream, event, 0))
    assert fake_driver.pending() == 0
    assert fake_driver.event_done_ns(event) is None


def test_a_wait_is_for_the_recording_as_it_was(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, event = device_memory(cu, 64), new_event(cu)
    first, second = new_stream(cu), new_stream(cu)
    fake_driver.hold()
    succeed(cu.cuMemsetD8Async(device, 1, 8, first))
    succeed(cu.cuEventRecord(event, first))
    succeed(cu.cuStreamWaitEvent(second, event, 0))
    read = fake_driver.launch(second, Kernel().read(device, num_bytes=8))
    succeed(cu.cuMemsetD8Async(device, 2, 8, first))
    succeed(cu.cuEventRecord(event, first))
    assert fake_driver.step(second) == 0, "it waits for the first stream"
    assert fake_driver.step(first) == 1
    assert code(cu.cuEventQuery(event)) == NOT_READY, "it was recorded again"
    assert fake_driver.step(second) == 1
    assert read.result() == [bytes([1]) * 8]


def test_an_event_is_done_when_its_last_recording_is(cu: ModuleType, fake_driver: FakeDriver) -> None:
    """An earlier one, on a slower stream, says nothing about it."""
    fake_driver.use_virtual_time()
    device, event, slow = device_memory(cu, 64), new_event(cu), new_stream(cu)
    fake_driver.launch(slow, Kernel(duration_us=100).fill(device, value=1, num_bytes=8))
    succeed(cu.cuEventRecord(event, slow))
    fake_driver.advance(10)
    succeed(cu.cuEventRecord(event, new_stream(cu)))
    assert fake_driver.event_done_ns(event) == 10_000
    fake_driver.advance(100)
    assert fake_driver.pending() == 0
    assert fake_driver.event_done_ns(event) == 10_000


def test_an_event_may_be_destroyed_while_it_is_pending(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream, event = device_memory(cu, 64), new_stream(cu), new_event(cu)
    fake_driver.hold()
    succeed(cu.cuMemsetD8Async(device, 1, 8, stream))
    succeed(cu.cuEventRecord(event, stream))
    succeed(cu.cuEventDestroy(event))
    another = new_event(cu)
    assert code(cu.cuEventQuery(event)) == 400
    assert fake_driver.step(stream) == 1
    assert fake_driver.event_done_ns(another) is None, "it is not the one that was recorded"


def test_a_destroyed_stream_ends_its_work_first(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream = device_memory(cu, 64), new_stream(cu)
    fake_driver.hold()
    succeed(cu.cuMemsetD8Async(device, 1, 8, stream))
    succeed(cu.cuStreamDestroy(stream))
    assert code(cu.cuMemsetD8Async(device, 2, 8, stream)) == 400
    assert code(cu.cuStreamDestroy(stream)) == 400
    other = new_stream(cu)
    assert int(other) != int(stream)
    assert fake_driver.step(other) == 0, "what is pending is not the new stream's"
    fake_driver.release()
    assert fake_driver.drain()
    assert fake_driver.read(device, 8) == bytes([1]) * 8


def test_handles_from_before_a_reset_are_refused(cu: ModuleType, fake_driver: FakeDriver) -> None:
    stream, event, device = new_stream(cu), new_event(cu), device_memory(cu, 64)
    context = succeed(cu.cuCtxGetCurrent())
    fake_driver.reset()
    succeed(cu.cuInit(0))
    assert code(cu.cuCtxPushCurrent(context)) == 201
    assert int(succeed(cu.cuDevicePrimaryCtxRetain(0)))
    succeed(cu.cuCtxPushCurrent(context))
    assert int(new_stream(cu)) != int(stream)
    assert int(new_event(cu)) != int(event)
    assert code(cu.cuStreamQuery(stream)) == 400
    assert code(cu.cuEventQuery(event)) == 400
    assert code(cu.cuMemFree(device)) == 1


def test_a_reset_is_refused_while_work_is_pending(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream = device_memory(cu, 64), new_stream(cu)
    fake_driver.hold()
    succeed(cu.cuMemsetD8Async(device, 1, 8, stream))
    with pytest.raises(RuntimeError, match="pending"):
        fake_driver.reset()
    assert fake_driver.step(stream) == 1
    fake_driver.reset()


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (-1, -1), (-5, -5), (-9, -5), (3, 0)])
def test_priorities_are_kept_within_the_range(cu: ModuleType, asked: int, given: int) -> None:
    result, least, greatest = cu.cuCtxGetStreamPriorityRange()
    assert (int(result), least, greatest) == (0, 0, -5)
    stream = new_stream(cu, priority=asked)
    assert succeed(cu.cuStreamGetPriority(stream)) == given
    assert succeed(cu.cuStreamGetFlags(stream)) == 1


def test_the_legacy_stream_and_blocking_streams_wait_for_each_other(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device = device_memory(cu, 64)
    blocking, free = new_stream(cu, flags=0), new_stream(cu, flags=1)
    fake_driver.hold(blocking)
    fake_driver.hold(free)
    succeed(cu.cuMemsetD8Async(device, 1, 8, blocking))
    succeed(cu.cuMemsetD8Async(device + 8, 1, 8, free))
    read = fake_driver.launch(0, Kernel().read(device, num_bytes=16))
    fake_driver.settle()
    assert read.result() is None, "the blocking stream comes before"
    assert fake_driver.step(blocking) == 1
    assert read.result() == [bytes([1] * 8 + [0] * 8)], "the other one does not"


def test_a_blocking_stream_comes_after_the_legacy_stream(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, blocking, free = device_memory(cu, 64), new_stream(cu, flags=0), new_stream(cu, flags=1)
    fake_driver.hold(0)
    succeed(cu.cuMemsetD8Async(device, 1, 8, 0))
    after = fake_driver.launch(blocking, Kernel().read(device, num_bytes=8))
    beside = fake_driver.launch(free, Kernel().read(device, num_bytes=8))
    fake_driver.settle()
    assert (after.result(), beside.result()) == (None, [bytes(8)])
    assert fake_driver.step(0) == 1
    assert after.result() == [bytes([1]) * 8]


def test_elapsed_time_is_told_once_both_are_done(cu: ModuleType, fake_driver: FakeDriver) -> None:
    fake_driver.use_virtual_time()
    fake_driver.set_timing(latency_us=1500)
    device, stream = device_memory(cu, 64), new_stream(cu)
    start, end, untimed = succeed(cu.cuEventCreate(0)), succeed(cu.cuEventCreate(0)), new_event(cu)
    succeed(cu.cuEventRecord(start, stream))
    succeed(cu.cuMemcpyDtoDAsync(device, device + 32, 8, stream))
    succeed(cu.cuEventRecord(end, stream))
    assert code(cu.cuEventElapsedTime(start, end)) == NOT_READY
    fake_driver.advance(1500)
    assert succeed(cu.cuEventElapsedTime(start, end)) == pytest.approx(1.5)
    succeed(cu.cuEventRecord(untimed, stream))
    assert code(cu.cuEventElapsedTime(start, untimed)) == 400


def test_a_call_that_waits_for_ever_ends_after_the_patience(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream = device_memory(cu, 64), new_stream(cu)
    fake_driver.set_patience(0.05)
    fake_driver.hold()
    succeed(cu.cuMemsetD8Async(device, 1, 8, stream))
    assert code(cu.cuStreamSynchronize(stream)) == 702
    assert "waited in vain" in fake_driver.violations()[0]
