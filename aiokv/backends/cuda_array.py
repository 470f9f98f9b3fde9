"""Device memory that is neither numpy's nor torch's: objects with a `__cuda_array_interface__` (CuPy, Numba, JAX).

Only what the protocol says is read. It does not say which device: `__dlpack_device__` does, where there is one;
otherwise the backend asks the driver.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Final

import numpy as np

from aiokv.backends.tensor_view import TensorView
from aiokv.errors import ConfigError

__all__ = ["view_cuda_array"]

_DLPACK_CUDA: Final = 2


def view_cuda_array(array: object, *, interface: Mapping[str, Any], label: str) -> TensorView:
    """Describe one; `ConfigError` for what the protocol does not allow, and for memory that is read-only or masked."""
    try:
        shape = tuple(int(length) for length in interface["shape"])
        itemsize = np.dtype(interface["typestr"]).itemsize
        address, is_read_only = interface["data"]
        strides = interface.get("strides")
        view = TensorView(
            label=label,
            address=int(address),
            shape=shape,
            strides=_dense_strides(shape, itemsize) if strides is None else tuple(int(step) for step in strides),
            itemsize=itemsize,
            device=_device_of(array),
            owner=array,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{label}: its __cuda_array_interface__ cannot be read ({error!r})") from error
    if len(view.strides) != len(view.shape) or itemsize < 1 or math.prod(shape) < 0:
        view.reject(f"its __cuda_array_interface__ has strides {list(view.strides)} and items of {itemsize} bytes")
    if is_read_only:
        view.reject("it is read-only")
    if interface.get("mask") is not None:
        view.reject("it is masked")
    return view


def _dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Of an array in the order of C."""
    inner = accumulate(reversed(shape[1:]), lambda step, length: step * length, initial=itemsize)
    return tuple(inner)[::-1] if shape else ()


def _device_of(array: object) -> str:
    """As torch spells it; without a number where the array does not say."""
    device = getattr(array, "__dlpack_device__", None)
    kind, ordinal = device() if callable(device) else (_DLPACK_CUDA, None)
    if int(kind) != _DLPACK_CUDA:
        raise ValueError(f"a device of kind {int(kind)}")
    return "cuda" if ordinal is None else f"cuda:{int(ordinal)}"
