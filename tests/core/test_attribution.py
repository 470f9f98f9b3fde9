"""Every token of a prompt has one source, and the sources sum to the prompt (law 7)."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.core.attribution import find_sources
from aiokv.model.ids import BoolArray
from aiokv.model.plan import Hit
from aiokv.model.spec import CacheGeometry, ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow


def geometry_of(*groups: GroupSpec, hash_block_size: int = 16) -> CacheGeometry:
    return CacheGeometry(groups=groups, hash_block_size=hash_block_size)


def loads(letters: str) -> BoolArray:
    """One letter per block of the prefix: c is loaded from CPU, anything else is not."""
    return np.array([letter == "c" for letter in letters], np.bool_)


def hit(prompt: int, *, gpu: int, cpu: int) -> Hit:
    return Hit(prompt_tokens=prompt, gpu_tokens=gpu, cpu_tokens=cpu, compute_tokens=prompt - gpu - cpu)


FULL = FullAttention("full", block_size=16)
WINDOW = SlidingWindow("window", block_size=16, window=32)


@pytest.mark.parametrize(
    ("letters", "gpu", "cpu", "switches"),
    [("", 0, 0, 0), ("ggggg", 80, 0, 0), ("ccccc", 0, 80, 0), ("gcgcg", 48, 32, 4), ("ggccc", 32, 48, 1)],
)
def test_one_full_group_counts_each_block_by_its_tier(letters: str, gpu: int, cpu: int, switches: int) -> None:
    geometry, length, covered = geometry_of(FULL), 16 * len(letters), [range(len(letters))]
    sources = find_sources(geometry, num_tokens=83, length=length, loads=[loads(letters)], covered=covered)
    assert sources.hit == hit(83, gpu=gpu, cpu=cpu)
    assert sources.switches == switches


def test_a_token_is_cpu_if_any_group_loads_its_block() -> None:
    geometry = geometry_of(FULL, WINDOW)
    given = [loads("gcggg"), loads("---gc")]
    sources = find_sources(geometry, num_tokens=81, length=80, loads=given, covered=[range(5), range(3, 5)])
    assert sources.hit == hit(81, gpu=48, cpu=32)


def test_groups_with_larger_blocks_load_all_their_tokens() -> None:
    geometry = geometry_of(FULL, FullAttention("wide", block_size=64))
    given = [loads("gggggggg"), loads("gc")]
    sources = find_sources(geometry, num_tokens=200, length=128, loads=given, covered=[range(8), range(2)])
    assert sources.hit == hit(200, gpu=64, cpu=64)
    assert sources.switches == 1


@pytest.mark.parametrize(("letters", "gpu", "cpu"), [("---cg", 16, 64), ("---gc", 64, 16), ("---cc", 0, 80)])
def test_skipped_tokens_take_the_source_of_the_next_covered_one(letters: str, gpu: int, cpu: int) -> None:
    geometry = geometry_of(WINDOW)
    sources = find_sources(geometry, num_tokens=81, length=80, loads=[loads(letters)], covered=[range(3, 5)])
    assert sources.hit == hit(81, gpu=gpu, cpu=cpu)


def test_a_prefix_that_no_group_covers_is_gpu() -> None:
    geometry = geometry_of(ChunkedLocal("chunked", block_size=16, chunk=64))
    sources = find_sources(geometry, num_tokens=81, length=64, loads=[loads("----")], covered=[range(4, 4)])
    assert sources.hit == hit(81, gpu=64, cpu=0)


def test_one_group_may_cover_nothing_while_another_loads() -> None:
    geometry = geometry_of(ChunkedLocal("chunked", block_size=16, chunk=64), WINDOW)
    given = [loads("----"), loads("--gc")]
    sources = find_sources(geometry, num_tokens=81, length=64, loads=given, covered=[range(4, 4), range(2, 4)])
    assert sources.hit == hit(81, gpu=48, cpu=16)


def test_a_loaded_state_makes_the_prefix_before_it_cpu() -> None:
    geometry = geometry_of(RecurrentState("state", block_size=64))
    sources = find_sources(geometry, num_tokens=200, length=192, loads=[loads("--c")], covered=[range(2, 3)])
    assert sources.hit == hit(200, gpu=0, cpu=192)


def test_sharded_groups_count_their_effective_blocks() -> None:
    geometry = CacheGeometry(
        groups=(FullAttention("sharded", block_size=16, sharded=True), FULL), hash_block_size=16, context_parallel=2
    )
    given = [loads("gc"), loads("gggg")]
    sources = find_sources(geometry, num_tokens=65, length=64, loads=given, covered=[range(2), range(4)])
    assert sources.hit == hit(65, gpu=32, cpu=32)


def test_groups_and_rows_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="argument"):
        find_sources(
            geometry_of(FULL, WINDOW), num_tokens=81, length=80, loads=[loads("ccccc")], covered=[range(5)] * 2
        )
    with pytest.raises(ValueError, match="do not sum"):
        find_sources(geometry_of(FULL), num_tokens=81, length=80, loads=[loads("cc")], covered=[range(5)])


def test_an_empty_range_may_stand_anywhere() -> None:
    geometry = geometry_of(ChunkedLocal("chunked", block_size=16, chunk=64), WINDOW)
    given = [loads("----"), loads("--cg")]
    sources = find_sources(geometry, num_tokens=81, length=64, loads=given, covered=[range(0), range(2, 4)])
    assert sources.hit == hit(81, gpu=16, cpu=48)


def test_the_rows_given_are_left_as_they_are() -> None:
    row = loads("---cg")
    sources = find_sources(geometry_of(WINDOW), num_tokens=81, length=80, loads=[row], covered=[range(3, 5)])
    assert sources.switches == 1
    assert row.tolist() == [False, False, False, True, False]
