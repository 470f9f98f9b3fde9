"""What the CUDA backend says and keeps when a call is refused, a copy fails, hangs, or the context is lost."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from aiokv.backends.arena import Layout
from aiokv.backends.base import EventStatus
from aiokv.backends.cuda import CudaBackend
from aiokv.backends.cuda_driver import CudaDriver
from aiokv.errors import BackendLost, ConfigError, CopyFailed, UsageError
from aiokv.model.ids import Direction
from aiokv.model.plan import Checksum
from tests.backends.cuda.rig import Rig, api, run_script
from tests.backends.support import GUARD_S, end_of, geometry_of, layout_of, load, store, wait_until

INVALID_VALUE, OUT_OF_MEMORY, ILLEGAL_ADDRESS = 1, 2, 700
BATCH = "cuMemcpyBatchAsync"


def opened(rig: Rig) -> CudaBackend:
    return rig.open({"full": [rig.dense(8, 64)]}, gpu_blocks=8)


@pytest.mark.parametrize("call", [BATCH, "cuEventRecord"])
def test_a_refused_call_is_one_failed_copy_and_starts_nothing(watched_rig: Rig, call: str) -> None:
    backend = opened(watched_rig)
    backend.cpu_slot(3)[:] = 7
    watched_rig.fake.inject(call, code=OUT_OF_MEMORY)
    with pytest.raises(CopyFailed, match="CUDA_ERROR_OUT_OF_MEMORY"):
        backend.submit(store({1: 3}))
    assert watched_rig.fake.inflight() == 0
    assert set(backend.cpu_slot(3).tolist()) == {7}
    assert end_of(backend.submit(store({1: 3}))) is EventStatus.DONE


def test_a_copy_whose_end_could_not_be_marked_fails_once_it_has_ended(watched_rig: Rig) -> None:
    backend, fake = opened(watched_rig), watched_rig.fake
    fake.hold()
    fake.inject("cuEventRecord", nth=2, code=OUT_OF_MEMORY)
    event = backend.submit(store({1: 3}))
    assert (event.query(), fake.inflight()) == (EventStatus.PENDING, 1)
    fake.release()
    assert end_of(event) is EventStatus.FAILED
    assert fake.inflight() == 0
    assert "cuEventRecord" in event.detail()
    assert end_of(backend.submit(store({1: 3}))) is EventStatus.DONE


def test_a_copy_that_cannot_be_watched_at_all_is_a_lost_backend(rig: Rig) -> None:
    backend, fake = opened(rig), rig.fake
    fake.hold()
    fake.inject("cuEventCreate", nth=2, code=OUT_OF_MEMORY)
    fake.inject("cuEventRecord", nth=2, code=OUT_OF_MEMORY)
    event = backend.submit(store({1: 3}))
    assert event.query() is EventStatus.LOST
    with pytest.raises(BackendLost):
        backend.submit(store({1: 3}))


def test_of_a_long_batch_what_was_started_ends_before_it_has_failed(watched_rig: Rig) -> None:
    layers = [watched_rig.dense(512, 4, seed=seed) for seed in range(40)]
    backend, fake = watched_rig.open({"full": layers}, gpu_blocks=512, cpu_blocks=512), watched_rig.fake
    fake.hold()
    fake.inject(BATCH, nth=2, code=OUT_OF_MEMORY)
    calls = fake.calls(BATCH)
    event = backend.submit(store({slot: slot for slot in range(512)}))
    wait_until(lambda: fake.calls(BATCH) - calls == 2)
    assert fake.inflight() > 0
    assert event.query() is EventStatus.PENDING
    fake.release()
    assert end_of(event) is EventStatus.FAILED
    assert fake.inflight() == 0
    assert end_of(backend.submit(store({1: 3}))) is EventStatus.DONE


def test_a_long_batch_of_which_nothing_was_started_fails_by_its_event(watched_rig: Rig) -> None:
    layers = [watched_rig.dense(512, 4, seed=seed) for seed in range(40)]
    backend, fake = watched_rig.open({"full": layers}, gpu_blocks=512, cpu_blocks=512), watched_rig.fake
    fake.inject(BATCH, code=OUT_OF_MEMORY)
    event = backend.submit(store({slot: slot for slot in range(512)}))
    assert end_of(event) is EventStatus.FAILED
    assert "OUT_OF_MEMORY" in event.detail()


def test_of_single_copies_those_that_were_started_end_first(watched_rig: Rig) -> None:
    watched_rig.fake.set_driver_version(12_030)
    layers = [watched_rig.dense(8, 4, seed=seed) for seed in range(3)]
    backend, fake = watched_rig.open({"full": layers}, gpu_blocks=8), watched_rig.fake
    fake.hold()
    fake.inject("cuMemcpyAsync", nth=2, code=OUT_OF_MEMORY)
    event = backend.submit(store({1: 3}))
    assert (event.query(), fake.inflight()) == (EventStatus.PENDING, 1)
    fake.release()
    assert end_of(event) is EventStatus.FAILED


def test_a_lost_context_loses_all_that_is_in_flight_and_takes_nothing_more(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    backend, fake = opened(rig), rig.fake
    well = backend.submit(store({2: 2}))
    assert end_of(well) is EventStatus.DONE
    fake.hold()
    events = [backend.submit(store({1: 3})), backend.submit(load({0: 4})), backend.submit(store({5: 5}))]
    for direction in Direction:
        assert backend.eta_seconds(direction, 1) >= 0
    fake.fail_next_copy(backend.stream_of(Direction.STORE), ILLEGAL_ADDRESS)
    fake.release()
    assert {end_of(event) for event in events} == {EventStatus.LOST}
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in events[0].detail()
    assert well.query() is EventStatus.DONE
    with pytest.raises(BackendLost, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        backend.submit(store({1: 3}))
    registered = fake.registered_bytes()
    with caplog.at_level(logging.ERROR):
        assert not backend.close(deadline_s=GUARD_S)
    assert "leaked on purpose" in caplog.text
    assert fake.registered_bytes() == registered
    assert fake.violations() == []


def test_a_context_that_is_found_lost_at_a_submission(rig: Rig) -> None:
    backend, fake = opened(rig), rig.fake
    stream = backend.stream_of(Direction.STORE)
    fake.fail_next_copy(stream, ILLEGAL_ADDRESS)
    backend.submit(store({1: 3}))
    wait_until(lambda: int(api.cuStreamQuery(stream)[0]) == ILLEGAL_ADDRESS)
    with pytest.raises(BackendLost):
        backend.submit(load({1: 3}))
    with pytest.raises(BackendLost):
        backend.fence(0)


def test_a_hung_copy_keeps_its_memory_when_the_backend_is_closed(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    tensor = rig.dense(8, 64)
    held = weakref.ref(tensor)
    backend, fake = rig.open({"full": [tensor]}, gpu_blocks=8), rig.fake
    fake.hold()
    event = backend.submit(store({1: 3}))
    registered = fake.registered_bytes()
    with caplog.at_level(logging.ERROR):
        assert not backend.close(deadline_s=0.05)
        assert not backend.close(deadline_s=GUARD_S), "the answer stays"
    assert "512 bytes of CPU arena" in caplog.text
    assert event.query() is EventStatus.LOST
    assert fake.registered_bytes() == registered
    del tensor, backend
    rig.backends.clear()
    assert held() is not None, "a copy may still touch it"
    fake.release()
    wait_until(lambda: fake.inflight() == 0)
    assert fake.violations() == []


def test_a_batch_that_was_not_handed_over_yet_is_lost_when_the_backend_is_closed(rig: Rig) -> None:
    backend, fake = opened(rig), rig.fake
    fake.hold()
    events = [backend.submit(store({1: 3})) for _ in range(400)]
    assert not backend.close(deadline_s=0.05)
    assert {event.query() for event in events} == {EventStatus.LOST}
    assert fake.violations() == []


def test_closing_finishes_what_was_submitted_and_gives_everything_back(watched_rig: Rig) -> None:
    tensor = watched_rig.dense(8, 64)
    held = weakref.ref(tensor)
    backend, fake = watched_rig.open({"full": [tensor]}, gpu_blocks=8), watched_rig.fake
    events = [backend.submit(store({1 + number % 7: number % 8})) for number in range(700)]
    assert backend.close(deadline_s=GUARD_S)
    assert {event.query() for event in events} == {EventStatus.DONE}
    assert fake.registered_bytes() == 0
    for made, freed in (("cuEventCreate", "cuEventDestroy_v2"), ("cuStreamCreateWithPriority", "cuStreamDestroy_v2")):
        assert fake.calls(made) == fake.calls(freed) > 0
    assert fake.calls("cuDevicePrimaryCtxRelease_v2") >= 1
    watched_rig.backends.clear()
    del tensor, backend, events
    assert held() is None, "nothing holds the engine's tensors any more"


def test_the_tensors_are_held_while_the_backend_is_open(rig: Rig) -> None:
    tensor = rig.dense(8, 64)
    held = weakref.ref(tensor)
    backend = rig.open({"full": [tensor]}, gpu_blocks=8)
    del tensor
    assert held() is not None
    assert end_of(backend.submit(store({1: 3}))) is EventStatus.DONE


def test_a_backend_that_nobody_closed_keeps_its_memory(rig: Rig) -> None:
    tensor = rig.dense(8, 64)
    held = weakref.ref(tensor)
    backend = rig.open({"full": [tensor]}, gpu_blocks=8)
    rig.fake.hold()
    backend.submit(store({1: 3}))
    rig.backends.clear()
    del tensor, backend
    assert held() is not None
    rig.fake.release()
    wait_until(lambda: rig.fake.inflight() == 0)
    assert rig.fake.violations() == []


def test_events_may_be_asked_while_the_backend_is_being_closed(watched_rig: Rig) -> None:
    """The loop still polls while a worker thread closes: no handle that is freed may be asked."""
    backend, fake = opened(watched_rig), watched_rig.fake
    fake.set_timing(latency_us=100)
    events = [backend.submit(store({1 + number % 7: number % 8})) for number in range(60)]
    closed: list[bool] = []
    closing = threading.Thread(target=lambda: closed.append(backend.close(deadline_s=GUARD_S)))
    closing.start()
    while closing.is_alive():
        assert EventStatus.LOST not in {event.query() for event in events}
    assert closed == [True]
    assert {event.query() for event in events} == {EventStatus.DONE}


def test_without_a_cpu_tier_there_is_nothing_to_copy_and_nothing_to_pin(watched_rig: Rig) -> None:
    tensor = watched_rig.dense(8, 64)
    backend = watched_rig.open({"full": [tensor]}, gpu_blocks=8, cpu_blocks=0)
    assert tensor.blocks()[0] == bytes(64)
    assert watched_rig.fake.registered_bytes() == 0
    with pytest.raises(UsageError, match="the pool has 0"):
        backend.submit(store({1: 0}))
    assert end_of(backend.submit(store({}))) is EventStatus.DONE
    assert backend.close(deadline_s=GUARD_S)


CALLS: dict[str, Callable[[CudaBackend], object]] = {
    "submit": lambda backend: backend.submit(store({1: 0})),
    "fence": lambda backend: backend.fence(0),
    "wait": lambda backend: backend.wait(0, None),
    "block_bytes": lambda backend: backend.block_bytes("full"),
    "eta_seconds": lambda backend: backend.eta_seconds(Direction.LOAD, 1),
    "cpu_slot": lambda backend: backend.cpu_slot(0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_before_open_and_after_close_it_is_not_usable(rig: Rig, call: Callable[[CudaBackend], object]) -> None:
    with pytest.raises(UsageError):
        call(CudaBackend())
    backend = opened(rig)
    assert backend.close(deadline_s=GUARD_S)
    with pytest.raises(UsageError):
        call(backend)
    assert backend.close(deadline_s=GUARD_S)
    with pytest.raises(UsageError):
        backend.open(layout_of({"full": [rig.dense(8, 64)]}, gpu_blocks=8))


def test_closing_what_was_never_opened_is_fine() -> None:
    assert CudaBackend().close(deadline_s=0.0)


@pytest.mark.parametrize("batch", [store({8: 0}), store({-1: 0}), store({0: 8}), load({8: 1}), load({0: 9})])
def test_slots_that_do_not_exist_are_refused(rig: Rig, batch: object) -> None:
    backend = opened(rig)
    with pytest.raises(UsageError, match="the pool has 8"):
        backend.submit(batch)  # type: ignore[arg-type]  # the list above is of several kinds
    assert rig.fake.inflight() == 0


def test_memory_that_is_not_the_devices_is_refused_by_name(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="on cpu"):
        CudaBackend().open(layout_of({"full": [np.zeros((4, 8), np.uint8)]}, gpu_blocks=4))
    with pytest.raises(ConfigError, match="needs arenas"):
        CudaBackend().open(Layout(geometry=geometry_of("full"), gpu_blocks=4, cpu_blocks=4))


@pytest.mark.parametrize("call", ["cuStreamCreateWithPriority", "cuMemsetD8Async", "cuDevicePrimaryCtxRetain"])
def test_what_fails_while_it_opens_is_told_and_given_back(rig: Rig, call: str) -> None:
    tensor = rig.dense(4, 16)
    rig.fake.inject(call, code=OUT_OF_MEMORY)
    with pytest.raises(ConfigError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        CudaBackend().open(layout_of({"full": [tensor]}, gpu_blocks=4))
    wait_until(lambda: rig.fake.registered_bytes() == 0)


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda fake: fake.hide(), "CUDA_ERROR_NO_DEVICE"),
        (lambda fake: fake.set_driver_version(11_080), "supports CUDA 11.8, aiokv needs 12.0"),
    ],
)
def test_what_is_missing_is_said(rig: Rig, prepare: Callable[[object], None], reason: str) -> None:
    tensor = rig.dense(4, 16)
    prepare(rig.fake)
    with pytest.raises(ConfigError, match=reason):
        CudaBackend().open(layout_of({"full": [tensor]}, gpu_blocks=4))


def test_a_device_that_does_not_exist_is_said(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="there is no device 9, the driver sees"):
        CudaDriver.load(ordinal=9)
    assert rig.driver.ordinal == 0


@pytest.mark.parametrize("how", [Checksum.FULL, Checksum.SAMPLED])
def test_blocks_that_have_changed_in_cpu_memory_are_found_when_they_are_loaded(watched_rig: Rig, how: Checksum) -> None:
    tensor = watched_rig.dense(8, 64)
    backend = watched_rig.open({"full": [tensor]}, gpu_blocks=8, checksum=how)
    assert end_of(backend.submit(store({1: 0, 2: 1, 3: 2}))) is EventStatus.DONE
    well = backend.submit(load({0: 4, 1: 5, 2: 6}))
    assert (end_of(well), list(well.corrupt_copies())) == (EventStatus.DONE, [])
    backend.cpu_slot(1)[5] ^= 0xFF
    found = backend.submit(load({2: 6, 1: 5, 0: 4}))
    assert (end_of(found), list(found.corrupt_copies())) == (EventStatus.CORRUPT, [1])
    assert "1 of 3 blocks" in found.detail()
    assert end_of(backend.submit(store({2: 1}))) is EventStatus.DONE
    assert end_of(backend.submit(load({1: 5}))) is EventStatus.DONE
    assert backend.close(deadline_s=GUARD_S)


def test_a_forked_child_never_calls_the_driver() -> None:
    """In a process of its own: a test must not fork the suite."""
    said = run_script("forking.py")
    assert said == "child: 6 refused, event lost or refused, no driver call\nparent: done, closed True\n"
