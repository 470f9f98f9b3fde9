"""Copying rows between two arenas in RAM: at the speed of memcpy, in short steps, the GIL released.

Every method is a numpy call over many bytes; Python code runs once per step, or once per run of adjacent slots where
the runs are long. What is chosen, by how the slots lie (see `copy_steps`):

* long runs, or few of them: one slice copy each;
* adjacent sources: one scatter; adjacent targets in dense memory: one gather;
* scattered on both sides: gather into a preallocated buffer, scatter from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from aiokv.backends.arena import ByteRows, Fragment
from aiokv.model.ids import SlotArray

__all__ = ["BOUNCE_BYTES", "STEP_BYTES", "CopyMap", "HostRows", "Lane", "copy_steps", "cut_lanes"]

STEP_BYTES: Final = 4 << 20
"""Bytes of one step at most: about 1 ms. A longer fragment is cut."""
BOUNCE_BYTES: Final = 1 << 20
"""Size of the buffer between two scattered sides; larger than a core's cache is slower."""
_LONG_RUN_BYTES: Final = 32 << 10
"""From this mean size on, a Python loop over runs is at memcpy speed."""
_FEW_RUNS: Final = 8
"""Up to so many runs a loop costs less than the fixed cost of a gather and a scatter."""
_SMALLEST_UNIT: Final = 256
"""`np.take` over smaller pieces is slower than a loop over rows."""

SlotIndex = NDArray[np.intp]


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

    def gather(self, slots: SlotIndex, *, into: ByteRows) -> None:
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


@final
class CopyMap:
    """Which slot goes where, and in how many runs: maximal stretches that are adjacent on both sides."""

    __slots__ = ("_lists", "_run_starts", "source", "source_is_run", "target", "target_is_run")

    def __init__(self, source_blocks: SlotArray, target_blocks: SlotArray) -> None:
        self.source: SlotIndex = source_blocks.astype(np.intp)
        self.target: SlotIndex = target_blocks.astype(np.intp)
        source_jumps, target_jumps = np.diff(self.source) != 1, np.diff(self.target) != 1
        self.source_is_run = not source_jumps.any()
        self.target_is_run = not target_jumps.any()
        jumps = np.flatnonzero(source_jumps | target_jumps)
        self._run_starts: list[int] = [0, *(jumps + 1).tolist()] if len(self) else []
        self._lists: tuple[list[int], list[int]] | None = None

    def __len__(self) -> int:
        return len(self.source)

    @property
    def num_runs(self) -> int:
        """How many runs there are."""
        return len(self._run_starts)

    def as_lists(self) -> tuple[list[int], list[int]]:
        """The source slots and the target slots, made once."""
        if self._lists is None:
            self._lists = self.source.tolist(), self.target.tolist()
        return self._lists

    def runs(self) -> Iterator[tuple[int, int]]:
        """Where runs begin and end among the copies, half-open."""
        return pairwise((*self._run_starts, len(self)))


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


def copy_steps(blocks: CopyMap, *, source: HostRows, target: HostRows, bounce: ByteRows) -> Iterator[None]:
    """Copy one lane; every step moves at most `STEP_BYTES`. `bounce` is flat and at least one long run's length."""
    width = source.rows.shape[1]
    if blocks.num_runs <= _FEW_RUNS or len(blocks) * width >= blocks.num_runs * _LONG_RUN_BYTES:
        copy = _copy_runs if blocks.num_runs <= len(blocks) // 2 else _copy_rows
        return copy(blocks, source=source.rows, target=target.rows)
    if blocks.source_is_run:
        return _scatter(blocks, source=source.rows, target=target.rows)
    if blocks.target_is_run and target.is_dense():
        return _gather(blocks, source=source, target=target.rows)
    bounce_rows = bounce[: len(bounce) // width * width].reshape(-1, width)
    return _bounce(blocks, source=source, target=target.rows, bounce=bounce_rows)


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
    for start, stop in _pieces(len(blocks), STEP_BYTES // source.shape[1]):
        for here, there in zip(sources[start:stop], targets[start:stop], strict=True):
            target[there] = source[here]
        yield


def _copy_runs(blocks: CopyMap, *, source: ByteRows, target: ByteRows) -> Iterator[None]:
    most = STEP_BYTES // source.shape[1]
    room = most
    sources, targets = blocks.as_lists()
    for start, stop in blocks.runs():
        done = 0
        while done < stop - start:
            count = min(room, stop - start - done)
            here, there = sources[start] + done, targets[start] + done
            target[there : there + count] = source[here : here + count]
            done += count
            room -= count
            if room == 0:
                yield
                room = most
    if room < most:
        yield


def _scatter(blocks: CopyMap, *, source: ByteRows, target: ByteRows) -> Iterator[None]:
    first = int(blocks.source[0])
    for start, stop in _pieces(len(blocks), STEP_BYTES // source.shape[1]):
        target[blocks.target[start:stop]] = source[first + start : first + stop]
        yield


def _gather(blocks: CopyMap, *, source: HostRows, target: ByteRows) -> Iterator[None]:
    first = int(blocks.target[0])
    for start, stop in _pieces(len(blocks), STEP_BYTES // target.shape[1]):
        source.gather(blocks.source[start:stop], into=target[first + start : first + stop])
        yield


def _bounce(blocks: CopyMap, *, source: HostRows, target: ByteRows, bounce: ByteRows) -> Iterator[None]:
    first = int(blocks.target[0])
    for start, stop in _pieces(len(blocks), len(bounce)):
        piece = bounce[: stop - start]
        source.gather(blocks.source[start:stop], into=piece)
        if blocks.target_is_run:
            target[first + start : first + stop] = piece
        else:
            target[blocks.target[start:stop]] = piece
        yield


def _pieces(total: int, most: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total, most):
        yield start, min(start + most, total)
