"""How a program finds its functions, its devices and the names of errors."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import ModuleType

import pytest

from tests.fakecuda import FakeDriver
from tests.fakecuda.build import SOURCES
from tests.fakecuda.calls import code, succeed


def look_up(driver: FakeDriver, name: str, *, version: int) -> tuple[int, int | None, int]:
    """The code, the address and the status of `cuGetProcAddress_v2`."""
    function, status = ctypes.c_void_p(), ctypes.c_int(-1)
    result = driver.library.cuGetProcAddress_v2(
        name.encode(), ctypes.byref(function), version, ctypes.c_uint64(0), ctypes.byref(status)
    )
    return result, function.value, status.value


def address_of(driver: FakeDriver, symbol: str) -> int | None:
    return ctypes.cast(getattr(driver.library, symbol), ctypes.c_void_p).value


def test_each_version_of_a_function_is_found_by_its_version(fake_driver: FakeDriver) -> None:
    old = look_up(fake_driver, "cuMemcpyBatchAsync", version=12080)
    new = look_up(fake_driver, "cuMemcpyBatchAsync", version=13000)
    assert old == (0, address_of(fake_driver, "cuMemcpyBatchAsync"), 0)
    assert new == (0, address_of(fake_driver, "cuMemcpyBatchAsync_v2"), 0)
    assert look_up(fake_driver, "cuEventElapsedTime", version=12070)[1] == address_of(fake_driver, "cuEventElapsedTime")


def test_a_function_that_is_too_new_or_unknown_has_no_address(fake_driver: FakeDriver) -> None:
    assert look_up(fake_driver, "cuMemcpyBatchAsync", version=12070) == (0, None, 2)
    assert look_up(fake_driver, "cuNoSuchFunction", version=12000) == (0, None, 1)


def test_a_version_above_the_drivers_is_an_invalid_value(fake_driver: FakeDriver) -> None:
    fake_driver.set_driver_version(12080)
    assert look_up(fake_driver, "cuMemcpyBatchAsync", version=12090)[0] == 1
    assert look_up(fake_driver, "cuMemcpyBatchAsync", version=12080)[0] == 0


def test_before_init_calls_are_refused(fake_driver: FakeDriver) -> None:
    count = ctypes.c_int()
    assert fake_driver.library.cuDeviceGetCount(ctypes.byref(count)) == 3
    assert fake_driver.library.cuInit(0) == 0
    assert fake_driver.library.cuDeviceGetCount(ctypes.byref(count)) == 0
    assert count.value == 1


def test_a_hidden_driver_has_no_device(fake_driver: FakeDriver) -> None:
    fake_driver.hide()
    assert fake_driver.library.cuInit(0) == 100
    fake_driver.show()
    assert fake_driver.library.cuInit(0) == 0


def test_devices_have_names_and_attributes(cu: ModuleType, fake_driver: FakeDriver) -> None:
    fake_driver.set_devices(2)
    device = succeed(cu.cuDeviceGet(1))
    name = succeed(cu.cuDeviceGetName(64, device))
    assert name.split(b"\0")[0] == b"Fake GPU 1"
    numa = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
    assert succeed(cu.cuDeviceGetAttribute(numa, device)) == -1
    fake_driver.set_attribute(numa, 1)
    assert succeed(cu.cuDeviceGetAttribute(numa, device)) == 1
    assert code(cu.cuDeviceGet(2)) == 101


def test_errors_have_their_names(cu: ModuleType) -> None:
    results = cu.CUresult
    assert succeed(cu.cuGetErrorName(results.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)) == (
        b"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"
    )
    assert succeed(cu.cuGetErrorString(results.CUDA_ERROR_NOT_READY))


ON_DRIVER_12_8 = """
from tests.fakecuda import FakeDriver
FakeDriver.load(driver_version=12080)
from cuda.bindings import driver as cu
import cuda.bindings
from tests.fakecuda.calls import succeed, new_stream, device_memory, copy_batch, raw_batch, HostMemory
driver = FakeDriver.load(driver_version=12080)
succeed(cu.cuInit(0))
assert succeed(cu.cuDriverGetVersion()) == 12080
succeed(cu.cuCtxPushCurrent(succeed(cu.cuDevicePrimaryCtxRetain(0))))
stream, device, host = new_stream(cu), device_memory(cu, 4096), HostMemory(4096)
host.write(0, b"over 12.8")
copies = [(device, host.address, 9)]
major = int(cuda.bindings.__version__.split(".")[0])
try:
    code = copy_batch(cu, copies, stream=stream)
    assert major == 12 and code == 0, (major, code)
except Exception as error:
    assert major == 13 and "cuMemcpyBatchAsync_v2" in str(error), error
assert raw_batch(driver.library, copies, stream=int(stream), attributes=[(0, 1)])[0] == 0
assert driver.drain()
print(driver.read(device, 9).decode())
"""


def test_a_driver_of_12_8_has_the_old_batch_only(cu: ModuleType) -> None:
    """The bindings ask for their functions once, so this needs a process of its own."""
    command = [sys.executable, "-c", ON_DRIVER_12_8]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SOURCES.parents[2], timeout=50)
    assert done.stdout == "over 12.8\n", done.stderr


@pytest.mark.parametrize("nth", [1, 3])
def test_an_injected_fault_hits_the_nth_call_and_no_other(cu: ModuleType, fake_driver: FakeDriver, nth: int) -> None:
    calls = fake_driver.calls("cuEventCreate")
    fake_driver.inject("cuEventCreate", nth=nth, code=2)
    assert [code(cu.cuEventCreate(2)) for _ in range(4)] == [2 if n == nth else 0 for n in range(1, 5)]
    assert fake_driver.calls("cuEventCreate") == calls + 4


def test_a_fault_of_an_unknown_function_is_refused(fake_driver: FakeDriver) -> None:
    with pytest.raises(ValueError, match="no such"):
        fake_driver.inject("cuNoSuchFunction", code=2)
