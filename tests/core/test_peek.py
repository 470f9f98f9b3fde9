"""The map of a pool: each cell says what most of its slots are, whatever the size of pool and cells."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import numpy as np
import pytest

from aiokv.core.peek import Peek
from aiokv.core.slices import SLICE_BLOCKS
from aiokv.core.world import World
from aiokv.errors import UsageError
from aiokv.model.ids import IntArray, Tier
from aiokv.model.spec import CacheGeometry, FullAttention

CAPACITY = 203
NO_LIMIT = 1 << 40
GEOMETRY = CacheGeometry(groups=(FullAttention("full", block_size=16),), hash_block_size=16)
PRECEDENCE = "qrpc."


def make_world(*, capacity: int = CAPACITY, cpu_blocks: int = 0) -> World:
    return World(
        GEOMETRY,
        gpu_blocks=capacity + 1,
        cpu_blocks=cpu_blocks,
        watermark=0.0,
        slice_blocks=SLICE_BLOCKS,
        world_size=1,
    )


def name_slots(world: World, count: int) -> IntArray:
    world.gpu.claim(count)
    return world.gpu.name_claimed(count, NO_LIMIT).slots


def keyed(world: World, slots: IntArray) -> None:
    keys = np.random.default_rng(int(slots[0])).integers(0, 2**64, (len(slots), 4), dtype=np.uint64)
    assert world.gpu.register(slots, keys, 0).all()


def put_into(world: World, states: str) -> None:
    """Bring slots `1, 2, ...` into these states; those beyond are left unused."""
    letters = np.array(list(states))
    slots = name_slots(world, len(states))
    assert slots.tolist() == list(range(1, len(states) + 1))
    resident = slots[(letters == "p") | (letters == "c")]
    if len(resident):
        keyed(world, resident)
    world.gpu.quarantine(slots[letters == "q"])
    world.gpu.unpin(slots[(letters == "c") | (letters == ".")])


def summarised(states: str, *, capacity: int, cells: int) -> str:
    """Slot by slot: the oracle."""
    whole = states.ljust(capacity, ".")
    size = -(-capacity // cells)
    parts = [whole[start : start + size] for start in range(0, capacity, size)]
    return "".join("q" if "q" in part else _most_common(part) for part in parts)


def _most_common(part: str) -> str:
    counts = Counter(part)
    return max(PRECEDENCE, key=lambda state: (counts[state], -PRECEDENCE.index(state)))


@pytest.mark.parametrize("cells", [1, 2, 7, 64, 101, 102, 202, CAPACITY, 5_000])
@pytest.mark.parametrize("used", [1, 40, 197, CAPACITY])
def test_each_cell_is_what_most_of_its_slots_are(cells: int, used: int) -> None:
    world = make_world()
    chosen = np.random.default_rng(used).choice(list("....rrppppcccccc"), used)
    states = "".join(chosen)
    put_into(world, states)
    found = Peek(world).take_map(Tier.GPU, cells=cells)
    assert found.cells == summarised(states, capacity=CAPACITY, cells=cells)
    assert len(found.cells) <= cells
    assert found.cell_slots * (len(found.cells) - 1) < CAPACITY <= found.cell_slots * len(found.cells)


def test_one_slot_out_of_use_marks_its_cell() -> None:
    world = make_world()
    put_into(world, "c" * 60 + "q" + "p" * 100)
    assert Peek(world).take_map(Tier.GPU, cells=10).cells == "ccqppppp.."


def test_the_last_cell_is_judged_by_the_slots_it_has() -> None:
    world = make_world(capacity=21)
    put_into(world, "." * 20 + "c")
    assert Peek(world).take_map(Tier.GPU, cells=2).cells == ".."
    assert Peek(world).take_map(Tier.GPU, cells=3).cells == "..."
    assert Peek(world).take_map(Tier.GPU, cells=6).cells == ".....c"


@pytest.mark.parametrize(("states", "cell"), [("rp", "r"), ("pc", "p"), ("c.", "c"), (".r", "r")])
def test_of_states_that_are_as_many_the_less_usual_one_is_shown(states: str, cell: str) -> None:
    world = make_world(capacity=2)
    put_into(world, states)
    assert Peek(world).take_map(Tier.GPU, cells=1).cells == cell


def test_a_pool_of_many_parts_is_seen_whole() -> None:
    capacity = 700_001
    world = make_world(capacity=capacity)
    slots = name_slots(world, 600_000)
    world.gpu.unpin(slots[: 300_000 - 3])
    for cells in (1000, 3):
        size = -(-capacity // cells)
        states = Peek(world).take_map(Tier.GPU, cells=cells).cells
        assert len(states) == -(-capacity // size)
        middles = [index * size + size // 2 for index in range(len(states))]
        assert states == "".join("r" if 300_000 - 3 <= middle < 600_000 else "." for middle in middles)


def test_stale_blocks_are_shown_until_they_are_swept() -> None:
    world = make_world(capacity=10)
    put_into(world, "cccpp")
    world.gpu.bump_epoch()
    assert Peek(world).take_map(Tier.GPU, cells=10).cells == "cccpp....."
    while world.gpu.sweep(100):
        pass
    assert Peek(world).take_map(Tier.GPU, cells=10).cells == "...rr....."


def test_looking_changes_nothing() -> None:
    world = make_world()
    put_into(world, "cprq." * 20)
    before = world.gpu.fingerprint()
    Peek(world).take_map(Tier.GPU, cells=7)
    assert world.gpu.fingerprint() == before


@pytest.mark.parametrize(("tier", "cells"), [(Tier.CPU, 5), (Tier.GPU, 0), (Tier.GPU, -1)])
def test_a_missing_tier_and_no_cells_are_refused(tier: Tier, cells: int) -> None:
    with pytest.raises(UsageError, match="no map"):
        Peek(make_world()).take_map(tier, cells=cells)


def test_the_tiers_have_maps_of_their_own() -> None:
    world = make_world(cpu_blocks=6)
    put_into(world, "p" * 4)
    assert world.cpu is not None
    world.cpu.claim(2)
    world.cpu.name_claimed(2, NO_LIMIT)
    assert Peek(world).take_map(Tier.CPU, cells=6).cells == "rr...."


@pytest.mark.parametrize("late", range(1, 8))
def test_counts_that_change_between_two_of_them_are_read_again(late: int) -> None:
    """The loop's thread may go on between any two calls of who looks: here it does at the `late`-th return."""
    world = make_world(capacity=20)
    put_into(world, "cccpprr")
    before, returned = world.gpu.counts(), 0

    def change(frame: FrameType, event: str, argument: object) -> None:
        nonlocal returned
        if event == "return" and frame.f_code.co_name == "__len__":
            returned += 1
            if returned == late:
                sys.setprofile(None)
                keyed(world, name_slots(world, 10))

    sys.setprofile(change)
    try:
        seen = Peek(world).pools()[Tier.GPU]
    finally:
        sys.setprofile(None)
    after = world.gpu.counts()
    assert after.resident == before.resident + 10, "the change was made"
    assert seen in (before, after)
