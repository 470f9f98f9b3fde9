"""Which bytes one batch copies, as arrays of addresses: coalesced, and cut into pieces of so many copies.

A group's block is its fragments on the GPU side and, one behind the other, the beginning of a slot on the CPU side.
Fragments that are adjacent on both sides are one *lane*. Where a lane's blocks leave no gaps on either side, slots that
are adjacent on both sides are one copy; so they are when both sides run backwards, as slots do that one request has
given back. No copy crosses a *seam*: between two slots that were pinned by separate calls.

Pure arithmetic on numpy arrays; nothing here knows a driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from aiokv.backends.strides import Fragment
from aiokv.model.ids import Direction, IntArray, SlotArray, Tier
from aiokv.model.plan import CopyBatch

__all__ = ["AddressArray", "BatchCopies", "Copies", "CopyLane", "CopyMaker", "cut_copy_lanes"]

AddressArray = NDArray[np.uint64]
"""Addresses or numbers of bytes, shape `[n]`, contiguous: what the driver reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLane:
    """One run of bytes of every block: on each side block `b` has those from `address + b * stride` on."""

    gpu_address: int
    gpu_stride: int
    cpu_address: int
    cpu_stride: int
    num_bytes: int

    @property
    def is_dense(self) -> bool:
        """Whether adjacent slots are adjacent bytes, on both sides."""
        return self.num_bytes == self.gpu_stride == self.cpu_stride


class Copies(NamedTuple):
    """Some copies, for one call: `sizes[i]` bytes from `sources[i]` to `targets[i]`."""

    targets: AddressArray
    sources: AddressArray
    sizes: AddressArray


def cut_copy_lanes(fragments: Sequence[Fragment], *, cpu_address: int, cpu_stride: int) -> tuple[CopyLane, ...]:
    """The lanes of one group over CPU slots of `cpu_stride` bytes that begin at `cpu_address`."""
    lanes: list[CopyLane] = []
    offset = 0
    for fragment in fragments:
        lane = CopyLane(
            gpu_address=fragment.address,
            gpu_stride=fragment.block_stride,
            cpu_address=cpu_address + offset,
            cpu_stride=cpu_stride,
            num_bytes=fragment.num_bytes,
        )
        offset += fragment.num_bytes
        merged = _merge(lanes[-1], lane) if lanes else None
        if merged is None:
            lanes.append(lane)
        else:
            lanes[-1] = merged
    return tuple(lanes)


@final
class CopyMaker:
    """Describes the batches of one group. `seam_blocks`: so many CPU slots were pinned at once, 0 for all."""

    __slots__ = ("_dense", "_scattered", "_seam_blocks")

    def __init__(self, lanes: Iterable[CopyLane], *, seam_blocks: int = 0) -> None:
        lanes = tuple(lanes)
        self._dense = _Columns([lane for lane in lanes if lane.is_dense])
        self._scattered = _Columns([lane for lane in lanes if not lane.is_dense])
        self._seam_blocks = seam_blocks

    def describe(self, batch: CopyBatch) -> BatchCopies:
        """The copies of a batch, not yet made into addresses."""
        gpu, cpu = batch.slots(Tier.GPU), batch.slots(Tier.CPU)
        parts = []
        if self._dense.count:
            parts.append((self._dense, _find_runs(gpu, cpu, seam_blocks=self._seam_blocks)))
        if self._scattered.count:
            parts.append((self._scattered, _Runs(slots=_both_sides(gpu, cpu), lengths=None)))
        return BatchCopies(parts, direction=batch.direction)


@final
class BatchCopies:
    """The copies of one batch; `len()` of them."""

    __slots__ = ("_direction", "_parts", "_total")

    def __init__(self, parts: Sequence[tuple[_Columns, _Runs]], *, direction: Direction) -> None:
        self._parts = parts
        self._direction = direction
        self._total: int = sum(columns.count * runs.slots.shape[1] for columns, runs in parts)

    def __len__(self) -> int:
        return self._total

    def pieces(self, *, most: int) -> Iterator[Copies]:
        """All copies, at most `most` at a time. The arrays are made piece by piece."""
        for columns, runs in self._parts:
            for lanes in _slices(columns.count, step=most):
                width = lanes.stop - lanes.start
                for rows in _slices(runs.slots.shape[1], step=max(1, most // width)):
                    yield columns.address(runs, lanes=lanes, rows=rows, direction=self._direction)


# Helpers, in reading order.


class _Runs(NamedTuple):
    """Runs of slots that are adjacent on both sides."""

    slots: AddressArray
    """Where they begin, shape `[2, runs]`, the GPU side first."""
    lengths: AddressArray | None
    """How many slots each has; `None` for one each."""


@final
class _Columns:
    """Lanes as columns of numbers, the GPU side first, so that one expression makes the addresses of all."""

    __slots__ = ("_addresses", "_num_bytes", "_strides", "count")

    def __init__(self, lanes: Sequence[CopyLane]) -> None:
        self.count = len(lanes)
        self._addresses = _sides_of([(lane.gpu_address, lane.cpu_address) for lane in lanes])
        self._strides = _sides_of([(lane.gpu_stride, lane.cpu_stride) for lane in lanes])
        self._num_bytes = np.array([lane.num_bytes for lane in lanes], np.uint64)

    def address(self, runs: _Runs, *, lanes: slice, rows: slice, direction: Direction) -> Copies:
        """The copies of some lanes and some runs, lane by lane."""
        slots = runs.slots[:, None, rows]
        gpu, cpu = np.ascontiguousarray(self._addresses[:, lanes] + slots * self._strides[:, lanes]).reshape(2, -1)
        if runs.lengths is None:
            sizes = np.repeat(self._num_bytes[lanes], slots.shape[2])
        else:
            sizes = np.multiply.outer(self._num_bytes[lanes], runs.lengths[rows]).ravel()
        targets, sources = (gpu, cpu) if direction is Direction.LOAD else (cpu, gpu)
        return Copies(targets=targets, sources=sources, sizes=sizes)


def _merge(one: CopyLane, other: CopyLane) -> CopyLane | None:
    """Two lanes as one, where the second goes on where the first ends, in every block and on both sides."""
    num_bytes = one.num_bytes + other.num_bytes
    goes_on = (
        one.gpu_address + one.num_bytes == other.gpu_address
        and one.cpu_address + one.num_bytes == other.cpu_address
        and one.gpu_stride == other.gpu_stride
        and num_bytes <= one.gpu_stride  # else two tensors of one block, which only happen to be neighbours
    )
    if not goes_on:
        return None
    return CopyLane(
        gpu_address=one.gpu_address,
        gpu_stride=one.gpu_stride,
        cpu_address=one.cpu_address,
        cpu_stride=one.cpu_stride,
        num_bytes=num_bytes,
    )


def _find_runs(gpu: SlotArray, cpu: SlotArray, *, seam_blocks: int) -> _Runs:
    """Runs of slots adjacent on both sides, cut at the seams."""
    gpu, cpu = gpu.astype(np.int64, copy=False), cpu.astype(np.int64, copy=False)
    gpu_steps, cpu_steps = np.diff(gpu), np.diff(cpu)
    forwards, backwards = _are_both(gpu_steps, cpu_steps, step=1), _are_both(gpu_steps, cpu_steps, step=-1)
    adjacent = forwards
    if np.count_nonzero(backwards) > np.count_nonzero(forwards):
        gpu, cpu, adjacent = gpu[::-1], cpu[::-1], backwards[::-1]
    if seam_blocks:
        adjacent &= cpu[1:] % seam_blocks != 0
    starts = np.concatenate(([0] if len(gpu) else [], np.flatnonzero(~adjacent) + 1)).astype(np.intp)
    lengths = np.diff(starts, append=len(gpu))
    return _Runs(slots=_both_sides(gpu[starts], cpu[starts]), lengths=lengths.astype(np.uint64))


def _both_sides(gpu: SlotArray, cpu: SlotArray) -> AddressArray:
    slots = np.empty((2, len(gpu)), np.uint64)
    slots[0], slots[1] = gpu, cpu
    return slots


def _are_both(one: IntArray, other: IntArray, *, step: int) -> NDArray[np.bool_]:
    both: NDArray[np.bool_] = (one == step) & (other == step)
    return both


def _sides_of(pairs: Sequence[tuple[int, int]]) -> AddressArray:
    """One number of each lane for both sides, shape `[2, pairs, 1]`."""
    return np.ascontiguousarray(np.array(pairs, np.uint64).reshape(-1, 2).T)[:, :, None]


def _slices(total: int, *, step: int) -> Iterator[slice]:
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))
