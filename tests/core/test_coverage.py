"""The coverage table against the attention masks: which blocks queries at or after L still read below L (law 6)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv.core.coverage import coverage, coverage_start, covered_range
from aiokv.model.spec import CacheGeometry, ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow

MOST_TOKENS = 96

blocks = st.integers(1, 24)
reaches = st.integers(1, 60)
masked_specs = st.one_of(
    st.builds(FullAttention, st.just("g"), block_size=blocks),
    st.builds(SlidingWindow, st.just("g"), block_size=blocks, window=reaches),
    st.builds(ChunkedLocal, st.just("g"), block_size=blocks, chunk=reaches),
)


def geometry_of(spec: GroupSpec, *, context_parallel: int = 1) -> CacheGeometry:
    return CacheGeometry(groups=(spec,), hash_block_size=1, context_parallel=context_parallel)


def is_read(spec: GroupSpec, *, query: int, position: int) -> bool:
    match spec:
        case FullAttention():
            return position <= query
        case SlidingWindow():
            return query - spec.window < position <= query
        case ChunkedLocal():
            return position // spec.chunk == query // spec.chunk and position <= query
        case _:
            raise AssertionError(spec)


def blocks_read(spec: GroupSpec, *, length: int, block: int) -> list[int]:
    """Blocks that hold a position below `length` which one of the next queries reads."""
    queries = range(length, length + 8)
    read = {p // block for p in range(length) if any(is_read(spec, query=q, position=p) for q in queries)}
    return sorted(read)


@settings(max_examples=300)
@given(masked_specs)
def test_coverage_is_what_the_masks_read(spec: GroupSpec) -> None:
    geometry = geometry_of(spec)
    lengths = np.arange(0, MOST_TOKENS, spec.block_size, dtype=np.int64)
    table = coverage(geometry, 0, lengths)
    assert table.start.dtype == table.stop.dtype == np.int64
    for length, start, stop in zip(lengths.tolist(), table.start.tolist(), table.stop.tolist(), strict=True):
        assert list(range(start, stop)) == blocks_read(spec, length=length, block=spec.block_size)
        assert covered_range(geometry, 0, length) == range(start, stop)


@settings(max_examples=200)
@given(masked_specs, st.integers(0, MOST_TOKENS))
def test_coverage_start_of_any_length_is_the_first_block_that_the_next_query_reads(
    spec: GroupSpec, length: int
) -> None:
    first = next(p for p in range(length + 1) if is_read(spec, query=length, position=p))
    assert coverage_start(geometry_of(spec), 0, length) == first // spec.block_size


@settings(max_examples=100)
@given(masked_specs, st.integers(0, MOST_TOKENS))
def test_what_fell_out_of_coverage_stays_out(spec: GroupSpec, length: int) -> None:
    geometry = geometry_of(spec)
    assert coverage_start(geometry, 0, length) <= coverage_start(geometry, 0, length + 1)


@pytest.mark.parametrize(("length", "expected"), [(0, []), (64, [0]), (128, [1]), (192, [2])])
def test_recurrent_group_needs_the_state_after_exactly_that_many_tokens(length: int, expected: list[int]) -> None:
    geometry = geometry_of(RecurrentState("r", block_size=64))
    assert list(covered_range(geometry, 0, length)) == expected


@pytest.mark.parametrize(
    ("spec", "length", "expected"),
    [
        (FullAttention("g", block_size=16), 80, [0, 1, 2, 3, 4]),
        (SlidingWindow("g", block_size=16, window=1), 80, []),
        (SlidingWindow("g", block_size=16, window=2), 80, [4]),
        (SlidingWindow("g", block_size=16, window=17), 80, [4]),
        (SlidingWindow("g", block_size=16, window=18), 80, [3, 4]),
        (SlidingWindow("g", block_size=16, window=512), 80, [0, 1, 2, 3, 4]),
        (ChunkedLocal("g", block_size=16, chunk=64), 80, [4]),
        (ChunkedLocal("g", block_size=16, chunk=64), 64, []),
        (ChunkedLocal("g", block_size=16, chunk=24), 80, [4]),
        (ChunkedLocal("g", block_size=16, chunk=40), 64, [2, 3]),
    ],
)
def test_worked_ranges(spec: GroupSpec, length: int, expected: list[int]) -> None:
    assert list(covered_range(geometry_of(spec), 0, length)) == expected


def test_context_parallelism_widens_the_blocks_of_sharded_groups_only() -> None:
    sharded = geometry_of(SlidingWindow("g", block_size=16, window=20, sharded=True), context_parallel=4)
    assert covered_range(sharded, 0, 128) == range(1, 2)
    replicated = geometry_of(SlidingWindow("g", block_size=16, window=20), context_parallel=4)
    assert covered_range(replicated, 0, 128) == range(6, 8)


def test_lookahead_is_no_part_of_coverage() -> None:
    plain, ahead = (FullAttention("g", block_size=16, lookahead=flag) for flag in (False, True))
    assert covered_range(geometry_of(plain), 0, 80) == covered_range(geometry_of(ahead), 0, 80)
