"""Copies move the bytes they say, in the direction they say, and refuse what a real driver refuses."""

from __future__ import annotations

import random
import threading
import time
from types import ModuleType

import pytest

from tests.fakecuda import FakeDriver
from tests.fakecuda.calls import (
    ANY,
    DURING_API_CALL,
    PAGE,
    STREAM,
    code,
    copy_batch,
    device_memory,
    new_stream,
    raw_batch,
    registered,
    succeed,
)

BLOCK = 96
NUM_BLOCKS = 200


@pytest.mark.parametrize("order", [STREAM, DURING_API_CALL, ANY])
def test_a_batch_copies_both_directions_byte_for_byte(cu: ModuleType, watched_driver: FakeDriver, order: int) -> None:
    draw = random.Random(order)
    content = draw.randbytes(BLOCK * NUM_BLOCKS)
    device, stream = device_memory(cu, len(content)), new_stream(cu)
    there, back = (draw.sample(range(NUM_BLOCKS), NUM_BLOCKS) for _ in range(2))
    with registered(cu, len(content)) as source, registered(cu, len(content)) as target:
        source.write(0, content)
        up = [(device + BLOCK * slot, source.address + BLOCK * i, BLOCK) for i, slot in enumerate(there)]
        down = [(target.address + BLOCK * back[i], device + BLOCK * slot, BLOCK) for i, slot in enumerate(there)]
        assert copy_batch(cu, up, stream=stream, order=order) == 0
        assert copy_batch(cu, down, stream=stream, order=STREAM) == 0
        assert watched_driver.drain()
        for i in range(NUM_BLOCKS):
            assert target.read(BLOCK * back[i], BLOCK) == content[BLOCK * i : BLOCK * (i + 1)]


def test_plain_copies_go_in_their_direction_only(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream = device_memory(cu, 2 * PAGE), new_stream(cu)
    with registered(cu, 2 * PAGE) as memory:
        memory.write(0, b"there and back")
        succeed(cu.cuMemcpyHtoDAsync(device, memory.address, 14, stream))
        succeed(cu.cuMemcpyDtoDAsync(device + PAGE, device, 14, stream))
        succeed(cu.cuMemcpyDtoHAsync(memory.address + PAGE, device + PAGE, 14, stream))
        assert fake_driver.drain()
        assert memory.read(PAGE, 14) == b"there and back"
        assert code(cu.cuMemcpyHtoDAsync(memory.address, device, 14, stream)) == 1
        assert code(cu.cuMemcpyHtoDAsync(device, device + PAGE, 14, stream)) == 1
        assert code(cu.cuMemcpyDtoHAsync(device, device + PAGE, 14, stream)) == 1
        assert code(cu.cuMemcpyDtoDAsync(device, memory.address, 14, stream)) == 1
        succeed(cu.cuMemcpyAsync(device, memory.address + PAGE, 14, stream))
        assert fake_driver.drain()


def test_synchronous_copies_are_done_when_they_return(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device = device_memory(cu, PAGE)
    with registered(cu, PAGE) as memory:
        memory.write(0, b"now")
        succeed(cu.cuMemcpyHtoD(device, memory.address, 3))
        assert fake_driver.read(device, 3) == b"now"
        succeed(cu.cuMemsetD8(device, 7, 3))
        succeed(cu.cuMemcpyDtoH(memory.address, device, 3))
        assert memory.read(0, 3) == b"\7\7\7"


def test_copying_nothing_does_nothing(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream = device_memory(cu, PAGE), new_stream(cu)
    fake_driver.hold()
    succeed(cu.cuMemcpyDtoDAsync(device, device + 8, 0, stream))
    assert fake_driver.pending() == 0


@pytest.mark.parametrize(
    ("attributes", "fine"),
    [
        ([(0, STREAM)], True),
        ([(0, STREAM), (1, ANY), (3, DURING_API_CALL)], True),
        ([], False),
        ([(1, STREAM)], False),
        ([(0, STREAM), (0, ANY)], False),
        ([(0, STREAM), (2, ANY), (1, ANY)], False),
        ([(0, STREAM), (4, ANY)], False),
        ([(0, 0)], False),
        ([(0, 4)], False),
    ],
)
def test_attributes_follow_their_rules(
    cu: ModuleType,
    fake_driver: FakeDriver,
    attributes: list[tuple[int, int]],
    fine: bool,  # noqa: FBT001 - a table's column
) -> None:
    device, stream = device_memory(cu, PAGE), new_stream(cu)
    copies = [(device + 64 * i, device + 2048 + 64 * i, 64) for i in range(4)]
    result, failed = raw_batch(fake_driver.library, copies, stream=int(stream), attributes=attributes)
    assert (result == 0) == fine
    assert failed == 2**64 - 1, "no single copy is to blame"
    assert fake_driver.drain()


def test_an_empty_batch_an_empty_copy_and_the_legacy_stream_are_invalid(
    cu: ModuleType, fake_driver: FakeDriver
) -> None:
    device, stream = device_memory(cu, PAGE), new_stream(cu)
    good = (device, device + 64, 64)
    assert raw_batch(fake_driver.library, [], stream=int(stream), attributes=[(0, STREAM)])[0] == 1
    empty = [good, (device + 128, device + 256, 0)]
    assert raw_batch(fake_driver.library, empty, stream=int(stream), attributes=[(0, STREAM)]) == (1, 1)
    for legacy in (0, 1):
        assert raw_batch(fake_driver.library, [good], stream=legacy, attributes=[(0, STREAM)])[0] == 1
    assert raw_batch(fake_driver.library, [good], stream=12345678, attributes=[(0, STREAM)])[0] == 400
    assert fake_driver.pending() == 0


def test_a_written_value_arrives_in_order(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream = device_memory(cu, PAGE), new_stream(cu)
    fake_driver.hold()
    for value in (1, 0x01020304):
        succeed(cu.cuStreamWriteValue32(stream, device, value, 0))
    succeed(cu.cuMemsetD32Async(device + 4, 0x0A0B0C0D, 2, stream))
    assert fake_driver.step(stream) == 1
    assert fake_driver.read(device, 4) == bytes([1, 0, 0, 0])
    assert fake_driver.step(stream, n=5) == 2
    assert fake_driver.read(device, 12) == bytes([4, 3, 2, 1] + 2 * [13, 12, 11, 10])


def test_a_full_queue_makes_the_caller_wait(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream = device_memory(cu, PAGE), new_stream(cu)
    fake_driver.set_queue_depth(8)
    fake_driver.hold()
    context, submitted = succeed(cu.cuCtxGetCurrent()), list[int]()

    def submit() -> None:
        succeed(cu.cuCtxPushCurrent(context))
        for _ in range(9):
            submitted.append(code(cu.cuMemcpyDtoDAsync(device, device + 64, 64, stream)))

    thread = threading.Thread(target=submit)
    thread.start()
    deadline = time.monotonic() + 10
    while not fake_driver.blocked_submissions() and time.monotonic() < deadline:
        thread.join(0.001)
    assert (len(submitted), fake_driver.pending()) == (8, 8)
    assert fake_driver.step(stream) == 1
    thread.join(10)
    assert submitted == [0] * 9
    assert fake_driver.pending() == 8
    fake_driver.release()
    assert fake_driver.drain()


def test_a_full_queue_that_never_empties_is_a_violation_and_no_hang(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream = device_memory(cu, PAGE), new_stream(cu)
    fake_driver.set_queue_depth(8)
    fake_driver.set_patience(0.05)
    fake_driver.hold()
    for _ in range(9):
        succeed(cu.cuMemcpyDtoDAsync(device, device + 64, 64, stream))
    assert "queue of 8 operations" in fake_driver.violations()[0]
    assert fake_driver.pending() == 9
