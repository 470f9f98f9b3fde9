"""A context that is lost stays lost; what was pending then never ran; a forked child has no driver."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

from tests.fakecuda import FakeDriver, Kernel
from tests.fakecuda.calls import (
    PAGE,
    HostMemory,
    code,
    device_memory,
    new_event,
    new_stream,
    registered,
    succeed,
)


@pytest.mark.parametrize("error", [700, 719, 214])
def test_a_failed_copy_fails_every_call_from_then_on(cu: ModuleType, fake_driver: FakeDriver, error: int) -> None:
    device, stream, other, event = device_memory(cu, 64), new_stream(cu), new_stream(cu), new_event(cu)
    fake_driver.write(device, bytes([9] * 16))
    fake_driver.hold()
    fake_driver.fail_next_copy(stream, error)
    succeed(cu.cuMemcpyDtoDAsync(device, device + 32, 8, stream))
    succeed(cu.cuEventRecord(event, stream))
    succeed(cu.cuMemsetD8Async(device + 8, 1, 8, other))
    assert fake_driver.step(stream) == 0
    fake_driver.release()
    calls: tuple[Callable[[], Sequence[Any]], ...] = (
        lambda: cu.cuEventQuery(event),
        lambda: cu.cuStreamQuery(other),
        lambda: cu.cuStreamSynchronize(other),
        lambda: cu.cuCtxSynchronize(),
        lambda: cu.cuMemcpyDtoDAsync(device, device + 32, 8, other),
        lambda: cu.cuMemAlloc(64),
    )
    assert [code(call()) for call in calls] == [error] * len(calls)
    assert code(cu.cuCtxGetCurrent()) == 0, "asking for the context is no work"
    assert fake_driver.inflight_range(device, 8) == 1, "nobody knows whether it still runs"
    assert fake_driver.read(device, 16) == bytes([9] * 16)


def test_a_reset_of_the_error_drops_what_never_ran(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream = device_memory(cu, 64), new_stream(cu)
    fake_driver.fail_next_copy(stream, 700)
    fake_driver.hold()
    succeed(cu.cuMemcpyDtoDAsync(device, device + 32, 8, stream))
    read = fake_driver.launch(stream, Kernel().read(device, num_bytes=8))
    assert fake_driver.step(stream) == 0
    fake_driver.reset_error()
    assert fake_driver.pending() == 0
    assert read.result() is None
    succeed(cu.cuMemsetD8Async(device, 5, 8, stream))
    assert fake_driver.step(stream) == 1
    assert fake_driver.read(device, 8) == bytes([5] * 8)


def test_a_failure_is_of_a_copy_and_not_of_the_kernel_before_it(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream = device_memory(cu, 64), new_stream(cu)
    fake_driver.fail_next_copy(stream, 700)
    succeed(cu.cuMemsetD8Async(device, 5, 8, stream))
    assert code(cu.cuStreamSynchronize(stream)) == 0
    succeed(cu.cuMemcpyDtoDAsync(device, device + 32, 8, stream))
    assert code(cu.cuStreamSynchronize(stream)) == 700


def test_unregistering_after_an_error_is_still_a_violation_in_flight(cu: ModuleType, fake_driver: FakeDriver) -> None:
    """Who frees memory because the driver has failed frees it under a copy that may run."""
    device, stream, memory = device_memory(cu, PAGE), new_stream(cu), HostMemory(PAGE)
    succeed(cu.cuMemHostRegister(memory.address, PAGE, 0))
    fake_driver.fail_next_copy(stream, 700)
    succeed(cu.cuMemcpyHtoDAsync(device, memory.address, PAGE, stream))
    assert code(cu.cuStreamSynchronize(stream)) == 700
    assert code(cu.cuMemHostUnregister(memory.address)) == 700
    assert fake_driver.violations() == []
    memory.unmap()
    assert "no longer mapped" in fake_driver.violations()[0]


def test_a_synchronous_fault_leaves_nothing_behind(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream = device_memory(cu, PAGE), new_stream(cu)
    with registered(cu, PAGE) as memory:
        fake_driver.inject("cuMemcpyHtoDAsync_v2", code=999)
        assert code(cu.cuMemcpyHtoDAsync(device, memory.address, 8, stream)) == 999
        assert fake_driver.pending() == 0
        assert code(cu.cuMemcpyHtoDAsync(device, memory.address, 8, stream)) == 0
        assert fake_driver.drain()


def test_a_forked_child_has_no_driver(cu: ModuleType, fake_driver: FakeDriver) -> None:
    event = new_event(cu)
    child = os.fork()
    if not child:  # no assertion, no cleanup: it must not run this suite a second time
        told = code(cu.cuEventQuery(event)) == 3 and "forked child" in fake_driver.violations()[0]
        os._exit(0 if told else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert code(cu.cuEventQuery(event)) == 0, "the parent goes on"
    assert fake_driver.violations() == []
