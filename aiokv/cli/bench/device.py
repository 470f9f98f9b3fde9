"""A CUDA device for benchmarks: the machine's, or in a checkout without one the fake driver of `tests/fakecuda`."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

import aiokv
from aiokv.backends.cuda_driver import CudaDriver
from aiokv.errors import ConfigError
from aiokv.model.ids import KeyEnum

__all__ = ["BenchDevice", "DeviceRows", "DriverKind", "find_driver", "load_fake_driver"]

_LIBRARY: Final = "libcuda.so.1"
CHECKOUT: Final = Path(aiokv.__file__).parents[1]
"""Where the tests would be."""
_FAKE_PACKAGE: Final = "tests.fakecuda"


class DriverKind(KeyEnum):
    """What answers."""

    CUDA = "cuda"
    FAKE = "fake"


def find_driver() -> DriverKind:
    """The driver of this process from now on; `ConfigError` where there is neither a real one nor a checkout's."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        load_fake_driver(why=f"there is no CUDA driver ({_LIBRARY})")
        return DriverKind.FAKE
    if hasattr(library, "fake_reset"):
        load_fake_driver(why="")
        return DriverKind.FAKE
    return DriverKind.CUDA


def load_fake_driver(*, why: str) -> Any:  # noqa: ANN401  # the `FakeDriver` of the checkout's tests
    """Build it and load it, before the bindings look for a driver; as new, if it was used before.

    `ConfigError` where that cannot be, behind `why` it is needed.
    """
    if not (CHECKOUT / _FAKE_PACKAGE.replace(".", "/") / "__init__.py").is_file():
        raise ConfigError(f"{why}, and no checkout with a fake one")
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    package = import_module(_FAKE_PACKAGE)
    try:
        driver = package.FakeDriver.load()
    except package.NoCompiler as error:
        raise ConfigError(f"{why}, and the fake one cannot be built: {error}") from error
    driver.reset()
    return driver


@final
class DeviceRows:
    """One tensor of the engine's, `[blocks, num_bytes]` of bytes."""

    def __init__(self, address: int, *, blocks: int, num_bytes: int) -> None:
        self.address = address
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": (blocks, num_bytes),
            "strides": None,
        }


@final
class BenchDevice:
    """Memory and streams of the engine's, by the driver's own bindings."""

    def __init__(self) -> None:
        self.driver = CudaDriver.load()
        self.api: Any = import_module("cuda.bindings.driver")

    def rows(self, content: NDArray[np.uint8]) -> DeviceRows:
        """A tensor with this content, shape `[blocks, bytes]`."""
        with self.driver.current():
            address = int(self.call("cuMemAlloc", content.nbytes))
            self.call("cuMemcpyHtoD", address, np.ascontiguousarray(content).ctypes.data, content.nbytes)
        return DeviceRows(address, blocks=content.shape[0], num_bytes=content.shape[1])

    def read(self, rows: DeviceRows, *, like: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """All bytes of a tensor, in the shape of `like`. Nothing may write them meanwhile."""
        content = np.empty_like(like)
        with self.driver.current():
            self.call("cuMemcpyDtoH", content.ctypes.data, rows.address, content.nbytes)
        return content

    def call(self, api: str, *arguments: Any) -> Any:  # noqa: ANN401  # whatever the bindings take and give
        """One call, which must succeed."""
        code, *results = getattr(self.api, api)(*arguments)
        self.driver.require_success(int(code), api=api)
        return results[0] if results else None

    def free(self, tensors: Sequence[DeviceRows]) -> None:
        """Give memory back that no copy uses any more."""
        with self.driver.current():
            for tensor in tensors:
                self.call("cuMemFree", tensor.address)
