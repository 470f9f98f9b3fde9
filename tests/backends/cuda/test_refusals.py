"""What the driver refuses beside a copy itself: to restore the caller's context, to tell a time, to begin at all."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import numpy as np
import pytest

from aiokv.backends.base import EventStatus
from aiokv.backends.cuda import CudaBackend
from aiokv.backends.cuda_driver import CudaDriver
from aiokv.backends.mapping import map_bytes
from aiokv.errors import ConfigError, CopyFailed
from aiokv.model.ids import Direction
from tests.backends.cuda.rig import Rig, Tensor, api, call
from tests.backends.support import GUARD_S, end_of, layout_of, load, store, wait_until
from tests.fakecuda import FakeDriver

OUT_OF_MEMORY: Final = 2
RELAXED: Final = 2
BATCH: Final = "cuMemcpyBatchAsync"
POP: Final = "cuCtxPopCurrent_v2"
EXCHANGE: Final = "cuThreadExchangeStreamCaptureMode"
MADE_AND_FREED: Final = {
    "cuEventCreate": "cuEventDestroy_v2",
    "cuStreamCreateWithPriority": "cuStreamDestroy_v2",
    "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRelease_v2",
    "cuMemHostRegister_v2": "cuMemHostUnregister",
}


def opened(rig: Rig) -> CudaBackend:
    return rig.open({"full": [rig.dense(8, 64)]}, gpu_blocks=8)


@contextmanager
def refused_once(fake: FakeDriver, symbol: str, *, nth: int = 1) -> Iterator[None]:
    """One call is refused, in any thread; this one then gets its context and its capture mode back."""
    depth = fake.context_depth()
    mode = call(api.cuThreadExchangeStreamCaptureMode, api.CUstreamCaptureMode(RELAXED))
    call(api.cuThreadExchangeStreamCaptureMode, mode)
    fake.inject(symbol, nth=nth, code=OUT_OF_MEMORY)
    yield
    call(api.cuThreadExchangeStreamCaptureMode, mode)
    while fake.context_depth() > depth:
        call(api.cuCtxPopCurrent)


def balance(fake: FakeDriver) -> Mapping[str, int]:
    """Of each kind of thing, how many more were asked for than given back."""
    return {made: fake.calls(made) - fake.calls(freed) for made, freed in MADE_AND_FREED.items()}


@pytest.mark.parametrize("batch", [store({1: 3}), load({3: 1})], ids=["store", "load"])
def test_a_copy_that_was_handed_over_goes_on_when_the_context_cannot_be_restored(
    watched_rig: Rig, batch: object
) -> None:
    """Law 4: a batch that is said to have failed gives its slots back, and this one still writes them."""
    backend, fake = opened(watched_rig), watched_rig.fake
    fake.hold()
    with refused_once(fake, POP):
        event = backend.submit(batch)  # type: ignore[arg-type]  # the list above is of several kinds
    assert (event.query(), fake.inflight()) == (EventStatus.PENDING, 1)
    fake.release()
    assert end_of(event) is EventStatus.DONE
    assert end_of(backend.submit(store({1: 3}))) is EventStatus.DONE


@pytest.mark.parametrize(("symbol", "nth"), [(POP, 1), (EXCHANGE, 2)])
def test_nor_does_it_fail_when_the_thread_that_handed_it_over_cannot(watched_rig: Rig, symbol: str, nth: int) -> None:
    fake = watched_rig.fake
    fake.set_limits(pinned_bytes=1)  # a batch of memory that is not pinned is handed over by the stream's thread
    backend = opened(watched_rig)
    fake.hold()
    before = fake.calls(POP)
    with refused_once(fake, symbol, nth=nth):
        event = backend.submit(store({1: 3}))
        wait_until(lambda: fake.calls(POP) > before)
    for _ in range(3):
        assert (event.query(), fake.inflight()) == (EventStatus.PENDING, 1)
    fake.release()
    assert end_of(event) is EventStatus.DONE


@pytest.mark.parametrize(("symbol", "nth"), [(POP, 1), (EXCHANGE, 2)])
def test_memory_that_was_registered_is_known_to_be(watched_rig: Rig, symbol: str, nth: int) -> None:
    """Who is told that it was not unmaps it, and the device goes on with it."""
    fake, memory = watched_rig.fake, map_bytes(mmap.PAGESIZE)
    address: int = memory.__array_interface__["data"][0]
    with refused_once(fake, symbol, nth=nth):
        watched_rig.driver.register_host(address, len(memory))
    assert fake.registered_bytes() == len(memory)
    watched_rig.driver.unregister_host(address)
    assert fake.registered_bytes() == 0


def test_that_the_caller_was_left_with_another_context_is_logged_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    backend = opened(rig)
    for _ in range(3):
        with refused_once(rig.fake, POP):
            backend.submit(store({1: 3}))
    told = [record.message for record in caplog.records if "could not be restored" in record.message]
    assert len(told) == 1
    assert "cuCtxPopCurrent: CUDA_ERROR_OUT_OF_MEMORY" in told[0]


def test_a_context_whose_capture_mode_cannot_be_set_is_not_left_current(rig: Rig) -> None:
    backend, depth = opened(rig), rig.fake.context_depth()
    event = backend.submit(store({1: 3}))
    with refused_once(rig.fake, EXCHANGE):
        event.query()
        assert rig.fake.context_depth() == depth


def test_a_time_that_the_driver_does_not_tell_costs_the_estimate_only(watched_rig: Rig) -> None:
    backend, fake = opened(watched_rig), watched_rig.fake
    fake.set_timing(latency_us=50)
    fake.inject("cuEventElapsedTime", code=OUT_OF_MEMORY)
    assert end_of(backend.submit(store({1: 3}))) is EventStatus.DONE
    assert backend.eta_seconds(Direction.STORE, 64) == 0.0
    assert end_of(backend.submit(store({1: 3}))) is EventStatus.DONE
    assert backend.eta_seconds(Direction.STORE, 64) > 0.0


@pytest.mark.parametrize(("symbol", "nth"), [(BATCH, 1), ("cuEventRecord", 1)])
def test_refused_batches_use_up_no_events(watched_rig: Rig, symbol: str, nth: int) -> None:
    backend, fake = opened(watched_rig), watched_rig.fake
    assert end_of(backend.submit(store({1: 3}))) is EventStatus.DONE
    made = fake.calls("cuEventCreate")
    for _ in range(20):
        fake.inject(symbol, nth=nth, code=OUT_OF_MEMORY)
        with pytest.raises(CopyFailed):
            backend.submit(store({1: 3}))
    assert fake.calls("cuEventCreate") == made


def test_batches_whose_end_could_not_be_marked_use_up_no_events(watched_rig: Rig) -> None:
    backend, fake = opened(watched_rig), watched_rig.fake
    assert end_of(backend.submit(store({1: 3}))) is EventStatus.DONE
    made = fake.calls("cuEventCreate")
    for _ in range(20):
        fake.inject("cuEventRecord", nth=2, code=OUT_OF_MEMORY)
        assert end_of(backend.submit(store({1: 3}))) is EventStatus.FAILED
    assert fake.calls("cuEventCreate") == made


@pytest.mark.parametrize(
    ("symbol", "nth"),
    [
        ("cuStreamCreateWithPriority", 1),
        ("cuStreamCreateWithPriority", 2),
        ("cuCtxGetStreamPriorityRange", 2),
        ("cuPointerGetAttribute", 1),
        ("cuMemsetD8Async", 1),
    ],
)
def test_what_cannot_be_opened_leaves_nothing_with_the_driver(watched_rig: Rig, symbol: str, nth: int) -> None:
    tensor, fake = watched_rig.dense(4, 16), watched_rig.fake
    before = balance(fake)
    fake.inject(symbol, nth=nth, code=OUT_OF_MEMORY)
    with pytest.raises(ConfigError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        CudaBackend().open(layout_of({"full": [tensor]}, gpu_blocks=4))
    refused = {symbol: 1} if symbol in before else {}
    assert balance(fake) == {kind: count + refused.get(kind, 0) for kind, count in before.items()}


def test_nor_does_an_arena_that_cannot_be_mapped(watched_rig: Rig) -> None:
    tensor, fake = watched_rig.dense(4, 16), watched_rig.fake
    before = balance(fake)
    layout = layout_of({"full": [tensor]}, gpu_blocks=4)
    with pytest.raises(ConfigError, match="cannot map"):
        CudaBackend().open(replace(layout, cpu_blocks=1 << 55))
    assert balance(fake) == before


def test_a_device_that_was_only_asked_where_the_tensors_are_is_let_go_of(watched_rig: Rig) -> None:
    """Its context takes some hundred megabytes of that device."""
    fake = watched_rig.fake
    fake.set_devices(2)
    second = CudaDriver.load(ordinal=1)
    with second.current():
        pointer = int(call(api.cuMemAlloc, 64))
    tensor = Tensor(fake=fake, pointer=pointer, span=64, shape=(4, 16), strides=np.empty((4, 16), np.uint8).strides)
    before = balance(fake)
    backend = CudaBackend()
    backend.open(layout_of({"full": [tensor]}, gpu_blocks=4))
    assert end_of(backend.submit(store({1: 3}))) is EventStatus.DONE
    assert backend.close(deadline_s=GUARD_S)
    assert balance(fake) == before
    second.release()
