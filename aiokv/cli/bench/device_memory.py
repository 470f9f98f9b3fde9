"""KV memory of an engine on a CUDA device: written and read row by row on its stream, for benchmarks that judge bytes.

Writes are queued and return at once; a read waits for all before it. So what the next request, a store or a load does
with the memory has to be ordered behind it on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aiokv.cli.bench.device import BenchDevice, DriverKind

__all__ = ["DeviceMemory", "DeviceTensor", "watch_driver"]

_Words = NDArray[np.uint64]
_Key = ArrayLike | tuple[ArrayLike, ArrayLike]
"""Slots, or slots and as many places in them."""
_WORD_BYTES: Final = 8
_WRITE: Final = "cuMemcpyHtoDAsync"
_READ: Final = "cuMemcpyDtoHAsync"
_MOST_UNREAD: Final = 256
"""Writes that are queued before one waits for them: their bytes are kept so long."""


def watch_driver(kind: DriverKind) -> Callable[[], list[str]]:
    """Who tells what the driver has seen go wrong: the fake one, which from now on does whatever a device may do."""
    if kind is DriverKind.CUDA:
        return list
    fake = import_module("tests.fakecuda").FakeDriver.load()
    fake.adversaries()
    violations: Callable[[], list[str]] = fake.violations
    return violations


@final
class DeviceMemory:
    """Allocates, and is the stream on which the engine works."""

    def __init__(self, device: BenchDevice) -> None:
        self.device = device
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
        """Adjacent rows are one copy."""
        num_bytes, base = host.shape[-1] * _WORD_BYTES, host.ctypes.data
        firsts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
        counts = np.diff(firsts, append=len(rows))
        with self.device.driver.current():
            for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
                there, here = address + int(rows[first]) * num_bytes, base + first * num_bytes
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
