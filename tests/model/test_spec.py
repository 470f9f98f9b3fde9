"""A geometry is checked as a whole at construction, and knows effective blocks and alignment."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import cast

import pytest

from aiokv.errors import ConfigError
from aiokv.model.spec import CacheGeometry, ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow

FULL = FullAttention("full", block_size=16)


def geometry(*groups: GroupSpec, hash_block_size: int = 16, context_parallel: int = 1) -> CacheGeometry:
    return CacheGeometry(groups=groups, hash_block_size=hash_block_size, context_parallel=context_parallel)


@pytest.mark.parametrize("given", [0, -1, 1.0, "16", True, None])
def test_sizes_must_be_positive_integers(given: object) -> None:
    value = cast("int", given)
    with pytest.raises(ConfigError):
        FullAttention("g", block_size=value)
    with pytest.raises(ConfigError):
        SlidingWindow("g", block_size=16, window=value)
    with pytest.raises(ConfigError):
        ChunkedLocal("g", block_size=16, chunk=value)
    with pytest.raises(ConfigError):
        RecurrentState("g", block_size=value)
    with pytest.raises(ConfigError):
        geometry(FULL, hash_block_size=value)
    with pytest.raises(ConfigError):
        geometry(FULL, context_parallel=value)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_group_needs_a_name(name: object) -> None:
    with pytest.raises(ConfigError):
        FullAttention(cast("str", name), block_size=16)


def test_lookahead_is_for_full_and_window_groups_only() -> None:
    assert FullAttention("g", block_size=16, lookahead=True).lookahead
    assert SlidingWindow("g", block_size=16, window=8, lookahead=True).lookahead
    with pytest.raises(ConfigError, match="lookahead"):
        ChunkedLocal("g", block_size=16, chunk=8, lookahead=True)
    with pytest.raises(ConfigError, match="lookahead"):
        RecurrentState("g", block_size=16, lookahead=True)


def test_groups_must_be_a_tuple_of_at_least_one_spec() -> None:
    with pytest.raises(ConfigError):
        geometry()
    with pytest.raises(ConfigError):
        geometry(cast("GroupSpec", "full"))
    with pytest.raises(ConfigError):
        CacheGeometry(groups=cast("tuple[GroupSpec, ...]", [FULL]), hash_block_size=16)


def test_group_names_must_differ() -> None:
    with pytest.raises(ConfigError, match="full"):
        geometry(FULL, SlidingWindow("full", block_size=16, window=64))


def test_block_sizes_are_multiples_of_the_hash_block() -> None:
    assert geometry(FullAttention("g", block_size=48)).hashes_per_block(0) == 3
    for block_size in (8, 24):
        with pytest.raises(ConfigError, match=str(block_size)):
            geometry(FullAttention("g", block_size=block_size))


def test_context_parallelism_multiplies_the_blocks_of_sharded_groups() -> None:
    spec = geometry(FullAttention("sharded", block_size=16, sharded=True), FULL, context_parallel=4)
    assert [spec.effective_block_size(i) for i in (0, 1)] == [64, 16]
    assert [spec.hashes_per_block(i) for i in (0, 1)] == [4, 1]


def test_alignment_is_the_least_common_multiple_of_all_blocks_and_of_the_callers() -> None:
    spec = geometry(FullAttention("a", block_size=32), SlidingWindow("b", block_size=48, window=100))
    assert spec.alignment() == 96
    assert spec.alignment(64) == 192
    assert spec.alignment(5) == 480


def test_groups_are_found_by_name_and_a_wrong_name_is_answered_with_the_known_ones() -> None:
    spec = geometry(FULL, RecurrentState("state", block_size=64))
    assert [spec.group_index(name) for name in ("full", "state")] == [0, 1]
    with pytest.raises(ConfigError, match=r"'nope'.*'full', 'state'"):
        spec.group_index("nope")


def test_specs_are_frozen_values() -> None:
    same = FullAttention("full", block_size=16)
    assert same == FULL
    assert hash(same) == hash(FULL)
    assert FullAttention("full", block_size=16, sharded=True) != FULL
    with pytest.raises(FrozenInstanceError):
        same.block_size = 32  # type: ignore[misc]  # that is the point
