"""Checksums of the blocks in the CPU tier: taken when a store has written them, compared when a load has read them.

They protect what lies in CPU memory, from the end of its store to the end of a load: a flipped bit, a stray write, a
slot that holds another block. Not the copies themselves: what a store wrote wrong is what its checksum is taken of, and
what a load writes is not read again.

Rules
- A checksum is of the bytes that the last store into a slot left there, whoever owns the block and whatever was reset
  since. From the beginning of a store until it has ended well the slot has none, and a slot without one is not checked:
  so it is for what was placed by name and never stored.
- SAMPLED reads 64 bytes of every 4 KiB, each piece one line further in its page. It finds what befalls a whole page
  or slot, and one in 63 single wrong bytes.
- Only the copy thread calls. A step takes half a millisecond at most. Blocks are first gathered into a buffer: one long
  call without the GIL, after which they are read from the core's cache. A short call per block would give the GIL back
  before the loop's thread, which waits for it, has woken up.

State: per CPU slot a checksum and whether there is one, nine bytes in all.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final, final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from aiokv.backends.arena import ByteRows
from aiokv.backends.host_copy import HostRows
from aiokv.model.ids import BoolArray, SlotArray
from aiokv.model.plan import Checksum

__all__ = ["BlockChecksums", "choose_digest"]

_log = logging.getLogger(__name__)

_STEP_BYTES: Final = 1 << 20
"""About 0.1 ms with xxh3, and 0.5 ms with CRC-32."""
_STEP_BLOCKS: Final = 128
"""So many digests cost less than 0.2 ms beside their bytes."""
_SAMPLE_BYTES: Final = 64
_SAMPLE_STRIDE: Final = 4096 - _SAMPLE_BYTES
"""No aligned page of 4 KiB lies between two starts."""

Digest = Callable[[Any, int], int]
"""The digest of a buffer, begun from the digest of what was before it: `digest(rest, digest(start, 0))`."""


def choose_digest() -> Digest:
    """XXH3 if the package `xxhash` is installed, four times as fast as the CRC-32 of zlib, which always is."""
    try:
        digest: Digest = import_module("xxhash").xxh3_64_intdigest
    except ImportError:
        _log.info("checksums are CRC-32: with the package xxhash they would take a quarter of the time")
        return zlib.crc32
    return digest


@final
class BlockChecksums:
    """The checksums of all slots of one CPU arena, `rows` of shape `[blocks, cpu_block_bytes]`."""

    __slots__ = ("_buffer", "_digest", "_how", "_is_known", "_rows", "_values")

    def __init__(self, rows: ByteRows, *, how: Checksum, digest: Digest) -> None:
        self._rows = rows
        self._how = how
        self._digest = digest
        self._buffer = np.zeros(_STEP_BYTES, np.uint8)
        self._values: NDArray[np.uint64] = np.zeros(len(rows), np.uint64)
        self._is_known: BoolArray = np.zeros(len(rows), np.bool_)

    def forget(self, slots: SlotArray) -> None:
        """These are about to be written: what is known of them is true no more."""
        self._is_known[slots] = False

    def record(self, slots: SlotArray, *, num_bytes: int) -> Iterator[None]:
        """Take the checksums of the first `num_bytes` bytes of these slots, step by step: they have been written."""
        values = np.zeros(len(slots), np.uint64)
        yield from self._steps(values, slots, num_bytes=num_bytes)
        self._values[slots] = values
        self._is_known[slots] = True

    def compare(self, slots: SlotArray, *, num_bytes: int, corrupt: list[int]) -> Iterator[None]:
        """Check these slots, step by step; at which places in `slots` bytes have changed is appended to `corrupt`."""
        places = np.flatnonzero(self._is_known[slots])
        values = np.zeros(len(places), np.uint64)
        yield from self._steps(values, slots[places], num_bytes=num_bytes)
        corrupt.extend(places[values != self._values[slots[places]]].tolist())

    def _steps(self, values: NDArray[np.uint64], slots: SlotArray, *, num_bytes: int) -> Iterator[None]:
        """Put the digest of each slot into `values`."""
        if self._how is Checksum.SAMPLED and num_bytes > _SAMPLE_BYTES:
            return self._sample(values, slots, pieces=self._cut_pieces(num_bytes))
        if num_bytes > _STEP_BYTES // 2:
            return self._read_large(values, slots, num_bytes=num_bytes)
        return self._read(values, slots, num_bytes=num_bytes)

    def _read(self, values: NDArray[np.uint64], slots: SlotArray, *, num_bytes: int) -> Iterator[None]:
        source = HostRows(self._rows[:, :num_bytes])
        for blocks in _slices(len(slots), block_bytes=num_bytes):
            picked = self._buffer[: (blocks.stop - blocks.start) * num_bytes].reshape(-1, num_bytes)
            source.gather(slots[blocks].astype(np.intp), into=picked)
            values[blocks] = [self._digest(row, 0) for row in picked]
            yield

    def _read_large(self, values: NDArray[np.uint64], slots: SlotArray, *, num_bytes: int) -> Iterator[None]:
        for place, slot in enumerate(slots.tolist()):
            digest = 0
            for start in range(0, num_bytes, _STEP_BYTES):
                digest = self._digest(self._rows[slot, start : min(start + _STEP_BYTES, num_bytes)], digest)
                yield
            values[place] = digest

    def _sample(self, values: NDArray[np.uint64], slots: SlotArray, *, pieces: ByteRows) -> Iterator[None]:
        for blocks in _slices(len(slots), block_bytes=pieces.shape[1] * _SAMPLE_BYTES):
            picked = pieces[slots[blocks]].reshape(-1, pieces.shape[1] * _SAMPLE_BYTES)
            values[blocks] = [self._digest(row, 0) for row in picked]
            yield

    def _cut_pieces(self, num_bytes: int) -> ByteRows:
        """What is read of every slot, shape `[blocks, pieces, 64]`; nothing is copied."""
        count = 1 + (num_bytes - _SAMPLE_BYTES) // _SAMPLE_STRIDE
        strides = (self._rows.strides[0], _SAMPLE_STRIDE, 1)
        return as_strided(self._rows, shape=(len(self._rows), count, _SAMPLE_BYTES), strides=strides, writeable=False)


def _slices(blocks: int, *, block_bytes: int) -> Iterator[slice]:
    """Which blocks are digested in one step."""
    step = min(max(_STEP_BYTES // block_bytes, 1), _STEP_BLOCKS)
    for start in range(0, blocks, step):
        yield slice(start, min(start + step, blocks))
