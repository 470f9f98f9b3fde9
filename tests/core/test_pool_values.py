"""Evicted keys by group, and several batches of them as one."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from aiokv.core.pool_values import NOTHING_EVICTED, Evicted, take_joined

KEYS = np.random.default_rng(0).integers(0, 2**64, (12, 4), dtype=np.uint64)


def evicted(start: int, groups: list[int]) -> Evicted:
    return Evicted(KEYS[start : start + len(groups)], np.array(groups, np.int16))


def rows(keys: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> list[int]:
    return [int(np.flatnonzero((KEYS == key).all(axis=1))[0]) for key in keys]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([3, 3, 3], {3: [0, 1, 2]}),
        ([0], {0: [0]}),
        ([1, 0, 1, 2, 0], {0: [1, 4], 1: [0, 2], 2: [3]}),
    ],
)
def test_keys_come_by_group_in_their_order(groups: list[int], expected: dict[int, list[int]]) -> None:
    assert {group: rows(keys) for group, keys in evicted(0, groups).by_group()} == expected


def test_nothing_is_of_no_group() -> None:
    assert list(NOTHING_EVICTED.by_group()) == []


def test_batches_are_joined_up_to_a_limit_and_a_larger_one_comes_alone() -> None:
    batches = deque([evicted(0, [0, 0]), evicted(2, [1]), evicted(3, [0] * 5), evicted(8, [1])])
    taken = []
    while batches:
        joined = take_joined(batches, limit=4)
        taken.append((rows(joined.keys), joined.groups.tolist()))
    assert taken == [([0, 1, 2], [0, 0, 1]), ([3, 4, 5, 6, 7], [0] * 5), ([8], [1])]
