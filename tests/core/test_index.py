"""The slot index against a dict: exact for colliding keys, repeated keys, full buckets and any order of calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv.core.index import SlotIndex
from aiokv.core.index_places import AT_ONCE, choose_places
from aiokv.errors import UsageError
from aiokv.model.ids import DigestArray, IntArray

FEW_BUCKETS = 64
"""An index for so many slots has 32 buckets: keys that differ above bit 5 of each word share their buckets."""


def random_keys(n: int, seed: int = 0) -> DigestArray:
    return np.random.default_rng(seed).integers(0, 2**64, (n, 4), dtype=np.uint64)


def colliding_keys(n: int, *, buckets: tuple[int, int, int, int] = (1, 2, 3, 4)) -> DigestArray:
    """Keys with the same buckets (low bits) and the same tags (top 16 bits) in an index of few buckets."""
    keys = np.empty((n, 4), dtype=np.uint64)
    keys[:] = np.array(buckets, dtype=np.uint64)
    keys += (np.arange(n, dtype=np.uint64) << np.uint64(8))[:, None]
    return keys


def slots_between(start: int, stop: int) -> IntArray:
    return np.arange(start, stop)


def assert_holds(index: SlotIndex, expected: dict[tuple[int, bytes], int], universe: DigestArray) -> None:
    for group in (0, 1):
        found = index.find(universe, group)
        answer = [slot if present else None for slot, present in zip(found.slots.tolist(), found.present, strict=True)]
        assert answer == [expected.get((group, key.tobytes())) for key in universe]
        assert (index.holds(found.slots, universe, group=group) == found.present).all()
        assert not index.holds(found.slots, np.roll(universe, 1, axis=0), group=group)[found.present].any()
    assert len(index) == len(expected)
    assert index.check_invariants() == []


def test_an_empty_index_finds_nothing() -> None:
    found = SlotIndex(16).find(random_keys(5), 0)
    assert not found.present.any()
    assert found.slots.shape == (5,)


def test_empty_batches_are_fine() -> None:
    index = SlotIndex(16)
    none = np.empty(0, dtype=np.int32)
    assert index.insert(none, random_keys(0), group=0).shape == (0,)
    index.remove(none)
    assert index.find(random_keys(0), 0).present.shape == (0,)
    assert index.is_indexed(none).shape == (0,)


def test_a_key_is_found_in_its_group_only() -> None:
    index = SlotIndex(16)
    keys = random_keys(5)
    slots = np.array([3, 1, 4, 15, 9], dtype=np.int32)
    assert index.insert(slots, keys, group=2).all()
    found = index.find(keys, 2)
    assert found.present.all()
    assert found.slots.tolist() == slots.tolist()
    assert not index.find(keys, 0).present.any()
    assert index.group_of(slots).tolist() == [2] * 5
    assert index.group_of(np.array([0])).tolist() == [-1]
    assert (index.key_of(slots) == keys).all()


def test_one_key_may_have_a_slot_in_each_group() -> None:
    index = SlotIndex(64)
    keys = random_keys(20)
    for group in range(3):
        assert index.insert(slots_between(20 * group, 20 * group + 20), keys, group=group).all()
    for group in range(3):
        assert index.find(keys, group).slots.tolist() == list(range(20 * group, 20 * group + 20))


def test_strided_keys_are_probed_like_contiguous_ones() -> None:
    index = SlotIndex(64)
    keys = random_keys(40)
    assert index.insert(slots_between(0, 10), keys[3::4], group=0).all()
    assert index.find(keys, 0).present.tolist() == [i % 4 == 3 for i in range(40)]
    assert index.find(keys[3::4], 0).slots.tolist() == list(range(10))


def test_of_a_key_that_repeats_in_a_batch_the_first_slot_gets_it() -> None:
    index = SlotIndex(16)
    keys = random_keys(3)[[0, 1, 0, 2, 1, 0]]
    assert index.insert(slots_between(0, 6), keys, group=0).tolist() == [True, True, False, True, False, False]
    assert index.find(keys, 0).slots.tolist() == [0, 1, 0, 3, 1, 0]
    assert index.is_indexed(slots_between(0, 6)).tolist() == [True, True, False, True, False, False]


def test_a_key_that_is_present_keeps_its_slot() -> None:
    index = SlotIndex(16)
    keys = random_keys(4)
    index.insert(slots_between(0, 2), keys[:2], group=0)
    assert index.insert(slots_between(4, 8), keys, group=0).tolist() == [False, False, True, True]
    assert index.find(keys, 0).slots.tolist() == [0, 1, 6, 7]


def test_a_removed_slot_takes_another_key() -> None:
    index = SlotIndex(8)
    old, new = random_keys(8), random_keys(8, seed=1)
    index.insert(slots_between(0, 8), old, group=0)
    index.remove(np.array([2, 5]))
    assert index.find(old, 0).present.tolist() == [i not in (2, 5) for i in range(8)]
    assert index.insert(np.array([5, 2]), new[:2], group=0).all()
    assert index.find(new[:2], 0).slots.tolist() == [5, 2]
    assert index.check_invariants() == []


def test_refused_calls_change_nothing() -> None:
    index = SlotIndex(8)
    keys = random_keys(8)
    index.insert(slots_between(0, 4), keys[:4], group=0)
    with pytest.raises(UsageError, match="one key"):
        index.insert(np.array([5, 3]), keys[4:6], group=0)
    with pytest.raises(UsageError, match="not indexed"):
        index.remove(np.array([1, 6]))
    with pytest.raises(UsageError, match="keys"):
        index.insert(np.array([5, 6]), keys[4:5], group=0)
    with pytest.raises(UsageError, match="group"):
        index.insert(np.array([5]), keys[4:5], group=-1)
    assert index.find(keys, 0).present.tolist() == [True] * 4 + [False] * 4
    assert index.check_invariants() == []


@pytest.mark.parametrize("capacity", [0, -1, 1 << 40])
def test_an_impossible_capacity_is_refused(capacity: int) -> None:
    with pytest.raises(UsageError):
        SlotIndex(capacity)


@pytest.mark.parametrize("buckets", [(1, 2, 3, 4), (7, 7, 7, 7), (5, 5, 6, 6)])
def test_keys_with_equal_buckets_and_tags_are_told_apart(buckets: tuple[int, int, int, int]) -> None:
    index = SlotIndex(FEW_BUCKETS)
    keys = colliding_keys(50, buckets=buckets)
    assert index.insert(slots_between(0, 40), keys[:40], group=0).all()
    assert index.stash_size >= 24
    found = index.find(keys, 0)
    assert found.present.tolist() == [True] * 40 + [False] * 10
    assert found.slots[:40].tolist() == list(range(40))
    assert not index.find(keys, 1).present.any()
    assert index.check_invariants() == []


def test_no_group_is_taken_for_another_one() -> None:
    """Of so many groups some share the buckets and the tag of this key in so small an index."""
    index = SlotIndex(4)
    key = random_keys(1)
    for slot, group in enumerate((0, 1, 2, 3)):
        index.insert(np.array([slot]), key, group=group)
    assert [group for group in range(32_766) if index.find(key, group).present.any()] == [0, 1, 2, 3]


def test_stashed_keys_are_removed_and_come_back() -> None:
    index = SlotIndex(FEW_BUCKETS)
    keys = colliding_keys(40)
    index.insert(slots_between(0, 40), keys, group=0)
    index.remove(slots_between(10, 40))
    assert index.find(keys, 0).present.tolist() == [True] * 10 + [False] * 30
    assert index.insert(slots_between(10, 40), keys[10:][::-1], group=0).all()
    assert index.find(keys, 0).slots.tolist() == [*range(10), *range(39, 9, -1)]
    index.remove(slots_between(0, 40))
    assert (len(index), index.stash_size) == (0, 0)
    assert index.check_invariants() == []


def test_every_slot_of_an_index_can_be_filled_in_one_batch() -> None:
    for capacity in (1, 2, 3, 5, 19, 100, 3000):
        index = SlotIndex(capacity)
        keys = random_keys(capacity, seed=capacity)
        assert index.insert(slots_between(0, capacity), keys, group=0).all()
        assert index.find(keys, 0).slots.tolist() == list(range(capacity))
        assert index.check_invariants() == []


def test_a_long_batch_is_one_batch() -> None:
    index = SlotIndex(20_000)
    keys = random_keys(9000)
    keys[7000:7010] = keys[10:20]
    taken = random_keys(5, seed=1)
    index.insert(slots_between(10_000, 10_005), taken, group=0)
    keys[4000:4005] = taken
    expected = [not (7000 <= row < 7010 or 4000 <= row < 4005) for row in range(9000)]
    assert index.insert(slots_between(0, 9000), keys, group=0).tolist() == expected
    found = index.find(keys, 0)
    assert found.present.all()
    assert found.slots[7000:7010].tolist() == list(range(10, 20))
    assert found.slots[4000:4005].tolist() == list(range(10_000, 10_005))
    with pytest.raises(UsageError):
        index.insert(np.append(slots_between(12_000, 16_000), 5), random_keys(4001, seed=2), group=0)
    assert (len(index), index.check_invariants()) == (9000 - 15 + 5, [])


def test_random_churn_at_capacity_leaves_the_stash_all_but_empty() -> None:
    generator = np.random.default_rng(99)
    index = SlotIndex(4900)
    keys = random_keys(4900)
    index.insert(slots_between(0, 4900), keys, group=0)
    for _ in range(200):
        slots = generator.choice(4900, 300, replace=False)
        index.remove(slots)
        keys[slots] = generator.integers(0, 2**64, (300, 4), dtype=np.uint64)
        assert index.insert(slots, keys[slots], group=0).all()
    assert index.stash_size <= 2
    assert index.find(keys, 0).slots.tolist() == list(range(4900))


def test_a_place_is_the_first_empty_way_of_the_emptiest_bucket() -> None:
    patterns = np.arange(1 << 16)
    is_empty = (patterns[:, None] >> np.arange(16)) & 1
    held = np.where(is_empty, 0, 7).astype(np.uint16).view(np.uint64)
    buckets = np.tile(np.arange(10, 14), (len(patterns), 1))
    tags = np.tile(np.arange(20, 24, dtype=np.uint64), (len(patterns), 1))
    for start in range(0, len(patterns), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        places = choose_places(buckets[part], tags[part], held=held[part])
        assert places.empty.tolist() == patterns[part].tolist()
        for row, (entry, tag) in enumerate(zip(places.entries.tolist(), places.tags.tolist(), strict=True)):
            room = is_empty[start + row].reshape(4, 4)
            if room.any():
                bucket = int(room.sum(axis=1).argmax())
                assert (entry, tag) == (4 * (10 + bucket) + int(room[bucket].argmax()), 20 + bucket)


UNIVERSE = np.concatenate([random_keys(12), colliding_keys(24), colliding_keys(8, buckets=(7, 7, 7, 7))])
batches = st.lists(st.integers(0, len(UNIVERSE) - 1), max_size=30)


@settings(max_examples=200)
@given(data=st.data())
def test_any_sequence_of_calls_answers_like_a_dict(data: st.DataObject) -> None:
    index = SlotIndex(FEW_BUCKETS)
    expected: dict[tuple[int, bytes], int] = {}
    for _ in range(data.draw(st.integers(1, 5))):
        group = data.draw(st.integers(0, 1))
        free = sorted(set(range(FEW_BUCKETS)) - set(expected.values()))
        rows = data.draw(batches)[: len(free)]
        slots = np.array(data.draw(st.permutations(free))[: len(rows)], dtype=np.int32)
        inserted = index.insert(slots, UNIVERSE[rows], group=group)
        for slot, row, is_new in zip(slots.tolist(), rows, inserted.tolist(), strict=True):
            key = (group, UNIVERSE[row].tobytes())
            assert is_new == (key not in expected)
            expected.setdefault(key, slot)
        held = sorted(expected.values())
        gone = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        index.remove(np.array(gone, dtype=np.int32))
        expected = {key: slot for key, slot in expected.items() if slot not in gone}
        assert_holds(index, expected, UNIVERSE)


def test_a_stashed_key_is_found_by_itself() -> None:
    """Its buckets are full of other tags, so that nothing but the stash knows it."""
    index = SlotIndex(FEW_BUCKETS)
    keys = np.full((20, 4), np.array([1, 2, 3, 4], np.uint64))
    keys += (np.arange(20, dtype=np.uint64) << np.uint64(50))[:, None]
    assert index.insert(slots_between(0, 20), keys, group=0).all()
    assert index.stash_size == 4
    for slot in range(20):
        found = index.find(keys[slot : slot + 1], 0)
        assert (found.present.tolist(), found.slots.tolist()) == ([True], [slot])
        assert index.insert(np.array([20 + slot]), keys[slot : slot + 1], group=0).tolist() == [False]
        assert not index.find(keys[slot : slot + 1], 1).present.any()
    assert (len(index), index.stash_size) == (20, 4)
    index.remove(np.array([0]))
    assert index.insert(np.array([0]), keys[16:17], group=0).tolist() == [False], "though its buckets have room now"
    assert len(index) == 19
    assert index.check_invariants() == []
