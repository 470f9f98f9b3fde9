"""Memory per slot: zeros like numpy's, touched by small pages."""

from __future__ import annotations

import gc
import mmap
import os

import numpy as np
import pytest

from aiokv.cli.bench.memory import resident_bytes
from aiokv.core.slot_memory import zeros

LARGE = 1 << 22


@pytest.mark.parametrize("size", [0, 1, 1000, LARGE])
@pytest.mark.parametrize("dtype", [np.bool_, np.int16, np.int32, np.int64, np.uint64])
def test_zeros_are_those_of_numpy_and_writable(size: int, dtype: type[np.generic]) -> None:
    array, expected = zeros(size, dtype), np.zeros(size, dtype)
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    assert array.flags.writeable
    assert not array.any()
    array[size // 2 :] = 1
    assert np.count_nonzero(array) == size - size // 2


@pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="this system has no huge pages to avoid")
def test_what_is_hardly_used_takes_hardly_any_memory() -> None:
    before = resident_bytes()
    array = zeros(16 * LARGE, np.int64)
    array[:: LARGE // 4] = 1
    assert resident_bytes() - before < array.nbytes // 16
    assert np.count_nonzero(array) == 64


def test_memory_goes_with_its_last_view() -> None:
    array = zeros(16 * LARGE, np.uint8)
    array[:] = 1
    view = array[-2:]
    held = resident_bytes()
    del array
    gc.collect()
    assert view.tolist() == [1, 1]
    del view
    gc.collect()
    assert held - resident_bytes() > 8 * LARGE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_writes_its_own() -> None:
    array = zeros(LARGE, np.int32)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        array[:] = 7
        os.write(writer, str(array.sum()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(reader, 1000)) == 7 * LARGE
    os.close(reader)
    os.close(writer)
    assert not array.any()


@pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="this system has no huge pages to avoid")
def test_memory_that_there_is_not_is_a_memory_error_as_it_is_of_numpy() -> None:
    """Not the system's own error."""
    with pytest.raises(MemoryError):
        zeros(1 << 56, np.uint8)
