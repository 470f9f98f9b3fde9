"""When copies end: by a clock that stands still, by bandwidth, or by hand."""

from __future__ import annotations

import time
from types import ModuleType

import pytest

from tests.fakecuda import FakeDriver, Kernel
from tests.fakecuda.calls import NOT_READY, code, device_memory, new_event, new_stream, succeed

MIB = 1 << 20


def test_virtual_time_takes_latency_and_bandwidth_one_after_another(cu: ModuleType, fake_driver: FakeDriver) -> None:
    fake_driver.use_virtual_time()
    fake_driver.set_timing(gbps=1, latency_us=10)  # 1 GB/s is a byte per ns
    device, stream = device_memory(cu, 2 * MIB), new_stream(cu)
    events = [new_event(cu) for _ in range(3)]
    for event, num_bytes in zip(events, (1000, 50_000, MIB), strict=True):
        succeed(cu.cuMemcpyDtoDAsync(device, device + MIB, num_bytes, stream))
        succeed(cu.cuEventRecord(event, stream))
    done = [11_000, 71_000, 81_000 + MIB]
    assert fake_driver.advance(10.999) == 10_999
    assert [fake_driver.event_done_ns(event) for event in events] == [None, None, None]
    fake_driver.advance(0.001)
    assert [fake_driver.event_done_ns(event) for event in events] == [done[0], None, None]
    fake_driver.advance(10_000)
    assert [fake_driver.event_done_ns(event) for event in events] == done


def test_in_virtual_time_streams_run_side_by_side_and_waits_cost_what_they_wait(
    cu: ModuleType, fake_driver: FakeDriver
) -> None:
    fake_driver.use_virtual_time()
    fake_driver.set_timing(latency_us=10)
    device, event, last = device_memory(cu, 256), new_event(cu), new_event(cu)
    first, second = new_stream(cu), new_stream(cu)
    fake_driver.launch(first, Kernel(duration_us=100).fill(device, value=1, num_bytes=8))
    succeed(cu.cuEventRecord(event, first))
    succeed(cu.cuMemcpyDtoDAsync(device + 64, device + 128, 8, second))
    succeed(cu.cuStreamWaitEvent(second, event, 0))
    succeed(cu.cuMemcpyDtoDAsync(device + 8, device, 8, second))
    succeed(cu.cuEventRecord(last, second))
    fake_driver.advance(1000)
    assert fake_driver.event_done_ns(event) == 100_000
    assert fake_driver.event_done_ns(last) == 110_000
    assert fake_driver.read(device + 8, 8) == bytes([1]) * 8


def test_without_an_advance_virtual_time_stands_still(cu: ModuleType, fake_driver: FakeDriver) -> None:
    fake_driver.use_virtual_time()
    fake_driver.set_timing(latency_us=1)
    device, stream = device_memory(cu, 64), new_stream(cu)
    succeed(cu.cuMemcpyDtoDAsync(device, device + 32, 8, stream))
    assert not fake_driver.drain(timeout_s=0.02)
    fake_driver.advance(1)
    assert fake_driver.drain(timeout_s=0)


def test_by_the_real_clock_a_copy_takes_at_least_its_time(cu: ModuleType, fake_driver: FakeDriver) -> None:
    """The stamp is `time.monotonic_ns`, so that latencies can be told from it."""
    fake_driver.set_timing(gbps=1, latency_us=500)
    device, stream, event = device_memory(cu, 2 * MIB), new_stream(cu), new_event(cu)
    before = time.monotonic_ns()
    for _ in range(3):
        succeed(cu.cuMemcpyDtoDAsync(device, device + MIB, MIB, stream))
    succeed(cu.cuEventRecord(event, stream))
    assert fake_driver.drain()
    done = fake_driver.event_done_ns(event)
    assert done is not None
    assert before + 3 * (500_000 + MIB) <= done <= time.monotonic_ns()


def test_a_hold_keeps_copies_until_they_are_stepped(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream, event = device_memory(cu, 64), new_stream(cu), new_event(cu)
    fake_driver.hold()
    for value in (1, 2, 3):
        succeed(cu.cuMemsetD8Async(device, value, 8, stream))
        succeed(cu.cuEventRecord(event, stream))
    seen = []
    for _ in range(3):
        assert fake_driver.step(stream) == 1
        seen.append((fake_driver.read(device, 1)[0], code(cu.cuEventQuery(event))))
    assert seen == [(1, NOT_READY), (2, NOT_READY), (3, 0)]
    assert fake_driver.step(stream) == 0, "nothing is left"


def test_a_step_does_not_wait_for_the_time_a_copy_takes(cu: ModuleType, fake_driver: FakeDriver) -> None:
    fake_driver.set_timing(latency_us=3600e6)
    device, stream, event = device_memory(cu, 64), new_stream(cu), new_event(cu)
    succeed(cu.cuMemcpyDtoDAsync(device, device + 32, 8, stream))
    succeed(cu.cuEventRecord(event, stream))
    assert fake_driver.step(stream) == 1
    assert code(cu.cuEventQuery(event)) == 0


def test_a_step_ends_a_copy_now_for_those_behind_it_too(cu: ModuleType, fake_driver: FakeDriver) -> None:
    fake_driver.use_virtual_time()
    fake_driver.set_timing(latency_us=1000)
    device, stream, event = device_memory(cu, 64), new_stream(cu), new_event(cu)
    for _ in range(2):
        succeed(cu.cuMemcpyDtoDAsync(device, device + 32, 8, stream))
    succeed(cu.cuEventRecord(event, stream))
    fake_driver.advance(10)
    assert fake_driver.step(stream) == 1
    fake_driver.advance(2000)
    assert fake_driver.event_done_ns(event) == 1_010_000


def test_one_stream_can_be_held_while_another_runs(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, hung, free = device_memory(cu, 64), new_stream(cu), new_stream(cu)
    fake_driver.hold(hung)
    succeed(cu.cuMemsetD8Async(device, 1, 8, hung))
    succeed(cu.cuMemsetD8Async(device + 8, 1, 8, free))
    succeed(cu.cuStreamSynchronize(free))
    assert fake_driver.read(device, 16) == bytes([0] * 8 + [1] * 8)
    fake_driver.release(hung)
    succeed(cu.cuStreamSynchronize(hung))
    assert fake_driver.read(device, 8) == bytes([1] * 8)


def test_a_release_ends_every_hold(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream = device_memory(cu, 64), new_stream(cu)
    fake_driver.hold()
    fake_driver.hold(stream)
    succeed(cu.cuMemsetD8Async(device, 1, 8, stream))
    assert fake_driver.pending() == 1
    fake_driver.release()
    assert fake_driver.drain()


def test_steering_an_unknown_stream_is_refused(fake_driver: FakeDriver) -> None:
    for steer in (fake_driver.hold, fake_driver.release, fake_driver.step, fake_driver.fail_next_copy):
        with pytest.raises(ValueError, match="no such"):
            steer(123456789)
