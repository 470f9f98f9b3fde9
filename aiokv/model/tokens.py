"""Token ids as they come from callers, as one int32 array: what is accepted, and what is said about the rest."""

from __future__ import annotations

import reprlib
import struct
from array import array
from collections.abc import Sequence
from typing import Any, Final, Protocol, SupportsIndex, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import UsageError

__all__ = ["TokenArray", "TokenIds", "as_tokens"]

_INT32: Final = np.iinfo(np.int32)
_TOKEN: Final = np.dtype("<i4")

TokenArray = NDArray[np.int32]
"""Token ids, shape `[n]`, little-endian."""


@runtime_checkable
class _ArrayLike(Protocol):
    def __array__(self) -> NDArray[Any]: ...


TokenIds = Sequence[int] | Sequence[SupportsIndex] | NDArray[np.integer[Any]] | _ArrayLike
"""What is taken for token ids: a sequence of integers or a one-dimensional integer array or tensor in host memory.

The whole int32 range is accepted, because engines mark media positions with negative placeholders.
"""


def as_tokens(token_ids: TokenIds) -> TokenArray:
    """As little-endian int32, possibly sharing memory with the input; `UsageError` if that is not what they are."""
    if isinstance(token_ids, np.ndarray):
        return _from_array(np.asarray(token_ids))
    if isinstance(token_ids, list | tuple | range):
        return _from_sequence(token_ids if isinstance(token_ids, list) else list(token_ids))
    if isinstance(token_ids, str | bytes | bytearray):
        raise UsageError(f"token ids must be integers, not {type(token_ids).__name__}")
    if isinstance(token_ids, array | memoryview | _ArrayLike):
        return _from_array(_host_array(token_ids))
    if isinstance(token_ids, Sequence):
        return _from_sequence(list(token_ids))
    raise UsageError(f"token ids must be a sequence of integers, not {type(token_ids).__name__}")


def _host_array(values: object) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"token ids cannot be read as an array in host memory: {error}") from error


def _from_sequence(values: list[Any]) -> TokenArray:
    try:  # of all ways from a list to an array the shortest, by half
        return np.frombuffer(struct.pack(f"{len(values)}i", *values), "=i4")
    except (struct.error, TypeError, OverflowError):
        raise _first_fault(values) from None


def _from_array(values: NDArray[Any]) -> TokenArray:
    if values.ndim != 1:
        raise UsageError(f"token ids must be one-dimensional, not of shape {values.shape}")
    if values.dtype == _TOKEN:
        return values
    if values.dtype.kind == "O":
        return _from_sequence(values.tolist())
    if len(values) and values.dtype.kind not in "iu":
        raise UsageError(f"token ids must be integers, not {values.dtype}: token 0 is {values[0]!r}")
    if values.dtype.itemsize >= _INT32.dtype.itemsize and len(values):
        fault = (values < _INT32.min) | (values > _INT32.max)
        if fault.any():
            raise _first_fault(values.tolist())
    return values.astype(_TOKEN, copy=False)


def _first_fault(values: list[Any]) -> UsageError:
    for position, value in enumerate(values):
        try:
            struct.pack("i", value)
        except (struct.error, TypeError, OverflowError):
            reason = "out of int32 range" if isinstance(value, int) else "no integer"
            return UsageError(f"token ids must be int32 integers: token {position} is {reprlib.repr(value)}, {reason}")
    return UsageError("token ids must be int32 integers")
