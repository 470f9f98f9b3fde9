"""Copying rows between two arenas in RAM: at the speed of memcpy, in short steps, the GIL released.

Every method is a numpy call over many bytes; between two calls the thread must get the GIL again. What is chosen, by
how the slots lie (see `copy_steps`):

* few runs: one slice copy each;
* long stretches of adjacent sources: one scatter each; of adjacent targets in dense memory: one gather each;
* large blocks scattered on both sides: one slice copy each, while nobody else wants the GIL;
* otherwise: gather into a preallocated buffer, scatter from it. Bytes move twice, in few calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.lib.stride_tricks import as_strided

from aiokv.backends.arena import ByteRows, Fragment
from aiokv.backends.copy_map import CopyMap, RowArray, Stretches
from aiokv.backends.gil_watch import Gil

__all__ = ["BOUNCE_BYTES", "STEP_BYTES", "HostRows", "Lane", "copy_steps", "cut_lanes"]

STEP_BYTES: Final = 4 << 20
"""Bytes of one step at most: about 1 ms. A longer fragment is cut."""
BOUNCE_BYTES: Final = STEP_BYTES
"""Size of the buffer between two scattered sides."""
_CACHED_BYTES: Final = 1 << 20
"""So much of it is used at a time, as larger than a core's cache is slower, unless the GIL is scarce."""
_LONG_ROW_BYTES: Final = 32 << 10
"""From this mean size of a run on, a Python loop over runs is at memcpy speed."""
_FEW_RUNS: Final = 8
"""Up to so many runs a loop costs less than the fixed cost of a gather and a scatter."""
_FEWER_CALLS: Final = 4
"""A scatter or gather takes a little longer per call and per row, both one after the other twice as long: so many times
fewer calls must be left."""
_ROWS_BETWEEN_LOOKS: Final = 8
"""So many rows are copied by a loop before it looks whether the GIL has become scarce."""
_SMALLEST_UNIT: Final = 256
"""`np.take` over smaller pieces is slower than a loop over rows."""


@final
class HostRows:
    """One fragment of all blocks of one side, as rows."""

    __slots__ = ("_dense", "_spread", "_units", "_units_per_stride", "rows")

    def __init__(self, rows: ByteRows) -> None:
        self.rows: ByteRows = rows
        """Shape `[blocks, fragment bytes]`."""
        width = rows.shape[1]
        stride = rows.strides[0] if len(rows) > 1 else width
        self._dense: bool = stride == width
        # `np.take` copies its whole source unless that is dense. Rows with gaps are therefore seen as a dense array
        # of the largest pieces that both a row and the stride consist of.
        unit = math.gcd(width, stride)
        self._units_per_stride = stride // unit
        self._spread = np.arange(width // unit, dtype=np.intp)
        pieces = (len(rows) - 1) * self._units_per_stride + len(self._spread) if len(rows) else 0
        self._units = as_strided(rows, shape=(pieces, unit), strides=(unit, 1))

    def is_dense(self) -> bool:
        """Whether rows follow each other without gaps."""
        return self._dense

    def gather(self, slots: RowArray, *, into: ByteRows) -> None:
        """Copy the rows `slots` to the dense `into`, shape `[len(slots), fragment bytes]`."""
        if self._dense:
            np.take(self.rows, slots, axis=0, out=into, mode="clip")
        elif self._units.shape[1] >= _SMALLEST_UNIT:
            index = (slots[:, None] * self._units_per_stride + self._spread).ravel()
            np.take(self._units, index, axis=0, out=into.reshape(len(index), -1), mode="clip")
        else:
            for row, slot in zip(into, slots.tolist(), strict=True):
                row[:] = self.rows[slot]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lane:
    """One fragment on both sides, no longer than a step."""

    gpu: HostRows
    cpu: HostRows


def cut_lanes(fragments: Iterable[Fragment], *, gpu_blocks: int, cpu_rows: ByteRows) -> tuple[Lane, ...]:
    """Rows over the engine's memory and over the CPU slots, for each fragment of a group; nothing is copied."""
    lanes = []
    offset = 0
    for fragment in fragments:
        gpu_rows = np.asarray(_RowsInterface(fragment, gpu_blocks))
        for start in range(0, fragment.num_bytes, STEP_BYTES):
            stop = min(start + STEP_BYTES, fragment.num_bytes)
            cpu_part = cpu_rows[:, offset + start : offset + stop]
            lanes.append(Lane(gpu=HostRows(gpu_rows[:, start:stop]), cpu=HostRows(cpu_part)))
        offset += fragment.num_bytes
    return tuple(lanes)


def copy_steps(blocks: CopyMap, *, source: HostRows, target: HostRows, bounce: ByteRows, gil: Gil) -> Iterator[None]:
    """Copy one lane; every step moves at most `STEP_BYTES`. `bounce` is flat and at least one long row's length."""
    width = source.rows.shape[1]
    runs = len(blocks.runs)
    if runs > _FEW_RUNS and len(blocks.source_stretches) * _FEWER_CALLS <= runs:
        return _scatter(blocks, source=source.rows, target=target.rows)
    if runs > _FEW_RUNS and len(blocks.target_stretches) * _FEWER_CALLS <= runs and target.is_dense():
        return _gather(blocks, source=source, target=target.rows)
    if runs <= len(blocks) // 2 and (runs <= _FEW_RUNS or len(blocks) * width >= runs * _LONG_ROW_BYTES):
        return _copy_runs(blocks, source=source, target=target.rows, bounce=bounce, gil=gil)
    if runs <= _FEW_RUNS or width * 2 * _FEWER_CALLS > len(bounce):
        return _copy_rows(blocks, source=source.rows, target=target.rows)
    return _copy_scattered(blocks, source=source, target=target.rows, bounce=bounce, gil=gil, start=0)


# Helpers, in reading order.


class _RowsInterface:
    """A fragment as numpy takes memory from others; the array made of it keeps this object, and so the tensor."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, fragment: Fragment, blocks: int) -> None:
        self._owner = fragment.tensor.owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (fragment.address, False),
            "shape": (blocks, fragment.num_bytes),
            "strides": (fragment.block_stride, 1),
        }


def _copy_rows(blocks: CopyMap, *, source: ByteRows, target: ByteRows) -> Iterator[None]:
    sources, targets = blocks.as_lists()
    for start, stop in _pieces(0, len(blocks), most=STEP_BYTES // source.shape[1]):
        for here, there in zip(sources[start:stop], targets[start:stop], strict=True):
            target[there] = source[here]
        yield


def _copy_runs(blocks: CopyMap, *, source: HostRows, target: ByteRows, bounce: ByteRows, gil: Gil) -> Iterator[None]:
    """Run by run; once the GIL is scarce, what is left of short runs goes as if it were scattered."""
    most = room = STEP_BYTES // target.shape[1]
    are_short = len(blocks) * target.shape[1] < len(blocks.runs) * _CACHED_BYTES
    sources, targets = blocks.as_lists()
    gil.begin()
    for start, stop in blocks.runs:
        done = start
        while done < stop:
            count = min(room, stop - done)
            here, there = sources[done], targets[done]
            target[there : there + count] = source.rows[here : here + count]
            done += count
            room -= count
            if room == 0:
                gil.end()
                yield
                if are_short and gil.is_scarce:
                    yield from _copy_scattered(blocks, source=source, target=target, bounce=bounce, gil=gil, start=done)
                    return
                room = most
                gil.begin()
    if room < most:
        yield


def _scatter(blocks: CopyMap, *, source: ByteRows, target: ByteRows) -> Iterator[None]:
    for start, stop in _cut(blocks.source_stretches, most=STEP_BYTES // source.shape[1]):
        first = int(blocks.source[start])
        target[blocks.target[start:stop]] = source[first : first + stop - start]
        yield


def _gather(blocks: CopyMap, *, source: HostRows, target: ByteRows) -> Iterator[None]:
    for start, stop in _cut(blocks.target_stretches, most=STEP_BYTES // target.shape[1]):
        first = int(blocks.target[start])
        source.gather(blocks.source[start:stop], into=target[first : first + stop - start])
        yield


def _copy_scattered(
    blocks: CopyMap, *, source: HostRows, target: ByteRows, bounce: ByteRows, gil: Gil, start: int
) -> Iterator[None]:
    """What is left from `start` on: row by row; through `bounce` where rows are short or the GIL is scarce."""
    width = target.shape[1]
    sources, targets = blocks.as_lists()
    buffer = bounce[: len(bounce) // width * width].reshape(-1, width)
    while start < len(blocks):
        gil.begin()
        if width >= _LONG_ROW_BYTES and not gil.is_scarce:
            stop = start + min(_ROWS_BETWEEN_LOOKS, STEP_BYTES // width)
            for here, there in zip(sources[start:stop], targets[start:stop], strict=True):
                target[there] = source.rows[here]
        else:
            stop = start + (len(buffer) if gil.is_scarce else max(1, _CACHED_BYTES // width))
            piece = buffer[: min(stop, len(blocks)) - start]
            source.gather(blocks.source[start:stop], into=piece)
            target[blocks.target[start:stop]] = piece
        gil.end()
        start = stop
        yield


def _cut(stretches: Stretches, *, most: int) -> Iterator[tuple[int, int]]:
    for start, stop in stretches:
        yield from _pieces(start, stop, most=most)


def _pieces(start: int, stop: int, *, most: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, most):
        yield first, min(first + most, stop)
