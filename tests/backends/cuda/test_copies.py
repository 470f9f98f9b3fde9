"""What a batch copies, in addresses: made with `memmove` over real memory, compared block by block."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aiokv.backends.cuda_copies import Copies, CopyMaker, cut_copy_lanes
from aiokv.model.ids import Direction
from tests.backends.support import batch_of, layout_of, load, store

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One group's tensors, the CPU slots and who describes copies between them."""

    tensors: Sequence[Bytes]
    cpu: Bytes
    maker: CopyMaker

    def blocks(self) -> list[bytes]:
        """Every block, its fragments one behind the other as in a slot."""
        layout = layout_of({"full": list(self.tensors)}, gpu_blocks=len(self.tensors[0]))
        return [
            b"".join(
                ctypes.string_at(fragment.address + block * fragment.block_stride, fragment.num_bytes)
                for fragment in layout.fragments["full"]
            )
            for block in range(len(self.tensors[0]))
        ]


def world_of(tensors: Sequence[Bytes], *, cpu_blocks: int, seam_blocks: int = 0, slot_padding: int = 0) -> World:
    layout = layout_of({"full": list(tensors)}, gpu_blocks=len(tensors[0]), cpu_blocks=cpu_blocks)
    stride = layout.cpu_block_bytes + slot_padding
    cpu = np.zeros((cpu_blocks, stride), np.uint8)
    address = cpu.__array_interface__["data"][0]
    lanes = cut_copy_lanes(layout.fragments["full"], cpu_address=address, cpu_stride=stride)
    return World(tensors=tensors, cpu=cpu, maker=CopyMaker(lanes, seam_blocks=seam_blocks))


def make(copies: Copies) -> None:
    for target, source, num_bytes in zip(*(column.tolist() for column in copies), strict=True):
        ctypes.memmove(target, source, num_bytes)


def random_bytes(*shape: int) -> Bytes:
    return np.random.default_rng(len(shape)).integers(0, 256, shape, np.uint8)


def sizes_of(world: World, pairs: dict[int, int], *, direction: Direction = Direction.STORE) -> list[int]:
    described = world.maker.describe(batch_of(direction, pairs))
    pieces = list(described.pieces(most=1000))
    assert sum(len(piece.sizes) for piece in pieces) == len(described)
    return [size for piece in pieces for size in piece.sizes.tolist()]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    blocks = draw(st.integers(2, 9))
    kinds = {
        "dense": random_bytes(blocks, 3, 4),
        "another": random_bytes(blocks, 5),
        "with gaps": random_bytes(blocks, 2, 8)[:, 1],
        "heads outermost": random_bytes(3, blocks, 4).swapaxes(0, 1),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=4, unique=True))
    return world_of(
        [kinds[name] for name in chosen],
        cpu_blocks=draw(st.integers(blocks, 12)),
        seam_blocks=draw(st.integers(0, 4)),
        slot_padding=draw(st.sampled_from([0, 0, 3])),
    )


@given(world=worlds(), data=st.data(), direction=st.sampled_from(Direction), most=st.integers(1, 7))
def test_every_byte_goes_where_it_belongs_and_no_other_changes(
    world: World, data: st.DataObject, direction: Direction, most: int
) -> None:
    gpu_blocks, cpu_blocks = len(world.tensors[0]), len(world.cpu)
    count = data.draw(st.integers(0, gpu_blocks))
    adjacent = data.draw(st.booleans())
    gpu_slots = list(range(count)) if adjacent else data.draw(st.permutations(range(gpu_blocks)))[:count]
    cpu_slots = list(range(count)) if adjacent else data.draw(st.permutations(range(cpu_blocks)))[:count]
    if data.draw(st.booleans()):
        gpu_slots.reverse()
        cpu_slots.reverse()
    world.cpu[:] = random_bytes(*world.cpu.shape)
    engine, cpu, length = world.blocks(), [bytes(row) for row in world.cpu], len(world.blocks()[0])

    sources, targets = (gpu_slots, cpu_slots) if direction is Direction.STORE else (cpu_slots, gpu_slots)
    described = world.maker.describe(batch_of(direction, dict(zip(sources, targets, strict=True))))
    pieces = list(described.pieces(most=most))
    for piece in pieces:
        make(piece)

    assert all(0 < len(piece.sizes) <= most for piece in pieces)
    assert sum(len(piece.sizes) for piece in pieces) == len(described)
    assert sum(int(piece.sizes.sum()) for piece in pieces) == count * length
    for gpu_slot, cpu_slot in zip(gpu_slots, cpu_slots, strict=True):
        if direction is Direction.STORE:
            cpu[cpu_slot] = engine[gpu_slot] + cpu[cpu_slot][length:]
        else:
            engine[gpu_slot] = cpu[cpu_slot][:length]
    assert world.blocks() == engine
    assert [bytes(row) for row in world.cpu] == cpu


def test_slots_adjacent_on_both_sides_are_one_copy() -> None:
    world = world_of([random_bytes(8, 16)], cpu_blocks=8)
    assert sizes_of(world, {1: 4, 2: 5, 3: 6}) == [48]
    assert sizes_of(world, {1: 4, 2: 5, 3: 7, 5: 0}) == [32, 16, 16]


def test_slots_given_back_and_named_backwards_are_one_copy_too() -> None:
    world = world_of([random_bytes(8, 16)], cpu_blocks=8)
    assert sizes_of(world, {6: 3, 5: 2, 4: 1}) == [48]
    assert sizes_of(world, {4: 3, 5: 2, 6: 1}) == [16, 16, 16]


@pytest.mark.parametrize("direction", Direction)
def test_no_copy_crosses_a_seam_between_two_registrations(direction: Direction) -> None:
    world = world_of([random_bytes(8, 16)], cpu_blocks=8, seam_blocks=3)
    pairs = {slot: slot for slot in range(1, 8)}
    assert sizes_of(world, pairs, direction=direction) == [32, 48, 32]
    backwards = dict(reversed(pairs.items()))
    assert sizes_of(world, backwards, direction=direction) == [32, 48, 32]


def test_fragments_adjacent_in_the_block_are_one_lane() -> None:
    pages = random_bytes(6, 3, 8)
    world = world_of([pages[:, layer] for layer in range(3)], cpu_blocks=6)
    assert sizes_of(world, {1: 1, 2: 2}) == [48]


def test_neighbours_of_which_each_is_a_whole_tensor_stay_apart() -> None:
    both = random_bytes(2, 16)
    world = world_of([both[0:1], both[1:2]], cpu_blocks=2)
    assert sizes_of(world, {0: 1}) == [16, 16]


def test_two_tensors_of_each_block_are_a_copy_each() -> None:
    world = world_of([random_bytes(8, 16), random_bytes(8, 4)], cpu_blocks=8)
    assert sorted(sizes_of(world, {1: 1, 2: 2})) == [4, 4, 16, 16]


def test_a_batch_of_nothing_is_no_copy() -> None:
    world = world_of([random_bytes(8, 16)], cpu_blocks=8)
    for batch in (store({}), load({})):
        described = world.maker.describe(batch)
        assert len(described) == 0
        assert list(described.pieces(most=8)) == []


def test_what_the_driver_reads_is_contiguous_and_of_64_bits() -> None:
    world = world_of([random_bytes(8, 16), random_bytes(3, 8, 4).swapaxes(0, 1)], cpu_blocks=8)
    for piece in world.maker.describe(load({0: 1, 1: 2, 5: 3})).pieces(most=4):
        assert all(column.dtype == np.uint64 and column.flags.c_contiguous for column in piece)
