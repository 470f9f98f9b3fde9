"""What tests need to speak to the driver through `cuda.bindings`, whose versions differ in what they return."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final, SupportsInt

NOT_READY: Final = 600
STREAM, DURING_API_CALL, ANY = 1, 2, 3
PAGE: Final = mmap.PAGESIZE


def code(result: Sequence[Any]) -> int:
    """The result as a number: enumerations of the bindings print differently from version to version."""
    return int(result[0])


def succeed(result: Sequence[Any]) -> Any:  # noqa: ANN401 - whatever the call gives
    """What a call gives beside its result, which must be success."""
    assert code(result) == 0, result
    return result[1] if len(result) == 2 else None


def new_stream(cu: ModuleType, *, priority: int = 0, flags: int = 1) -> SupportsInt:
    stream: SupportsInt = succeed(cu.cuStreamCreateWithPriority(flags, priority))
    return stream


def new_event(cu: ModuleType) -> SupportsInt:
    event: SupportsInt = succeed(cu.cuEventCreate(2))
    return event


def device_memory(cu: ModuleType, num_bytes: int) -> int:
    return int(succeed(cu.cuMemAlloc(num_bytes)))


class HostMemory:
    """Pages of this process, registered or not; `data` are their bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.mapping = mmap.mmap(-1, num_bytes)
        self._anchor = (ctypes.c_char * num_bytes).from_buffer(self.mapping)
        self.address = ctypes.addressof(self._anchor)
        self.num_bytes = num_bytes

    def read(self, offset: int, num_bytes: int) -> bytes:
        return self.mapping[offset : offset + num_bytes]

    def write(self, offset: int, data: bytes) -> None:
        self.mapping[offset : offset + len(data)] = data

    def unmap(self) -> None:
        """As a program does that frees an arena; nothing may use `data` any more."""
        del self._anchor
        self.mapping.close()


@contextmanager
def registered(cu: ModuleType, num_bytes: int) -> Iterator[HostMemory]:
    memory = HostMemory(num_bytes)
    succeed(cu.cuMemHostRegister(memory.address, num_bytes, 0))
    yield memory
    succeed(cu.cuMemHostUnregister(memory.address))


def copy_batch(
    cu: ModuleType,
    copies: Iterable[tuple[int, int, int]],
    *,
    stream: SupportsInt,
    order: int = STREAM,
) -> int:
    """Submits (destination, source, bytes) with one attribute for all; the driver's code."""
    dsts, srcs, sizes = (list(column) for column in zip(*copies, strict=True))
    attribute = cu.CUmemcpyAttributes()
    attribute.srcAccessOrder = cu.CUmemcpySrcAccessOrder(order)
    pointers = [[cu.CUdeviceptr(address) for address in column] for column in (dsts, srcs)]
    return code(cu.cuMemcpyBatchAsync(*pointers, sizes, len(sizes), [attribute], [0], 1, stream))


def raw_batch(
    library: ctypes.CDLL, copies: Sequence[tuple[int, int, int]], *, stream: int, attributes: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """The entry of 12.8 by ctypes, as aiokv calls it: the code and `failIdx`. `attributes`: (first index, order)."""
    columns = [(ctypes.c_uint64 * len(copies))(*(copy[i] for copy in copies)) for i in range(3)]
    orders = (ctypes.c_uint32 * (6 * len(attributes)))()
    for k, (_, order) in enumerate(attributes):
        orders[6 * k] = order
    firsts = (ctypes.c_size_t * len(attributes))(*(first for first, _ in attributes))
    failed = ctypes.c_size_t(12345)
    result = library.cuMemcpyBatchAsync(
        *columns,
        ctypes.c_size_t(len(copies)),
        orders,
        firsts,
        ctypes.c_size_t(len(attributes)),
        ctypes.byref(failed),
        ctypes.c_void_p(stream),
    )
    return int(result), failed.value
