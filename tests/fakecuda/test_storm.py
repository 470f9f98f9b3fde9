"""Many copies at once, from many threads, with every adversary: right bytes, no violation, nothing left."""

from __future__ import annotations

import random
import threading
from types import ModuleType

import pytest

from tests.fakecuda import FakeDriver, Kernel
from tests.fakecuda.calls import (
    ANY,
    STREAM,
    code,
    copy_batch,
    device_memory,
    new_event,
    new_stream,
    registered,
    succeed,
)

BLOCK = 256
IN_FLIGHT = 10_000


def test_ten_thousand_copies_in_flight(cu: ModuleType, watched_driver: FakeDriver) -> None:
    watched_driver.set_queue_depth(0)
    device = device_memory(cu, BLOCK * IN_FLIGHT)
    streams = [new_stream(cu) for _ in range(4)]
    events = [new_event(cu) for _ in range(IN_FLIGHT)]
    with registered(cu, BLOCK * IN_FLIGHT) as memory:
        content = random.Random(5).randbytes(BLOCK * IN_FLIGHT)
        memory.write(0, content)
        watched_driver.hold()
        for i, event in enumerate(events):
            succeed(cu.cuMemcpyHtoDAsync(device + BLOCK * i, memory.address + BLOCK * i, BLOCK, streams[i % 4]))
            succeed(cu.cuEventRecord(event, streams[i % 4]))
        assert watched_driver.inflight() == IN_FLIGHT
        asked = random.Random(6).sample(range(IN_FLIGHT), 100)
        assert [watched_driver.inflight_range(device + BLOCK * i, BLOCK) for i in asked] == [1] * 100
        watched_driver.release()
        assert watched_driver.drain(timeout_s=50)
        assert [code(cu.cuEventQuery(event)) for event in events] == [0] * IN_FLIGHT
        assert watched_driver.read(device, BLOCK * IN_FLIGHT) == content


def test_a_large_batch_over_a_large_batch_is_judged_exactly(cu: ModuleType, fake_driver: FakeDriver) -> None:
    """Interleaved blocks of two streams: all in the same granules, none in conflict; then one that is."""
    fake_driver.adversaries()
    count = 4096
    device, streams = device_memory(cu, BLOCK * count), [new_stream(cu), new_stream(cu)]
    fake_driver.hold()
    with registered(cu, BLOCK * count) as memory:
        for half, stream in enumerate(streams):
            copies = [(device + 32 * i, memory.address + 32 * i, 32) for i in range(half, count, 2)]
            assert copy_batch(cu, copies, stream=stream, order=ANY) == 0
        assert fake_driver.violations() == []
        assert copy_batch(cu, [(device + 32 * 7 + 31, memory.address, 1)], stream=streams[0]) == 0
        assert len(fake_driver.violations()) == 1
        fake_driver.release()
        assert fake_driver.drain()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_threads_that_copy_each_on_a_stream_of_their_own(cu: ModuleType, watched_driver: FakeDriver, seed: int) -> None:
    watched_driver.adversaries(seed=seed)
    watched_driver.set_queue_depth(16)
    context, rounds, width = succeed(cu.cuCtxGetCurrent()), 60, 16
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            draw = random.Random(seed * 100 + worker)
            succeed(cu.cuCtxPushCurrent(context))
            device, stream, compute = device_memory(cu, BLOCK * width), new_stream(cu), new_stream(cu)
            computed, stored = new_event(cu), new_event(cu)
            with registered(cu, BLOCK * width) as memory:
                for number in range(rounds):
                    value = draw.randrange(256)
                    slots = draw.sample(range(width), width)
                    watched_driver.launch(compute, Kernel().fill(device, value=value, num_bytes=BLOCK * width))
                    succeed(cu.cuEventRecord(computed, compute))
                    succeed(cu.cuStreamWaitEvent(stream, computed, 0))
                    copies = [(memory.address + BLOCK * i, device + BLOCK * slots[i], BLOCK) for i in range(width)]
                    assert copy_batch(cu, copies, stream=stream, order=STREAM) == 0
                    succeed(cu.cuEventRecord(stored, stream))
                    succeed(cu.cuStreamWaitEvent(compute, stored, 0))
                    if number % 7 == worker % 7:
                        succeed(cu.cuEventSynchronize(stored))
                        assert memory.read(0, BLOCK * width) == bytes([value]) * (BLOCK * width)
                succeed(cu.cuStreamSynchronize(stream))
            succeed(cu.cuStreamDestroy(stream))
            succeed(cu.cuMemFree(device))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not [thread for thread in threads if thread.is_alive()]
    assert failures == []
    assert watched_driver.calls("cuEventRecord") == 4 * rounds * 2
