"""Contexts are current per thread; the stack must come out as it went in."""

from __future__ import annotations

import threading
from types import ModuleType

from tests.fakecuda import FakeDriver
from tests.fakecuda.calls import HostMemory, code, device_memory, new_event, new_stream, succeed


def test_a_push_is_undone_by_a_pop(cu: ModuleType, fake_driver: FakeDriver) -> None:
    fake_driver.set_devices(2)
    first, second = succeed(cu.cuCtxGetCurrent()), succeed(cu.cuDevicePrimaryCtxRetain(1))
    succeed(cu.cuCtxPushCurrent(second))
    assert fake_driver.context_depth() == 2
    assert int(succeed(cu.cuCtxGetDevice())) == 1
    assert int(succeed(cu.cuCtxPopCurrent())) == int(second)
    assert int(succeed(cu.cuCtxGetCurrent())) == int(first)
    assert fake_driver.context_depth() == 1


def test_without_a_context_there_is_no_stream_and_no_memory(cu: ModuleType) -> None:
    succeed(cu.cuCtxPopCurrent())
    assert code(cu.cuStreamCreateWithPriority(1, 0)) == 201
    assert code(cu.cuMemAlloc(4096)) == 201
    assert code(cu.cuCtxPopCurrent()) == 201


def test_each_thread_has_a_stack_of_its_own(cu: ModuleType, fake_driver: FakeDriver) -> None:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend([fake_driver.context_depth(), code(cu.cuMemAlloc(4096))]))
    thread.start()
    thread.join(10)
    assert seen == [0, 201]


def test_a_context_that_nobody_retains_is_invalid(cu: ModuleType, fake_driver: FakeDriver) -> None:
    fake_driver.set_devices(2)
    second = succeed(cu.cuDevicePrimaryCtxRetain(1))
    succeed(cu.cuDevicePrimaryCtxRelease(1))
    assert code(cu.cuCtxPushCurrent(second)) == 201
    assert code(cu.cuDevicePrimaryCtxRelease(1)) == 201


def test_pushing_without_popping_ends_in_a_violation(cu: ModuleType, fake_driver: FakeDriver) -> None:
    context = succeed(cu.cuCtxGetCurrent())
    pushes = [code(cu.cuCtxPushCurrent(context)) for _ in range(40)]
    assert 2 in pushes
    assert "not popped" in fake_driver.violations()[0]
    while fake_driver.context_depth():
        succeed(cu.cuCtxPopCurrent())


def test_the_last_release_with_work_pending_is_a_violation(cu: ModuleType, fake_driver: FakeDriver) -> None:
    stream, device, host = new_stream(cu), device_memory(cu, 4096), HostMemory(4096)
    fake_driver.hold()
    succeed(cu.cuMemcpyHtoDAsync(device, host.address, 4096, stream))
    succeed(cu.cuDevicePrimaryCtxRelease(0))
    assert "released for good" in fake_driver.violations()[0]


def test_an_event_and_a_stream_of_two_devices_do_not_go_together(cu: ModuleType, fake_driver: FakeDriver) -> None:
    fake_driver.set_devices(2)
    event = succeed(cu.cuEventCreate(2))
    succeed(cu.cuCtxPushCurrent(succeed(cu.cuDevicePrimaryCtxRetain(1))))
    stream = new_stream(cu)
    assert code(cu.cuEventRecord(event, stream)) == 400
    succeed(cu.cuEventRecord(new_event(cu), stream))
    succeed(cu.cuCtxPopCurrent())


def test_a_reset_forgets_every_context(cu: ModuleType, fake_driver: FakeDriver) -> None:
    fake_driver.reset()
    assert fake_driver.context_depth() == 0
    assert code(cu.cuCtxGetCurrent()) == 3, "not initialised"
