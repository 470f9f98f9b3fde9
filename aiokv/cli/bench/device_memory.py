"""KV memory of an engine on a CUDA device: written and read row by row on its stream, for benchmarks that judge bytes.

Writes are queued and return at once; a read waits for all before it. So what the next request, a store or a load does
with the memory has to be ordered behind it on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aiokv.cli.bench.device import BenchDevice, DriverKind

__all__ = ["DeviceMemory", "DeviceTensor", "FakeDevice", "watch_driver"]

_Words = NDArray[np.uint64]
_Key = ArrayLike | tuple[ArrayLike, ArrayLike]
"""Slots, or slots and as many places in them."""
_FAKE_PACKAGE: Final = "tests.fakecuda"
_WORD_BYTES: Final = 8
_WRITE: Final = "cuMemcpyHtoDAsync"
_READ: Final = "cuMemcpyDtoHAsync"
_KERNEL_US: Final = 200
_MOST_UNREAD: Final = 256
"""Writes that are queued before one waits for them: their bytes are kept so long."""


def watch_driver(kind: DriverKind) -> FakeDevice | None:
    """The fake driver, which from now on does whatever a device may do, and tells what went wrong; None: a real one."""
    return None if kind is DriverKind.CUDA else FakeDevice()


@final
class FakeDevice:
    """The engine's side of the fake driver of a checkout."""

    def __init__(self) -> None:
        self._package: Any = import_module(_FAKE_PACKAGE)
        self._driver: Any = self._package.FakeDriver.load()
        self._driver.adversaries()

    def violations(self) -> list[str]:
        """What it has seen so far."""
        found: list[str] = self._driver.violations()
        return found

    def write(self, runs: Iterable[tuple[int, bytes]], *, stream: int) -> None:
        """One kernel that writes all of it, and takes so long that what does not wait for it overtakes it."""
        kernel = self._package.Kernel(duration_us=_KERNEL_US)
        for address, data in runs:
            kernel.write(address, data)
        self._driver.launch(stream, kernel)


@final
class DeviceMemory:
    """Allocates, and is the stream on which the engine works."""

    def __init__(self, device: BenchDevice, *, fake: FakeDevice | None = None) -> None:
        """Where there is a fake driver, kernels of its write, as an engine's would."""
        self.device = device
        self._fake = fake
        self._unread: list[_Words] = []
        with device.driver.current():
            self.stream = int(device.call("cuStreamCreate", 1))

    def zeros(self, *shape: int) -> DeviceTensor:
        """A tensor of words, shape as given, contiguous."""
        with self.device.driver.current():
            num_bytes = int(np.prod(shape)) * _WORD_BYTES
            address = int(self.device.call("cuMemAlloc", num_bytes))
            self.device.call("cuMemsetD8", address, 0, num_bytes)
        return DeviceTensor(self, address, shape=shape)

    def plane(self, tensor: DeviceTensor, index: int) -> DeviceTensor:
        """`tensor[index]`, as a view."""
        stride = int(np.prod(tensor.shape[1:])) * _WORD_BYTES
        return DeviceTensor(self, tensor.address + index * stride, shape=tensor.shape[1:])

    def write(self, address: int, rows: NDArray[np.int64], *, data: _Words) -> None:
        """Row `rows[i]` becomes `data[i]`."""
        if self._fake is not None:
            if len(rows):
                runs = _runs_of(rows, address=address, num_bytes=data.shape[-1] * _WORD_BYTES)
                parts = [(there, data[first : first + count].tobytes()) for there, first, count in runs]
                self._fake.write(parts, stream=self.stream)
            return
        self._unread.append(data)
        self._copy(_WRITE, rows, address=address, host=data)
        if len(self._unread) >= _MOST_UNREAD:
            self._wait()

    def read(self, address: int, rows: NDArray[np.int64], *, words: int) -> _Words:
        """The rows, shape `[rows, words]`."""
        found = np.empty((len(rows), words), np.uint64)
        self._copy(_READ, rows, address=address, host=found)
        self._wait()
        return found

    def _copy(self, api: str, rows: NDArray[np.int64], *, address: int, host: _Words) -> None:
        num_bytes, base = host.shape[-1] * _WORD_BYTES, host.ctypes.data
        with self.device.driver.current():
            for there, first, count in _runs_of(rows, address=address, num_bytes=num_bytes):
                here = base + first * num_bytes
                ends = (there, here) if api == _WRITE else (here, there)
                self.device.call(api, *ends, count * num_bytes, self.stream)

    def _wait(self) -> None:
        with self.device.driver.current():
            self.device.call("cuStreamSynchronize", self.stream)
        self._unread.clear()


@final
class DeviceTensor:
    """Words on the device, indexed as `KvBytes` indexes numpy arrays: by slots, or by slots and places in them."""

    def __init__(self, memory: DeviceMemory, address: int, *, shape: tuple[int, ...]) -> None:
        self.address = address
        self.shape = shape
        self._memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """For whoever copies it."""
        return {"version": 3, "typestr": "<u8", "data": (self.address, False), "shape": self.shape, "strides": None}

    def __getitem__(self, key: _Key) -> _Words:
        """What is there once all that was written before is."""
        rows, shape = self._rows(key)
        return self._memory.read(self.address, rows, words=self.shape[-1]).reshape(shape)

    def __setitem__(self, key: _Key, value: ArrayLike) -> None:
        """Queue a write."""
        rows, shape = self._rows(key)
        data = np.ascontiguousarray(np.broadcast_to(np.asarray(value, np.uint64), shape))
        self._memory.write(self.address, rows, data=data.reshape(len(rows), self.shape[-1]).copy())

    def _rows(self, key: _Key) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        """The rows that a key names, and the shape of what they hold."""
        inner = self.shape[1:-1]
        slots = np.asarray(key[0] if isinstance(key, tuple) else key, np.int64)
        if isinstance(key, tuple):
            places = np.asarray(key[1], np.int64)
            return slots * inner[0] + places, (*slots.shape, self.shape[-1])
        per_slot = int(np.prod(inner, dtype=np.int64))
        rows = slots[..., None] * per_slot + np.arange(per_slot)
        return rows.ravel(), (*slots.shape, *self.shape[1:])


def _runs_of(rows: NDArray[np.int64], *, address: int, num_bytes: int) -> list[tuple[int, int, int]]:
    """Adjacent rows are one copy: its address, its first place in `rows`, and how many there are."""
    firsts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    counts = np.diff(firsts, append=len(rows))
    addresses = address + rows[firsts] * num_bytes
    return list(zip(addresses.tolist(), firsts.tolist(), counts.tolist(), strict=True))
