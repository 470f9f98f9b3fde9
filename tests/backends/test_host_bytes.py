"""Whole journeys GPU to CPU to GPU: exact bytes, for every layout the contract names and several dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv.backends.base import EventStatus
from aiokv.backends.host import HostBackend
from aiokv.backends.host_copy import STEP_BYTES
from aiokv.model.ids import Direction
from tests.backends.support import GUARD_S, batch_of, end_of, layout_of, load, store

CPU_BLOCKS = 7
DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.complex64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """A tensor as the backend is given it, and its bytes by block, read by plain indexing."""

    tensor: torch.Tensor
    as_numpy: bool
    block_axis: int

    def given(self) -> object:
        if not self.as_numpy:
            return self.tensor
        return self.raw().numpy()

    def raw(self) -> torch.Tensor:
        """The same memory as integers, so that NaN equals NaN; numpy knows no bfloat16."""
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return self.tensor.view(integers[self.tensor.element_size()])

    def block(self, index: int) -> torch.Tensor:
        return self.raw().select(self.block_axis, index)


@st.composite
def arenas(draw: st.DrawFn, *, gpu_blocks: int) -> Arena:
    """A dense tensor of random bytes whose axes lie in memory in any order."""
    leading = draw(st.sampled_from([(gpu_blocks,), (2, gpu_blocks)]))
    shape = leading + tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    order = draw(st.permutations(range(len(shape))))
    dtype = draw(st.sampled_from(DTYPES))
    length = int(np.prod(shape)) * dtype.itemsize
    seed = draw(st.integers(0, 2**16))
    values = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, size=length, dtype=np.uint8)
    dense = torch.from_numpy(values).view(dtype).view([shape[axis] for axis in order])
    tensor = dense.permute([order.index(axis) for axis in range(len(shape))])
    return Arena(tensor=tensor, as_numpy=draw(st.booleans()), block_axis=len(leading) - 1)


@st.composite
def journeys(draw: st.DrawFn) -> tuple[int, list[Arena], list[int], list[int], list[int]]:
    """Blocks of the pool, its tensors, and where blocks start, rest and end."""
    gpu_blocks = draw(st.integers(3, 9))
    tensors = draw(st.lists(arenas(gpu_blocks=gpu_blocks), min_size=1, max_size=3))
    count = draw(st.integers(1, min(gpu_blocks - 1, CPU_BLOCKS)))
    start = draw(st.permutations(range(gpu_blocks)))[:count]
    rest = draw(st.permutations(range(CPU_BLOCKS)))[:count]
    end = draw(st.permutations(range(1, gpu_blocks)))[:count]
    return gpu_blocks, tensors, start, rest, end


@given(journeys())
@settings(max_examples=150)
def test_a_block_comes_back_as_it_went_and_nothing_else_changes(
    journey: tuple[int, list[Arena], list[int], list[int], list[int]],
) -> None:
    gpu_blocks, tensors, start, rest, end = journey
    backend = HostBackend()
    backend.open(
        layout_of({"full": [arena.given() for arena in tensors]}, gpu_blocks=gpu_blocks, cpu_blocks=CPU_BLOCKS)
    )
    try:
        assert all(not arena.block(0).any() for arena in tensors), "the null block is zero"
        before = [[arena.block(index).clone() for index in range(gpu_blocks)] for arena in tensors]
        assert end_of(backend.submit(store(dict(zip(start, rest, strict=True))))) is EventStatus.DONE
        for arena, blocks in zip(tensors, before, strict=True):
            assert all(torch.equal(arena.block(index), block) for index, block in enumerate(blocks))
            arena.raw().fill_(1)
        assert end_of(backend.submit(load(dict(zip(rest, end, strict=True))))) is EventStatus.DONE
        for arena, blocks in zip(tensors, before, strict=True):
            moved = dict(zip(end, start, strict=True))
            for index in range(gpu_blocks):
                expected = blocks[moved[index]] if index in moved else torch.ones_like(blocks[index])
                assert torch.equal(arena.block(index), expected)
    finally:
        assert backend.close(deadline_s=GUARD_S)


def test_a_cpu_slot_holds_a_group_s_fragments_one_behind_the_other() -> None:
    kv = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)
    state = np.arange(100, 120, dtype=np.uint8).reshape(4, 5)
    backend = HostBackend()
    backend.open(layout_of({"full": [kv], "r": [[state]]}, gpu_blocks=4, cpu_blocks=2))
    for slot in range(2):
        backend.cpu_slot(slot)[:] = 255
    end_of(backend.submit(store({2: 0})))
    end_of(backend.submit(store({3: 1}, group="r")))
    assert backend.cpu_slot(0).tolist() == [6, 7, 8, 18, 19, 20]
    assert backend.cpu_slot(1).tolist() == [115, 116, 117, 118, 119, 255]
    assert backend.close(deadline_s=GUARD_S)


def test_what_is_written_to_a_cpu_slot_is_what_a_load_brings() -> None:
    kv = np.zeros((4, 6), dtype=np.uint8)
    backend = HostBackend()
    backend.open(layout_of({"full": [kv]}, gpu_blocks=4, cpu_blocks=2))
    backend.cpu_slot(1)[:] = range(6)
    end_of(backend.submit(load({1: 3})))
    assert kv.tolist() == [[0] * 6, [0] * 6, [0] * 6, [0, 1, 2, 3, 4, 5]]
    assert backend.close(deadline_s=GUARD_S)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("width", [STEP_BYTES, STEP_BYTES + 1, 2 * STEP_BYTES + 4096])
def test_a_block_longer_than_a_step_is_whole(direction: Direction, width: int) -> None:
    kv = np.random.default_rng(3).integers(0, 256, size=(3, width), dtype=np.uint8)
    backend = HostBackend()
    backend.open(layout_of({"full": [kv]}, gpu_blocks=3, cpu_blocks=2))
    backend.cpu_slot(1)[:] = np.random.default_rng(4).integers(0, 256, size=width, dtype=np.uint8)
    source, target = (kv[2], backend.cpu_slot(1)) if direction is Direction.STORE else (backend.cpu_slot(1), kv[2])
    expected = source.copy()
    end_of(backend.submit(batch_of(direction, {2: 1} if direction is Direction.STORE else {1: 2})))
    assert np.array_equal(target, expected)
    assert backend.close(deadline_s=GUARD_S)


@pytest.mark.parametrize("widths", [(4096,), (4096, 4096, 4096), (4096, 512), (4096, 1000), (96 << 10,)])
def test_a_thousand_scattered_blocks_come_back(widths: Sequence[int]) -> None:
    blocks = 1001 if sum(widths) < 64 << 10 else 101
    rng = np.random.default_rng(9)
    tensors = [rng.integers(0, 256, size=(blocks, width), dtype=np.uint8) for width in widths]
    backend = HostBackend()
    backend.open(layout_of({"full": tensors}, gpu_blocks=blocks, cpu_blocks=blocks))
    before = [tensor.copy() for tensor in tensors]
    out, back = rng.permutation(blocks).tolist(), (rng.permutation(blocks - 1) + 1).tolist()
    end_of(backend.submit(store(dict(zip(range(blocks), out, strict=True)))))
    for tensor in tensors:
        tensor[:] = 0
    assert end_of(backend.submit(load(dict(zip(out, back, strict=False))))) is EventStatus.DONE
    for tensor, old in zip(tensors, before, strict=True):
        assert np.array_equal(tensor[back], old[: blocks - 1])
    assert backend.close(deadline_s=GUARD_S)


def test_groups_that_share_tensors_share_slots() -> None:
    shared = np.random.default_rng(1).integers(0, 256, size=(4, 8), dtype=np.uint8)
    backend = HostBackend()
    backend.open(layout_of({"full": [shared], "swa": [shared]}, gpu_blocks=4, cpu_blocks=2))
    expected = shared[[1, 2]].copy()
    for group, pairs in (("full", {1: 0}), ("swa", {2: 1})):
        end_of(backend.submit(store(pairs, group=group)))
    assert [backend.cpu_slot(slot).tolist() for slot in range(2)] == expected.tolist()
    assert backend.close(deadline_s=GUARD_S)
