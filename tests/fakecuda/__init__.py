"""A `libcuda.so.1` without a GPU: the driver API as far as aiokv uses it, with a judge built in.

`build_fake_driver()` compiles the C files of `driver/` with the system's compiler; `FakeDriver.load()` brings the
result into this process before `cuda.bindings` looks for a driver, and steers it. Real bindings run on it unmodified.

What it shows: streams that run behind the caller's back, events, registration, captures, faults, and violations, which
are what a real GPU would answer with wrong bytes or a crash, now and then. What it cannot show: bandwidth, costs, the
order of real DMA engines, PyTorch's CUDA tensors (a CUDA runtime needs more than the driver's public API).
"""

from tests.fakecuda.build import NoCompiler, build_fake_driver
from tests.fakecuda.control import FakeDriver
from tests.fakecuda.kernels import DeviceArray, Kernel, Launched

__all__ = ["DeviceArray", "FakeDriver", "Kernel", "Launched", "NoCompiler", "build_fake_driver"]
