from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from aiokv.backends.arena import CpuArena, Layout
from aiokv.errors import ConfigError
from tests.backends.support import geometry_of, layout_of

BLOCKS = 5


def zeros(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.zeros(shape, dtype=np.uint8)


def fragment_sizes(layout: Layout, group: str) -> list[int]:
    return [fragment.num_bytes for fragment in layout.fragments[group]]


FRAGMENTS = {
    "dense": (zeros(BLOCKS, 4, 6), [24]),
    "K and V outermost": (zeros(2, BLOCKS, 4, 6), [24, 24]),
    "K and V inside the block": (zeros(BLOCKS, 2, 4, 6).swapaxes(0, 1), [48]),
    "K and V seen inside, stored outside": (zeros(2, BLOCKS, 24).swapaxes(0, 1), [24, 24]),
    "inner axes permuted": (zeros(BLOCKS, 6, 4).swapaxes(1, 2), [24]),
    "heads outermost": (zeros(3, BLOCKS, 4).swapaxes(0, 1), [4, 4, 4]),
    "one of two layers of a page": (zeros(BLOCKS, 2, 8)[:, 1], [8]),
    "part of the last axis": (zeros(BLOCKS, 3, 8)[:, :, :4], [4, 4, 4]),
    "no inner axes": (np.zeros(BLOCKS, dtype=np.float32), [4]),
    "wide elements": (torch.zeros(BLOCKS, 3, dtype=torch.float64), [24]),
    "narrow floats": (torch.zeros(2, BLOCKS, 3, dtype=torch.bfloat16), [6, 6]),
}


@pytest.mark.parametrize(("tensor", "sizes"), FRAGMENTS.values(), ids=FRAGMENTS.keys())
def test_strides_decide_the_fragments_of_a_block(tensor: object, sizes: list[int]) -> None:
    layout = layout_of({"full": [tensor]}, gpu_blocks=BLOCKS)
    assert fragment_sizes(layout, "full") == sizes
    assert layout.block_bytes("full") == sum(sizes)
    assert layout.device == "cpu"


def test_two_gpu_blocks_and_two_outermost_are_k_and_v() -> None:
    assert fragment_sizes(layout_of({"full": [zeros(2, 2, 4)]}, gpu_blocks=2), "full") == [4, 4]
    assert fragment_sizes(layout_of({"full": [zeros(2, 3, 4)]}, gpu_blocks=2), "full") == [12]


def test_a_pool_of_one_block_does_not_need_its_stride() -> None:
    assert fragment_sizes(layout_of({"full": [zeros(3, 4)[1:2]]}, gpu_blocks=1), "full") == [4]


def test_a_recurrent_layer_may_be_several_tensors() -> None:
    layers = [[zeros(BLOCKS, 3), zeros(BLOCKS, 4)], zeros(BLOCKS, 5)]
    assert fragment_sizes(layout_of({"r": layers}, gpu_blocks=BLOCKS), "r") == [3, 4, 5]


def test_memory_named_twice_in_a_group_is_copied_once() -> None:
    shared = zeros(BLOCKS, 4)
    assert fragment_sizes(layout_of({"full": [shared, zeros(BLOCKS, 6), shared]}, gpu_blocks=BLOCKS), "full") == [4, 6]


def test_a_cpu_slot_is_as_large_as_the_largest_block() -> None:
    layout = layout_of({"full": [zeros(BLOCKS, 10), zeros(BLOCKS, 3)], "swa": [zeros(BLOCKS, 12)]}, gpu_blocks=BLOCKS)
    assert layout.cpu_block_bytes == 13
    assert (layout.block_bytes("full"), layout.block_bytes("swa")) == (13, 12)


def test_the_cpu_pool_can_be_sized_after_the_blocks_were_measured() -> None:
    measured = layout_of({"full": [zeros(BLOCKS, 10)]}, gpu_blocks=BLOCKS, cpu_blocks=0)
    sized = dataclasses.replace(measured, cpu_blocks=1000 // measured.cpu_block_bytes)
    assert sized.cpu_blocks == 100


def test_groups_may_share_memory_whose_blocks_coincide() -> None:
    shared, page = zeros(BLOCKS, 4), zeros(BLOCKS, 2, 4)
    layout_of({"full": [shared], "swa": [shared]}, gpu_blocks=BLOCKS)
    layout_of({"full": [shared], "swa": [shared[:, :2]]}, gpu_blocks=BLOCKS)
    layout_of({"full": [page[:, 0], page[:, 1]], "swa": [page]}, gpu_blocks=BLOCKS)
    layout_of({"full": [torch.from_numpy(shared)], "swa": [shared]}, gpu_blocks=BLOCKS)


def test_without_arenas_there_is_no_memory() -> None:
    layout = Layout(geometry=geometry_of("full"), gpu_blocks=BLOCKS, cpu_blocks=3)
    assert (layout.device, dict(layout.fragments), layout.cpu_block_bytes) == ("", {}, 0)


def read_only() -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    array = zeros(BLOCKS, 4)
    array.flags.writeable = False
    return array


SHARED = zeros(2 * BLOCKS, 4)
UNUSABLE: dict[str, tuple[Mapping[str, object], str]] = {
    "missing group": ({"full": [zeros(BLOCKS, 4)]}, r"no tensors for 'swa'"),
    "unknown group": ({"full": [zeros(BLOCKS, 4)], "swa": [zeros(BLOCKS, 4)], "x": []}, r"names 'x'"),
    "no tensor": ({"full": [], "swa": [zeros(BLOCKS, 4)]}, r"group 'full'.*at least one"),
    "a bare tensor": ({"full": zeros(BLOCKS, 4), "swa": [zeros(BLOCKS, 4)]}, r"group 'full'.*a list"),
    "not a tensor": ({"full": [zeros(BLOCKS, 4), "kv"], "swa": [zeros(BLOCKS, 4)]}, r"'full', tensor 1 .*not str"),
    "nested list": ({"full": [[zeros(BLOCKS, 4)]], "swa": [zeros(BLOCKS, 4)]}, r"'full', tensor 0 is a list"),
    "too few blocks": ({"full": [zeros(4, 3)], "swa": [zeros(BLOCKS, 4)]}, r"'full', tensor 0 of shape \[4, 3\]"),
    "three outermost": ({"full": [zeros(3, BLOCKS, 3)], "swa": [zeros(BLOCKS, 4)]}, r"of shape \[3, 5, 3\]"),
    "a scalar": ({"full": [np.array(1.0)], "swa": [zeros(BLOCKS, 4)]}, r"of shape \[\]"),
    "empty": ({"full": [zeros(BLOCKS, 0)], "swa": [zeros(BLOCKS, 4)]}, r"of shape \[5, 0\]: it is empty"),
    "read-only": ({"full": [read_only()], "swa": [zeros(BLOCKS, 4)]}, r"read-only"),
    "objects": ({"full": [np.empty(BLOCKS, dtype=object)], "swa": [zeros(BLOCKS, 4)]}, r"Python objects"),
    "expanded": ({"full": [torch.zeros(1, 4).expand(BLOCKS, 4)], "swa": [zeros(BLOCKS, 4)]}, r"overlap"),
    "backwards": ({"full": [zeros(BLOCKS, 4)[::-1]], "swa": [zeros(BLOCKS, 4)]}, r"backwards"),
    "two gaps": ({"full": [zeros(BLOCKS, 2, 4, 4)[:, :, :2, :2]], "swa": [zeros(BLOCKS, 4)]}, r"constant stride"),
    "sparse": ({"full": [torch.zeros(BLOCKS, 4).to_sparse()], "swa": [zeros(BLOCKS, 4)]}, r"no strided memory"),
    "meta": ({"full": [torch.zeros(BLOCKS, 4, device="meta")], "swa": [zeros(BLOCKS, 4)]}, r"no strided memory"),
    "shared, shifted": (
        {"full": [SHARED[:BLOCKS]], "swa": [SHARED[1 : BLOCKS + 1]]},
        r"shares memory with group 'full'",
    ),
    "shared, other stride": ({"full": [SHARED[:BLOCKS]], "swa": [SHARED[::2]]}, r"'swa', tensor 0.*shares memory"),
}


@pytest.mark.parametrize(("arenas", "message"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_what_cannot_be_used_is_named(arenas: Mapping[str, list[object]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout(geometry=geometry_of("full", "swa"), gpu_blocks=BLOCKS, cpu_blocks=3, arenas=arenas)


def test_a_nested_tensor_is_named_by_both_positions() -> None:
    with pytest.raises(ConfigError, match=r"group 'r', tensor 0\.1 of shape \[4, 4\]"):
        layout_of({"r": [[zeros(BLOCKS, 4), zeros(4, 4)]]}, gpu_blocks=BLOCKS)


@pytest.mark.parametrize(("name", "value"), [("gpu_blocks", 0), ("gpu_blocks", True), ("cpu_blocks", -1)])
def test_a_wrong_number_of_blocks_is_named(name: str, value: int) -> None:
    counts = {"gpu_blocks": 4, "cpu_blocks": 4, name: value}
    with pytest.raises(ConfigError, match=name):
        Layout(geometry=geometry_of("full"), gpu_blocks=counts["gpu_blocks"], cpu_blocks=counts["cpu_blocks"])


def test_arenas_must_be_a_mapping() -> None:
    arenas: object = [zeros(BLOCKS, 4)]
    with pytest.raises(ConfigError, match="must map"):
        Layout(geometry=geometry_of("full"), gpu_blocks=BLOCKS, cpu_blocks=1, arenas=arenas)  # type: ignore[arg-type]  # the point


@pytest.mark.parametrize(("blocks", "block_bytes"), [(3, 1000), (1, 1), (5, mmap.PAGESIZE), (7, 3 * mmap.PAGESIZE + 1)])
def test_the_cpu_arena_is_exactly_as_large_as_its_slots(blocks: int, block_bytes: int) -> None:
    arena = CpuArena(blocks=blocks, block_bytes=block_bytes)
    assert arena.num_bytes == blocks * block_bytes
    assert arena.rows.shape == (blocks, block_bytes)
    assert not arena.rows.any()
    arena.rows[-1, -1] = 1


def test_a_pool_without_cpu_slots_maps_nothing() -> None:
    assert CpuArena(blocks=0, block_bytes=64).num_bytes == 0


def test_memory_that_cannot_be_mapped_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot map"):
        CpuArena(blocks=1 << 40, block_bytes=1 << 20)
