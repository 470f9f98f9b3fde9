"""Which bytes of a tensor belong to block `b`, from its shape and strides alone.

A block is one or more *fragments*: contiguous runs of bytes, the same for every block but for a constant stride. A
dense tensor `[gpu_blocks, ...]` has one fragment in whatever order its inner axes lie in memory, one laid out
`[2, gpu_blocks, ...]` (K and V outermost) has two. Runs are found in memory order, so permuted views of one memory give
the same fragments. What cannot be cut that way is a `ConfigError` that names the tensor and its shape.

Tensors are read through what they say of themselves, never copied. torch is not imported here: a caller that has a
tensor has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from aiokv.backends.cuda_array import view_cuda_array
from aiokv.backends.mapping import address_of
from aiokv.backends.tensor_view import TensorView
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["Fragment", "TensorView", "find_fragments", "require_shared_blocks_agree", "view_tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """One contiguous run of every block: block `b` has the bytes `[address + b * block_stride, ... + num_bytes)`."""

    address: int
    block_stride: int
    num_bytes: int
    tensor: TensorView = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True, order=True)
class _Axis:
    stride: int
    length: int


def view_tensor(tensor: object, *, label: str) -> TensorView:
    """Describe a numpy array, a strided torch tensor, or what has a `__cuda_array_interface__`; `ConfigError` for
    anything else.
    """
    if isinstance(tensor, np.ndarray):
        return _view_array(tensor, label=label)
    if _is_torch(tensor):
        return _view_torch(tensor, label=label)
    interface = getattr(tensor, "__cuda_array_interface__", None)
    if isinstance(interface, Mapping):
        return view_cuda_array(tensor, interface=interface, label=label)
    raise ConfigError(f"{label} must be a numpy array or a torch tensor, not {type(tensor).__name__}")


def find_fragments(tensor: TensorView, *, gpu_blocks: int) -> tuple[Fragment, ...]:
    """The fragments of every block of `tensor`, lowest address first.

    The block axis is the first one, unless the shape starts with `[2, gpu_blocks]`: that is K and V outermost, also for
    `gpu_blocks == 2`.
    """
    block_axis = _find_block_axis(tensor, gpu_blocks)
    axes = [_Axis(*pair) for pair in zip(tensor.strides, tensor.shape, strict=True)]
    _require_disjoint(tensor, axes)
    block = axes.pop(block_axis)
    run_bytes, outer = _merge(axes, tensor.itemsize)
    if len(outer) > 1:
        tensor.reject("a block must be made of contiguous runs at one constant stride")
    repeats = outer[0] if outer else _Axis(run_bytes, 1)
    return tuple(
        Fragment(
            address=tensor.address + k * repeats.stride,
            block_stride=block.stride if block.length > 1 else run_bytes,
            num_bytes=run_bytes,
            tensor=tensor,
        )
        for k in range(repeats.length)
    )


def require_shared_blocks_agree(fragments: Iterable[Fragment], *, gpu_blocks: int) -> None:
    """Memory named twice must mean the same block each time: block `i` of one tensor may overlap only block `i`.

    Fragments whose memory is interleaved must have one block stride and lie within one stride of each other.
    """
    ordered = sorted(fragments, key=lambda f: f.address)
    first, end = None, 0
    window_end = 0
    for fragment in ordered:
        if first is None or fragment.address >= end:
            first, end, window_end = fragment, _end(fragment, gpu_blocks), fragment.address + fragment.num_bytes
            continue
        end = max(end, _end(fragment, gpu_blocks))
        window_end = max(window_end, fragment.address + fragment.num_bytes)
        same_stride = fragment.block_stride == first.block_stride
        if gpu_blocks > 1 and not (same_stride and window_end - first.address <= first.block_stride):
            fragment.tensor.reject(f"shares memory with {first.tensor.label}, but their blocks do not coincide")


# Helpers, in reading order.


def _is_torch(tensor: object) -> TypeGuard[torch.Tensor]:
    module = sys.modules.get("torch")
    return module is not None and isinstance(tensor, module.Tensor)


def _view_array(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], *, label: str) -> TensorView:
    view = TensorView(
        label=label,
        address=address_of(array),
        shape=array.shape,
        strides=array.strides,
        itemsize=array.itemsize,
        device="cpu",
        owner=array,
    )
    if array.dtype.hasobject:
        view.reject("it holds Python objects")
    if not array.flags.writeable:
        view.reject("it is read-only")
    return view


def _view_torch(tensor: torch.Tensor, *, label: str) -> TensorView:
    import torch

    shape = tuple(tensor.shape)
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        where = f"{tensor.layout} on {tensor.device}"
        raise ConfigError(f"{label} of shape {list(shape)}: it has no strided memory ({where})")
    itemsize = tensor.element_size()
    return TensorView(
        label=label,
        address=tensor.data_ptr(),
        shape=shape,
        strides=tuple(stride * itemsize for stride in tensor.stride()),
        itemsize=itemsize,
        device=str(tensor.device),
        owner=tensor,
    )


def _find_block_axis(tensor: TensorView, gpu_blocks: int) -> int:
    if 0 in tensor.shape:
        tensor.reject("it is empty")
    if tensor.shape[:2] == (2, gpu_blocks):
        return 1
    if tensor.shape[:1] == (gpu_blocks,):
        return 0
    tensor.reject(f"for {gpu_blocks} GPU blocks it must start with [{gpu_blocks}, ...] or [2, {gpu_blocks}, ...]")


def _require_disjoint(tensor: TensorView, axes: Sequence[_Axis]) -> None:
    """Every element has bytes of its own (sufficient: each stride spans all smaller axes)."""
    span = tensor.itemsize
    for axis in sorted(axis for axis in axes if axis.length > 1):
        if axis.stride < span:
            tensor.reject(f"its elements overlap or run backwards (a stride of {axis.stride} bytes)")
        span += axis.stride * (axis.length - 1)


def _merge(axes: Iterable[_Axis], itemsize: int) -> tuple[int, list[_Axis]]:
    """Bytes of the innermost contiguous run, and what repeats it, innermost first, as few axes as will do."""
    merged = [_Axis(itemsize, 1)]
    for axis in sorted(axis for axis in axes if axis.length > 1):
        inner = merged[-1]
        if axis.stride == inner.stride * inner.length:
            merged[-1] = _Axis(inner.stride, inner.length * axis.length)
        else:
            merged.append(axis)
    return itemsize * merged[0].length, merged[1:]


def _end(fragment: Fragment, gpu_blocks: int) -> int:
    return fragment.address + (gpu_blocks - 1) * fragment.block_stride + fragment.num_bytes
