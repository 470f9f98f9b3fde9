"""The engine's side on the fake driver: kernels that read and write ranges at their place in a stream, and arrays."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from tests.fakecuda.control import FakeDriver

_FILL, _COPY, _WRITE, _READ = range(4)


class Step(ctypes.Structure):
    """One step as `kernel.c` reads it."""

    _fields_ = (
        ("kind", ctypes.c_uint64),
        ("dst", ctypes.c_uint64),
        ("src", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("bytes", ctypes.c_char_p),
    )


@final
class Kernel:
    """What a kernel does, step by step, once it is its turn; `duration_us` is how long it takes then."""

    def __init__(self, *, duration_us: float = 0) -> None:
        self.duration_us = duration_us
        self.read_lengths: list[int] = []
        self._steps: list[Step] = []

    def fill(self, dst: int, *, value: int, num_bytes: int) -> Kernel:
        return self._add(Step(_FILL, dst, value, num_bytes))

    def copy(self, dst: int, src: int, *, num_bytes: int) -> Kernel:
        return self._add(Step(_COPY, dst, src, num_bytes))

    def write(self, dst: int, data: bytes) -> Kernel:
        """Writes bytes that are given now, as a kernel's parameters are."""
        return self._add(Step(_WRITE, dst, 0, len(data), ctypes.c_char_p(data)))

    def read(self, src: int, *, num_bytes: int) -> Kernel:
        """Keeps what is there when the kernel runs; `Launched.result()` gives it."""
        self.read_lengths.append(num_bytes)
        return self._add(Step(_READ, 0, src, num_bytes))

    def steps(self) -> ctypes.Array[Step]:
        return (Step * len(self._steps))(*self._steps)

    def _add(self, step: Step) -> Kernel:
        self._steps.append(step)
        return self


@final
class Launched:
    """A kernel on its way."""

    def __init__(self, driver: FakeDriver, *, reading: int, lengths: list[int]) -> None:
        self._driver = driver
        self._reading = reading
        self._lengths = tuple(lengths)

    def result(self) -> list[bytes] | None:
        """What its `read` steps found, in their order; None while it has not run."""
        found = self._driver.reading(self._reading, num_bytes=sum(self._lengths))
        if found is None:
            return None
        ends = [sum(self._lengths[: i + 1]) for i in range(len(self._lengths))]
        return [found[end - length : end] for end, length in zip(ends, self._lengths, strict=True)]


@final
class DeviceArray:
    """Memory of the fake device that offers `__cuda_array_interface__`, as an engine's tensor would."""

    def __init__(self, driver: FakeDriver, *, pointer: int, shape: tuple[int, ...], typestr: str = "|u1") -> None:
        self._driver = driver
        self.pointer = pointer
        self.shape = shape
        self.typestr = typestr
        self.num_bytes = int(typestr[2:])
        for length in shape:
            self.num_bytes *= length

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": self.shape,
            "typestr": self.typestr,
            "data": (self.pointer, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }

    def read(self) -> bytes:
        return self._driver.read(self.pointer, self.num_bytes)

    def write(self, data: bytes) -> None:
        self._driver.write(self.pointer, data)
