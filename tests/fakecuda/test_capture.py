"""A stream capture is broken by whoever makes an unsafe call meanwhile, unless his thread has said that it may."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

from tests.fakecuda import FakeDriver, Kernel
from tests.fakecuda.calls import PAGE, HostMemory, code, copy_batch, device_memory, new_event, new_stream, succeed

UNSUPPORTED, INVALIDATED = 900, 901
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


class Scene:
    """What the calls below need, made before the capture begins."""

    def __init__(self, cu: ModuleType) -> None:
        self.cu = cu
        self.device = device_memory(cu, PAGE)
        self.spare = device_memory(cu, PAGE)
        self.memory = HostMemory(2 * PAGE)
        succeed(cu.cuMemHostRegister(self.memory.address, PAGE, 0))
        self.pinned = succeed(cu.cuMemHostAlloc(PAGE, 0))
        self.engine, self.ours, self.doomed = new_stream(cu), new_stream(cu), new_stream(cu)
        self.event = new_event(cu)


UNSAFE: dict[str, Callable[[Scene], Sequence[Any]]] = {
    "cuMemAlloc": lambda s: s.cu.cuMemAlloc(PAGE),
    "cuMemFree": lambda s: s.cu.cuMemFree(s.spare),
    "cuMemHostAlloc": lambda s: s.cu.cuMemHostAlloc(PAGE, 0),
    "cuMemFreeHost": lambda s: s.cu.cuMemFreeHost(s.pinned),
    "cuMemHostRegister": lambda s: s.cu.cuMemHostRegister(s.memory.address + PAGE, PAGE, 0),
    "cuMemHostUnregister": lambda s: s.cu.cuMemHostUnregister(s.memory.address),
    "cuMemcpyHtoD": lambda s: s.cu.cuMemcpyHtoD(s.device, s.memory.address, 8),
    "cuEventQuery": lambda s: s.cu.cuEventQuery(s.event),
    "cuEventSynchronize": lambda s: s.cu.cuEventSynchronize(s.event),
    "cuStreamQuery": lambda s: s.cu.cuStreamQuery(s.ours),
    "cuStreamSynchronize": lambda s: s.cu.cuStreamSynchronize(s.ours),
    "cuCtxSynchronize": lambda s: s.cu.cuCtxSynchronize(),
    "cuStreamCreateWithPriority": lambda s: s.cu.cuStreamCreateWithPriority(1, 0),
    "cuStreamDestroy": lambda s: s.cu.cuStreamDestroy(s.doomed),
}
SAFE: dict[str, Callable[[Scene], Sequence[Any]]] = {
    "cuMemcpyHtoDAsync": lambda s: s.cu.cuMemcpyHtoDAsync(s.device, s.memory.address, 8, s.ours),
    "cuEventCreate": lambda s: s.cu.cuEventCreate(2),
    "cuEventRecord": lambda s: s.cu.cuEventRecord(s.event, s.ours),
    "cuStreamWaitEvent": lambda s: s.cu.cuStreamWaitEvent(s.ours, s.event, 0),
    "cuCtxGetCurrent": lambda s: s.cu.cuCtxGetCurrent(),
    "cuStreamIsCapturing": lambda s: s.cu.cuStreamIsCapturing(s.engine),
}


def exchange(cu: ModuleType, mode: int) -> int:
    return int(succeed(cu.cuThreadExchangeStreamCaptureMode(cu.CUstreamCaptureMode(mode))))


def end(cu: ModuleType, stream: object) -> int:
    return code(cu.cuStreamEndCapture(stream))


@pytest.mark.parametrize("name", UNSAFE)
def test_an_unsafe_call_is_refused_and_breaks_the_capture(cu: ModuleType, fake_driver: FakeDriver, name: str) -> None:
    scene = Scene(cu)
    fake_driver.begin_capture(scene.engine)
    assert code(UNSAFE[name](scene)) == UNSUPPORTED
    assert code(cu.cuMemsetD8Async(scene.device, 1, 8, scene.engine)) == INVALIDATED
    with pytest.raises(RuntimeError, match=str(INVALIDATED)):
        fake_driver.end_capture(scene.engine)


@pytest.mark.parametrize("name", UNSAFE)
def test_under_the_relaxed_mode_it_is_allowed(cu: ModuleType, fake_driver: FakeDriver, name: str) -> None:
    scene = Scene(cu)
    fake_driver.begin_capture(scene.engine)
    assert exchange(cu, RELAXED) == GLOBAL
    assert code(UNSAFE[name](scene)) == 0
    assert exchange(cu, GLOBAL) == RELAXED
    fake_driver.end_capture(scene.engine)


@pytest.mark.parametrize("name", SAFE)
def test_a_safe_call_on_another_stream_needs_no_mode(cu: ModuleType, fake_driver: FakeDriver, name: str) -> None:
    scene = Scene(cu)
    fake_driver.begin_capture(scene.engine)
    assert code(SAFE[name](scene)) == 0
    fake_driver.end_capture(scene.engine)
    assert fake_driver.drain()


@pytest.mark.parametrize(("mode", "allowed"), [(GLOBAL, False), (THREAD_LOCAL, True), (RELAXED, True)])
def test_the_capture_of_another_thread_forbids_by_its_mode(
    cu: ModuleType,
    fake_driver: FakeDriver,
    mode: int,
    allowed: bool,  # noqa: FBT001 - a table's column
) -> None:
    scene = Scene(cu)
    thread = threading.Thread(target=lambda: fake_driver.begin_capture(scene.engine, mode=mode))
    thread.start()
    thread.join(10)
    assert (code(cu.cuEventQuery(scene.event)) == 0) == allowed


def test_a_thread_local_capture_forbids_its_own_thread(cu: ModuleType, fake_driver: FakeDriver) -> None:
    scene = Scene(cu)
    fake_driver.begin_capture(scene.engine, mode=THREAD_LOCAL)
    assert code(cu.cuEventQuery(scene.event)) == UNSUPPORTED


def test_a_relaxed_capture_forbids_nobody_anything(cu: ModuleType, fake_driver: FakeDriver) -> None:
    scene = Scene(cu)
    fake_driver.begin_capture(scene.engine, mode=RELAXED)
    assert code(cu.cuEventQuery(scene.event)) == 0
    fake_driver.end_capture(scene.engine)


def test_captured_work_does_not_run(cu: ModuleType, fake_driver: FakeDriver) -> None:
    scene = Scene(cu)
    fake_driver.begin_capture(scene.engine)
    succeed(cu.cuMemsetD8Async(scene.device, 1, 8, scene.engine))
    fake_driver.launch(scene.engine, Kernel().fill(scene.device, value=2, num_bytes=8))
    assert int(succeed(cu.cuStreamIsCapturing(scene.engine))) == 1
    assert int(succeed(cu.cuStreamIsCapturing(scene.ours))) == 0
    fake_driver.end_capture(scene.engine)
    assert int(succeed(cu.cuStreamIsCapturing(scene.engine))) == 0
    assert fake_driver.pending() == 0
    assert fake_driver.read(scene.device, 8) == bytes(8)


def test_a_fence_recorded_on_a_capturing_stream_can_be_asked_by_nobody(cu: ModuleType, fake_driver: FakeDriver) -> None:
    scene = Scene(cu)
    fake_driver.begin_capture(scene.engine)
    succeed(cu.cuEventRecord(scene.event, scene.engine))
    exchange(cu, RELAXED)
    assert code(cu.cuEventQuery(scene.event)) == 907
    exchange(cu, GLOBAL)
    assert end(cu, scene.engine) == INVALIDATED


def test_waiting_for_a_captured_event_pulls_a_stream_into_the_capture(cu: ModuleType, fake_driver: FakeDriver) -> None:
    scene = Scene(cu)
    fake_driver.begin_capture(scene.engine)
    succeed(cu.cuEventRecord(scene.event, scene.engine))
    succeed(cu.cuStreamWaitEvent(scene.ours, scene.event, 0))
    assert int(succeed(cu.cuStreamIsCapturing(scene.ours))) == 1
    assert end(cu, scene.ours) == 903
    assert end(cu, scene.engine) == 904, "it was never joined back"
    assert int(succeed(cu.cuStreamIsCapturing(scene.ours))) == 0


def test_a_stream_that_is_joined_back_is_part_of_the_graph(cu: ModuleType, fake_driver: FakeDriver) -> None:
    scene, back = Scene(cu), new_event(cu)
    fake_driver.begin_capture(scene.engine)
    succeed(cu.cuEventRecord(scene.event, scene.engine))
    succeed(cu.cuStreamWaitEvent(scene.ours, scene.event, 0))
    succeed(cu.cuMemsetD8Async(scene.device, 1, 8, scene.ours))
    succeed(cu.cuEventRecord(back, scene.ours))
    succeed(cu.cuStreamWaitEvent(scene.engine, back, 0))
    fake_driver.end_capture(scene.engine)


def test_waiting_for_work_outside_the_capture_breaks_it(cu: ModuleType, fake_driver: FakeDriver) -> None:
    scene = Scene(cu)
    succeed(cu.cuEventRecord(scene.event, scene.ours))
    fake_driver.begin_capture(scene.engine)
    assert code(cu.cuStreamWaitEvent(scene.engine, scene.event, 0)) == 905
    assert end(cu, scene.engine) == INVALIDATED


def test_a_batch_cannot_be_captured(cu: ModuleType, fake_driver: FakeDriver) -> None:
    scene = Scene(cu)
    fake_driver.begin_capture(scene.engine)
    assert copy_batch(cu, [(scene.device, scene.memory.address, 8)], stream=scene.engine) == UNSUPPORTED
    assert end(cu, scene.engine) == INVALIDATED


def test_the_legacy_stream_breaks_the_capture_of_a_blocking_stream(cu: ModuleType, fake_driver: FakeDriver) -> None:
    scene = Scene(cu)
    fake_driver.begin_capture(scene.engine)
    succeed(cu.cuMemsetD8Async(scene.device, 1, 8, 0))
    fake_driver.end_capture(scene.engine)
    blocking = new_stream(cu, flags=0)
    fake_driver.begin_capture(blocking)
    assert code(cu.cuMemsetD8Async(scene.device, 1, 8, 0)) == 906
    assert end(cu, blocking) == INVALIDATED
    assert fake_driver.drain()


def test_a_capture_ends_on_its_thread_once(cu: ModuleType, fake_driver: FakeDriver) -> None:
    scene = Scene(cu)
    assert end(cu, scene.engine) == 401
    fake_driver.begin_capture(scene.engine)
    with pytest.raises(RuntimeError, match="401"):
        fake_driver.begin_capture(scene.engine)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(end(cu, scene.engine)))
    thread.start()
    thread.join(10)
    assert codes == [908]
    assert end(cu, scene.engine) == 0


def test_the_mode_belongs_to_the_thread(cu: ModuleType, fake_driver: FakeDriver) -> None:
    scene = Scene(cu)
    fake_driver.begin_capture(scene.engine)
    exchange(cu, RELAXED)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(code(cu.cuEventQuery(scene.event))))
    thread.start()
    thread.join(10)
    exchange(cu, GLOBAL)
    assert codes == [UNSUPPORTED]
