"""How many copies go to the driver in one call: `BatchCopier`.

`cuMemcpyBatchAsync` is taken at its entry point of CUDA 12.8, which every driver since has, and called with the
addresses of numpy arrays: the bindings want an object per address, which takes ten times as long, and change the
function's form with the version of the driver. Older drivers copy one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final, Protocol, final

from aiokv.backends.cuda_copies import Copies
from aiokv.backends.cuda_driver import CudaDriver, CudaError
from aiokv.backends.mapping import address_of
from aiokv.errors import ConfigError
from aiokv.model.ids import Direction

__all__ = ["BatchCopier", "Copier", "PartlyCopied", "SingleCopier", "choose_copier"]

_BATCHES_SINCE: Final = 12_080
_SINGLE_COPIES_SINCE: Final = 4_000
_STREAM_ORDER: Final = 1
"""A source is read when its turn has come: stores, whose sources kernels before them have written."""
_ANY_ORDER: Final = 3
"""A source may be read at once: loads, whose sources lie still from the store that wrote them to the load's end."""
_ORDERS: Final = {Direction.STORE: _STREAM_ORDER, Direction.LOAD: _ANY_ORDER}

_NO_PLACE: Final = ctypes.c_size_t(-1).value
"""The place of an error that belongs to no single copy."""


class PartlyCopied(CudaError):
    """A call was refused after some of its copies may have been started."""


class Copier(Protocol):
    """Enqueues copies. Call it with the context current."""

    most: int
    """Copies in one call at most."""

    def ops(self, copies: int) -> int:
        """How many entries of a stream's queue so many copies take."""
        ...

    def enqueue(self, copies: Copies, *, stream: int) -> None:
        """`CudaError` where nothing was started, `PartlyCopied` where something may have been."""
        ...


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`: the order of the sources, two locations that only managed memory needs, flags."""

    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_BATCH_FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # targets
    ctypes.c_void_p,  # sources
    ctypes.c_void_p,  # sizes
    ctypes.c_size_t,  # count
    ctypes.POINTER(_Attributes),
    ctypes.POINTER(ctypes.c_size_t),  # the copies from which on each of them holds
    ctypes.c_size_t,  # how many attributes
    ctypes.POINTER(ctypes.c_size_t),  # the place of the one that failed
    ctypes.c_void_p,  # stream
)
_SINGLE_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)


@final
class BatchCopier:
    """One call for all copies, with the order of the sources that the direction needs."""

    __slots__ = ("_attributes", "_driver", "_function", "most")

    def __init__(self, driver: CudaDriver, *, address: int, direction: Direction) -> None:
        self.most = 8192
        self._driver = driver
        self._function: Callable[..., int] = _BATCH_FUNCTION(address)
        self._attributes = _Attributes(source_order=_ORDERS[direction])

    def ops(self, copies: int) -> int:
        """See `Copier`."""
        return 1 if copies else 0

    def enqueue(self, copies: Copies, *, stream: int) -> None:
        """See `Copier`."""
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(_NO_PLACE)
        code = self._function(
            address_of(copies.targets),
            address_of(copies.sources),
            address_of(copies.sizes),
            len(copies.sizes),
            ctypes.byref(self._attributes),
            ctypes.byref(first),
            1,
            ctypes.byref(failed),
            stream,
        )
        if code and failed.value not in (0, _NO_PLACE):
            raise PartlyCopied(code, f"cuMemcpyBatchAsync, copy {failed.value} of {len(copies.sizes)}")
        self._driver.require_success(code, api="cuMemcpyBatchAsync")


@final
class SingleCopier:
    """One call per copy, for drivers without batches."""

    __slots__ = ("_driver", "_function", "most")

    def __init__(self, driver: CudaDriver, *, address: int) -> None:
        self.most = 128
        self._driver = driver
        self._function: Callable[..., int] = _SINGLE_FUNCTION(address)

    def ops(self, copies: int) -> int:
        """See `Copier`."""
        return copies

    def enqueue(self, copies: Copies, *, stream: int) -> None:
        """See `Copier`."""
        columns = (column.tolist() for column in copies)
        for place, (target, source, num_bytes) in enumerate(zip(*columns, strict=True)):
            code = self._function(target, source, num_bytes, stream)
            if code and place:
                raise PartlyCopied(code, f"cuMemcpyAsync, copy {place} of {len(copies.sizes)}")
            self._driver.require_success(code, api="cuMemcpyAsync")


def choose_copier(driver: CudaDriver, *, direction: Direction) -> Copier:
    """The fastest that this driver has."""
    if driver.version >= _BATCHES_SINCE:
        address = driver.find_function("cuMemcpyBatchAsync", version=_BATCHES_SINCE)
        if address is not None:
            return BatchCopier(driver, address=address, direction=direction)
    address = driver.find_function("cuMemcpyAsync", version=_SINGLE_COPIES_SINCE)
    if address is None:
        raise ConfigError("CUDA cannot be used: the driver has no cuMemcpyAsync")
    return SingleCopier(driver, address=address)
