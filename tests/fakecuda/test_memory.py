"""What the driver knows of memory, and what it says when memory goes while copies are in flight."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.fakecuda import FakeDriver, Kernel
from tests.fakecuda.build import SOURCES
from tests.fakecuda.calls import (
    PAGE,
    HostMemory,
    code,
    copy_batch,
    device_memory,
    new_stream,
    raw_batch,
    registered,
    succeed,
)

TOUCH_DEVICE_MEMORY = """
import ctypes
from tests.fakecuda import FakeDriver, Kernel
array = FakeDriver.load().allocate(64)
array.write(bytes(range(64)))
assert array.read() == bytes(range(64))
print("alive", flush=True)
ctypes.string_at(array.pointer, 1)
"""


def test_the_cpu_cannot_touch_device_memory_but_tests_can(fake_driver: FakeDriver) -> None:
    command = [sys.executable, "-c", TOUCH_DEVICE_MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SOURCES.parents[2], timeout=30)
    assert done.stdout == "alive\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


def test_reading_beyond_a_range_is_refused(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device = device_memory(cu, 100)
    assert fake_driver.read(device + 36, 64) == bytes(64)
    with pytest.raises(ValueError, match="one range"):
        fake_driver.read(device + 37, 64)


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 4 * PAGE), (PAGE, PAGE), (3 * PAGE + 8, PAGE), (-8, 16)])
def test_registering_an_overlap_is_refused(cu: ModuleType, offset: int, num_bytes: int) -> None:
    memory = HostMemory(8 * PAGE)
    base = memory.address + 2 * PAGE
    succeed(cu.cuMemHostRegister(base, 4 * PAGE - 100, 0))
    assert code(cu.cuMemHostRegister(base + offset, num_bytes, 0)) == 712
    succeed(cu.cuMemHostRegister(base + 4 * PAGE, PAGE, 0))


def test_pages_that_two_ranges_would_share_overlap(cu: ModuleType) -> None:
    memory = HostMemory(2 * PAGE)
    succeed(cu.cuMemHostRegister(memory.address, 100, 0))
    assert code(cu.cuMemHostRegister(memory.address + 200, 100, 0)) == 712


def test_unregistering_what_is_no_base_is_refused(cu: ModuleType, fake_driver: FakeDriver) -> None:
    memory = HostMemory(4 * PAGE)
    assert code(cu.cuMemHostUnregister(memory.address)) == 713
    succeed(cu.cuMemHostRegister(memory.address, 4 * PAGE, 0))
    assert code(cu.cuMemHostUnregister(memory.address + PAGE)) == 713
    assert fake_driver.registered_bytes() == 4 * PAGE
    succeed(cu.cuMemHostUnregister(memory.address))
    assert code(cu.cuMemHostUnregister(memory.address)) == 713
    assert fake_driver.registered_bytes() == 0


def test_nothing_cannot_be_registered(cu: ModuleType) -> None:
    memory = HostMemory(PAGE)
    assert code(cu.cuMemHostRegister(memory.address, 0, 0)) == 1
    assert code(cu.cuMemHostRegister(0, PAGE, 0)) == 1
    assert code(cu.cuMemHostUnregister(0)) == 1


def test_what_is_not_mapped_cannot_be_registered(cu: ModuleType) -> None:
    memory = HostMemory(PAGE)
    address = memory.address
    memory.unmap()
    assert code(cu.cuMemHostRegister(address, PAGE, 0)) == 1


def test_memory_is_out_beyond_the_limits(cu: ModuleType, fake_driver: FakeDriver) -> None:
    fake_driver.set_limits(device_bytes=8 * PAGE, pinned_bytes=8 * PAGE)
    assert code(cu.cuMemAlloc(9 * PAGE)) == 2
    device = device_memory(cu, 8 * PAGE)
    assert code(cu.cuMemAlloc(1)) == 2
    succeed(cu.cuMemFree(device))
    device_memory(cu, PAGE)
    memory = HostMemory(9 * PAGE)
    assert code(cu.cuMemHostRegister(memory.address, 9 * PAGE, 0)) == 2
    succeed(cu.cuMemHostRegister(memory.address, 8 * PAGE, 0))


def test_half_a_terabyte_in_one_call_is_too_much_whatever_is_free(cu: ModuleType, fake_driver: FakeDriver) -> None:
    fake_driver.set_limits(pinned_bytes=1 << 50)
    assert code(cu.cuMemHostRegister(HostMemory(PAGE).address, 512 << 30, 0)) == 2


def test_a_copy_that_straddles_two_registrations_is_invalid_and_named(cu: ModuleType, fake_driver: FakeDriver) -> None:
    memory, device = HostMemory(2 * PAGE), device_memory(cu, 2 * PAGE)
    for page in range(2):
        succeed(cu.cuMemHostRegister(memory.address + page * PAGE, PAGE, 0))
    fine = [(device + 8 * i, memory.address + 8 * i, 8) for i in range(4)]
    bad = (device, memory.address + PAGE - 8, 16)
    stream = new_stream(cu)
    assert raw_batch(fake_driver.library, [*fine, bad], stream=int(stream), attributes=[(0, 1)]) == (1, 4)
    assert code(cu.cuMemcpyHtoDAsync(bad[0], bad[1], bad[2], stream)) == 1
    assert fake_driver.pending() == 0


@pytest.mark.parametrize("place", ["off the end", "into another range from before it"])
def test_a_copy_over_the_edge_of_a_range_is_invalid(cu: ModuleType, place: str) -> None:
    memory, device = HostMemory(3 * PAGE), device_memory(cu, 3 * PAGE)
    succeed(cu.cuMemHostRegister(memory.address + PAGE, PAGE, 0))
    source = memory.address + (2 * PAGE - 8 if place == "off the end" else PAGE - 8)
    assert code(cu.cuMemcpyHtoDAsync(device, source, 16, new_stream(cu))) == 1


def test_pageable_memory_works_and_is_counted(cu: ModuleType, fake_driver: FakeDriver) -> None:
    memory, device = HostMemory(PAGE), device_memory(cu, PAGE)
    memory.write(0, b"pageable")
    succeed(cu.cuMemcpyHtoDAsync(device, memory.address, 8, new_stream(cu)))
    assert fake_driver.drain()
    assert fake_driver.read(device, 8) == b"pageable"
    assert fake_driver.pageable() == 1
    with registered(cu, PAGE) as known:
        succeed(cu.cuMemcpyHtoDAsync(device, known.address, 8, new_stream(cu)))
        assert fake_driver.drain()
    assert fake_driver.pageable() == 1


def test_pointers_tell_where_they_lie(cu: ModuleType) -> None:
    device = device_memory(cu, 100)
    attributes = cu.CUpointer_attribute
    kind = attributes.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert int(succeed(cu.cuPointerGetAttribute(kind, device + 50))) == 2
    assert int(succeed(cu.cuPointerGetAttribute(attributes.CU_POINTER_ATTRIBUTE_RANGE_SIZE, device + 50))) == 100
    with registered(cu, PAGE) as memory:
        assert int(succeed(cu.cuPointerGetAttribute(kind, memory.address))) == 1
        assert int(succeed(cu.cuMemHostGetDevicePointer(memory.address, 0))) == memory.address
    assert code(cu.cuPointerGetAttribute(kind, memory.address)) == 1


def free_device(cu: ModuleType, device: int, memory: HostMemory) -> None:
    succeed(cu.cuMemFree(device))


def unregister(cu: ModuleType, device: int, memory: HostMemory) -> None:
    succeed(cu.cuMemHostUnregister(memory.address))


def unmap(cu: ModuleType, device: int, memory: HostMemory) -> None:
    memory.unmap()


WAYS_TO_GO: list[tuple[Callable[[ModuleType, int, HostMemory], None], str]] = [
    (free_device, "cuMemFree"),
    (unregister, "cuMemHostUnregister"),
    (unmap, "no longer mapped"),
]


@pytest.mark.parametrize(("go", "told"), WAYS_TO_GO, ids=[go.__name__ for go, _ in WAYS_TO_GO])
def test_memory_that_goes_under_a_copy_is_a_violation_and_no_crash(
    cu: ModuleType, fake_driver: FakeDriver, go: Callable[[ModuleType, int, HostMemory], None], told: str
) -> None:
    memory, device, stream = HostMemory(256 * PAGE), device_memory(cu, 256 * PAGE), new_stream(cu)
    succeed(cu.cuMemHostRegister(memory.address, memory.num_bytes, 0))
    fake_driver.hold()
    copies = [(device + i * PAGE, memory.address + i * PAGE, PAGE) for i in range(256)]
    assert copy_batch(cu, copies, stream=stream) == 0
    assert fake_driver.violations() == []
    go(cu, device, memory)
    assert told in fake_driver.violations()[0]
    fake_driver.release()
    assert fake_driver.drain()


@pytest.mark.parametrize(("go", "told"), WAYS_TO_GO[:2], ids=[go.__name__ for go, _ in WAYS_TO_GO[:2]])
def test_memory_that_goes_after_its_copies_is_none(
    cu: ModuleType, fake_driver: FakeDriver, go: Callable[[ModuleType, int, HostMemory], None], told: str
) -> None:
    memory, device, stream = HostMemory(256 * PAGE), device_memory(cu, 256 * PAGE), new_stream(cu)
    succeed(cu.cuMemHostRegister(memory.address, memory.num_bytes, 0))
    assert copy_batch(cu, [(device, memory.address, 256 * PAGE)], stream=stream) == 0
    assert fake_driver.drain()
    go(cu, device, memory)
    assert fake_driver.violations() == []


def test_memory_unmapped_under_a_copy_is_told_when_the_copy_runs(cu: ModuleType, fake_driver: FakeDriver) -> None:
    """Also where it was never registered, and so nobody else can notice."""
    memory, device, stream = HostMemory(PAGE), device_memory(cu, PAGE), new_stream(cu)
    fake_driver.hold()
    succeed(cu.cuMemcpyHtoDAsync(device, memory.address, PAGE, stream))
    memory.unmap()
    assert fake_driver.violations() == []
    assert fake_driver.step(stream) == 1
    assert "was unmapped while a copy was in flight" in fake_driver.violations()[0]


def test_memory_unmapped_before_it_is_unregistered_is_a_violation(cu: ModuleType, fake_driver: FakeDriver) -> None:
    memory = HostMemory(PAGE)
    succeed(cu.cuMemHostRegister(memory.address, PAGE, 0))
    address = memory.address
    memory.unmap()
    succeed(cu.cuMemHostUnregister(address))
    assert "was unmapped before" in fake_driver.violations()[0]


def test_freed_device_memory_is_unknown_afterwards(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device = device_memory(cu, PAGE)
    succeed(cu.cuMemFree(device))
    assert code(cu.cuMemFree(device)) == 1
    with pytest.raises(ValueError, match="one range"):
        fake_driver.read(device, 1)


def test_a_slot_of_an_arena_is_in_flight_and_its_neighbours_are_not(cu: ModuleType, fake_driver: FakeDriver) -> None:
    """Blocks are slices of one range; the oracle must tell them apart, to the byte."""
    block = 100
    device, stream = device_memory(cu, 64 * block), new_stream(cu)
    with registered(cu, 64 * block) as memory:
        fake_driver.hold()
        copies = [(device + block * slot, memory.address + block * slot, block) for slot in (3, 5)]
        assert copy_batch(cu, copies, stream=stream) == 0
        touched = [fake_driver.inflight_range(device + block * slot, block) for slot in range(8)]
        assert touched == [0, 0, 0, 1, 0, 1, 0, 0]
        assert fake_driver.inflight_range(memory.address + block * 5, 1) == 1
        assert fake_driver.inflight_range(memory.address + block * 5 - 1, 1) == 0
        assert fake_driver.inflight() == 2
        fake_driver.launch(stream, Kernel().read(device, num_bytes=block))
        assert fake_driver.inflight_range(device, block) == 0, "compute may use it: that is what it is for"
        fake_driver.release()
        assert fake_driver.drain()
        assert fake_driver.inflight_range(device, 64 * block) == 0
        assert fake_driver.inflight() == 0


def test_overlapping_sources_of_a_batch_are_both_in_flight(cu: ModuleType, fake_driver: FakeDriver) -> None:
    device, stream = device_memory(cu, PAGE), new_stream(cu)
    fake_driver.hold()
    copies = [(device + 1024, device, 100), (device + 2048, device + 10, 5)]
    assert copy_batch(cu, copies, stream=stream) == 0
    assert [fake_driver.inflight_range(device + at, 1) for at in (9, 10, 50, 99, 100)] == [1, 1, 1, 1, 0]
