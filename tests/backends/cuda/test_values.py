"""What is taken for a device tensor, for a stream, and what is said where something is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from aiokv import ConfigError, KVRuntime
from aiokv.backends.cuda_driver import CudaError
from aiokv.backends.cuda_events import stream_handle
from aiokv.errors import UsageError
from tests.backends.support import device_settings, layout_of
from tests.runtime.support import config_of

ADDRESS = 0x7F00_0000_0000


class DeviceArray:
    """What CuPy and others say of device memory."""

    def __init__(self, **interface: Any) -> None:  # noqa: ANN401
        whole = {"shape": (4, 2, 8), "typestr": "<f2", "data": (ADDRESS, False), "version": 3}
        self.__cuda_array_interface__: object = whole | interface


class PlacedArray(DeviceArray):
    def __init__(self, kind: int, ordinal: int) -> None:
        super().__init__()
        self._device = kind, ordinal

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def test_a_device_array_is_read_by_its_interface() -> None:
    layout = layout_of({"full": [DeviceArray()]}, gpu_blocks=4)
    (fragment,) = layout.fragments["full"]
    assert (fragment.address, fragment.block_stride, fragment.num_bytes) == (ADDRESS, 32, 32)
    assert layout.device == "cuda"


def test_its_strides_are_bytes() -> None:
    array = DeviceArray(shape=(2, 4, 8), strides=(24, 64, 2))
    keys, values = layout_of({"full": [array]}, gpu_blocks=4).fragments["full"]
    assert (keys.address, keys.num_bytes, keys.block_stride) == (ADDRESS, 16, 64)
    assert (values.address, values.num_bytes, values.block_stride) == (ADDRESS + 24, 16, 64)


def test_it_may_say_on_which_device_it_is() -> None:
    assert layout_of({"full": [PlacedArray(2, 3)]}, gpu_blocks=4).device == "cuda:3"


def test_arrays_of_two_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="cuda:1"):
        layout_of({"full": [PlacedArray(2, 0), PlacedArray(2, 1)]}, gpu_blocks=4)


@pytest.mark.parametrize(
    ("interface", "reason"),
    [
        ({"data": (ADDRESS, True)}, "read-only"),
        ({"data": ADDRESS}, "cannot be read"),
        ({"data": (None, False)}, "cannot be read"),
        ({"mask": object()}, "masked"),
        ({"shape": None}, "cannot be read"),
        ({"typestr": "no such type"}, "cannot be read"),
        ({"strides": (16,)}, "strides"),
        ({"shape": (5, 8)}, "must start with"),
        ({"shape": (4, 0)}, "empty"),
    ],
)
def test_an_interface_that_says_something_else_is_refused(interface: Mapping[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        layout_of({"full": [DeviceArray(**interface)]}, gpu_blocks=4)


def test_memory_of_no_cuda_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        layout_of({"full": [PlacedArray(10, 0)]}, gpu_blocks=4)


class TorchStream:
    cuda_stream = 0x1234


class ProtocolStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0x5678


class OldProtocolStream:
    __cuda_stream__ = (0, 0x9ABC)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (7, 7),
        (np.int64(8), 8),
        (TorchStream(), 0x1234),
        (ProtocolStream(), 0x5678),
        (OldProtocolStream(), 0x9ABC),
    ],
)
def test_a_stream_is_named_in_several_ways(stream: object, handle: int) -> None:
    assert stream_handle(stream) == handle


class WrongStream:
    def __cuda_stream__(self) -> int:
        return 5


@pytest.mark.parametrize("stream", [None, "stream", -1, True, 1.5, WrongStream(), object()])
def test_what_is_no_stream_is_refused(stream: object) -> None:
    with pytest.raises(UsageError):
        stream_handle(stream)


def test_an_error_names_the_call_and_the_code() -> None:
    error = CudaError(700, "cuEventQuery", name="CUDA_ERROR_ILLEGAL_ADDRESS")
    assert str(error) == "cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS (700)"
    assert (error.code, error.api, error.name) == (700, "cuEventQuery", "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert CudaError(12345, "cuX").name == "error 12345"


MISSING = """
import sys
if sys.argv[1] == "bindings":
    sys.modules["cuda.bindings"] = None
from aiokv.backends.cuda_driver import CudaDriver
from aiokv.errors import ConfigError
try:
    CudaDriver.load()
except ConfigError as error:
    print(error)
"""


def say_what_is_missing(what: str) -> str:
    """In a process of its own: a library that is loaded once stays so."""
    done = subprocess.run([sys.executable, "-c", MISSING, what], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def test_without_the_bindings_that_is_said() -> None:
    assert "cuda-bindings is missing, pip install 'aiokv[cuda]'" in say_what_is_missing("bindings")


async def test_a_runtime_on_device_tensors_takes_the_cuda_backend() -> None:
    """There is no such memory, so that opening ends with what the driver says of it, or of itself."""
    config = config_of(gpu_blocks=4, backend="auto", **device_settings())
    with pytest.raises(ConfigError, match="CUDA cannot be used"):
        await KVRuntime(config, arenas={"full": [DeviceArray()]}).open()


async def test_a_runtime_that_was_told_cuda_says_what_cuda_lacks_before_all_else() -> None:
    config = config_of(gpu_blocks=4, backend="cuda", **device_settings())
    with pytest.raises(ConfigError, match="CUDA"):
        await KVRuntime(config, arenas={"full": [np.zeros((4, 8), np.uint8)]}).open()
