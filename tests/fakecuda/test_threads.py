"""The loop's thread must not wait; host functions run on the driver's."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, SupportsInt

import pytest

from tests.fakecuda import FakeDriver
from tests.fakecuda.calls import PAGE, HostMemory, code, device_memory, new_event, new_stream, succeed

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def launch_host_function(driver: FakeDriver, stream: SupportsInt, function: object) -> int:
    result: int = driver.library.cuLaunchHostFunc(ctypes.c_void_p(int(stream)), function, None)
    return result


WAITING: dict[str, Callable[[ModuleType], Sequence[Any]]] = {
    "cuStreamSynchronize": lambda cu: cu.cuStreamSynchronize(new_stream(cu)),
    "cuEventSynchronize": lambda cu: cu.cuEventSynchronize(new_event(cu)),
    "cuCtxSynchronize": lambda cu: cu.cuCtxSynchronize(),
    "cuMemHostRegister": lambda cu: cu.cuMemHostRegister(HostMemory(PAGE).address, PAGE, 0),
    "cuMemHostUnregister": lambda cu: cu.cuMemHostUnregister(1),
    "cuMemAlloc": lambda cu: cu.cuMemAlloc(PAGE),
    "cuMemFree": lambda cu: cu.cuMemFree(0),
    "cuMemHostAlloc": lambda cu: cu.cuMemHostAlloc(PAGE, 0),
}


@pytest.mark.parametrize("name", WAITING)
def test_a_call_that_waits_is_a_violation_on_the_loops_thread_only(
    cu: ModuleType, fake_driver: FakeDriver, name: str
) -> None:
    fake_driver.watch_loop_thread()
    context = succeed(cu.cuCtxGetCurrent())
    thread = threading.Thread(target=lambda: (cu.cuCtxPushCurrent(context), WAITING[name](cu)))
    thread.start()
    thread.join(10)
    assert fake_driver.violations() == []
    WAITING[name](cu)
    assert name in fake_driver.violations()[0]
    fake_driver.forget_violations()
    fake_driver.unwatch_loop_thread()
    WAITING[name](cu)
    assert fake_driver.violations() == []


def test_submitting_and_asking_are_no_violations(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream, event = device_memory(cu, 64), new_stream(cu), new_event(cu)
    fake_driver.watch_loop_thread()
    succeed(cu.cuMemcpyDtoDAsync(device, device + 32, 8, stream))
    succeed(cu.cuEventRecord(event, stream))
    cu.cuEventQuery(event)
    cu.cuStreamQuery(stream)
    assert fake_driver.violations() == []
    assert fake_driver.drain()


def test_a_host_function_runs_at_its_place_and_may_not_call_the_driver(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream, event = device_memory(cu, 64), new_stream(cu), new_event(cu)
    seen: list[tuple[int, int]] = []

    def look(_: int) -> None:
        seen.append((fake_driver.library.cuEventQuery(ctypes.c_void_p(int(event))), threading.get_ident()))

    fake_driver.hold()
    succeed(cu.cuMemsetD8Async(device, 1, 8, stream))
    function = HostFunction(look)
    assert launch_host_function(fake_driver, stream, function) == 0
    assert fake_driver.step(stream) == 1
    assert seen == []
    fake_driver.release()
    assert fake_driver.drain()
    assert [result for result, _ in seen] == [800]
    assert seen[0][1] != threading.get_ident()


@pytest.mark.parametrize("locked", [False, True])
def test_a_host_function_under_the_drivers_lock_holds_up_every_other_call(
    cu: ModuleType,
    fake_driver: FakeDriver,
    locked: bool,  # noqa: FBT001 - both ways
) -> None:
    """The lock inversion that hangs programs with Python callbacks: here the callback waits with a limit."""
    stream, event = new_stream(cu), new_event(cu)
    entered, answered = threading.Event(), threading.Event()
    in_time: list[bool] = []

    def wait(_: int) -> None:
        entered.set()
        in_time.append(answered.wait(0.3 if locked else 10))

    if locked:
        fake_driver.lock_host_functions()
    function = HostFunction(wait)
    assert launch_host_function(fake_driver, stream, function) == 0
    assert entered.wait(10)
    succeed(cu.cuEventRecord(event, new_stream(cu)))
    answered.set()
    assert fake_driver.drain()
    assert in_time == [not locked]


def test_host_functions_stop_after_an_error(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream = device_memory(cu, 64), new_stream(cu)
    called: list[int] = []
    function = HostFunction(lambda _: called.append(1))
    fake_driver.fail_next_copy(stream, 700)
    fake_driver.hold()
    succeed(cu.cuMemcpyDtoDAsync(device, device + 32, 8, stream))
    assert launch_host_function(fake_driver, stream, function) == 0
    fake_driver.release()
    assert code(cu.cuStreamSynchronize(stream)) == 700
    fake_driver.reset_error()
    assert fake_driver.drain()
    assert called == []
