"""A long prompt is looked up beforehand in slices; its admission believes nothing of that, and is as it would be."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.core.cache import CacheState
from aiokv.core.foresight import LONG_BLOCKS
from aiokv.core.index import SlotIndex
from aiokv.core.lease_table import AcquireRequest, LeaseRecord
from aiokv.model.ids import DigestArray, Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import Deferred, Found, Hit
from aiokv.model.spec import CacheGeometry, FullAttention, SlidingWindow

BLOCKS = LONG_BLOCKS + 8
GEOMETRY = CacheGeometry(
    groups=(FullAttention("full", block_size=1), SlidingWindow("swa", block_size=1, window=64)), hash_block_size=1
)


def keys_of(blocks: int = BLOCKS, *, first: int = 0) -> BlockKeys:
    return BlockKeys(np.arange(first, first + blocks, dtype=np.int32), hash_block_size=1)


def new_cache() -> CacheState:
    return CacheState(GEOMETRY, gpu_blocks=3 * BLOCKS, cpu_blocks=3 * BLOCKS)


def place(cache: CacheState, keys: BlockKeys, *, tier: Tier, positions: range, group: int = 0) -> None:
    cache.placement.place(keys, group=group, positions=np.array(positions), tier=tier)


def half_and_half(keys: BlockKeys) -> CacheState:
    """Even blocks lie on the GPU, odd ones in the CPU tier; the window's on the GPU."""
    cache = new_cache()
    place(cache, keys, tier=Tier.GPU, positions=range(0, BLOCKS, 2))
    place(cache, keys, tier=Tier.CPU, positions=range(1, BLOCKS, 2))
    place(cache, keys, tier=Tier.GPU, positions=range(BLOCKS - 70, BLOCKS), group=1)
    return cache


def look(cache: CacheState, keys: BlockKeys) -> int:
    """How many slices it took."""
    return 1 + sum(1 for _ in cache.foresight.look(keys))


def admit(cache: CacheState, keys: BlockKeys) -> Hit:
    record = cache.try_acquire(AcquireRequest(request_id="r", keys=keys, prompt_tokens=keys.num_tokens))
    assert isinstance(record, LeaseRecord)
    return record.hit


def test_looking_changes_nothing_and_goes_in_slices() -> None:
    """Law 8, invariant 6."""
    keys = keys_of()
    cache = half_and_half(keys)
    before = cache.snapshot()
    assert look(cache, keys) > BLOCKS // 1024
    assert cache.snapshot() == before
    assert keys.notes


def test_an_admission_that_was_foreseen_is_as_any_other() -> None:
    keys = keys_of()
    cache, other = half_and_half(keys), half_and_half(keys)
    look(cache, keys)
    assert admit(cache, keys) == admit(other, keys_of())
    assert cache.snapshot() == other.snapshot()
    assert cache.audit().violations == ()


def test_what_has_moved_since_is_found_where_it_is() -> None:
    keys = keys_of()
    cache = half_and_half(keys)
    look(cache, keys)
    moved = range(0, BLOCKS, 4)
    cache.placement.evict(keys, group=0, positions=list(moved), tier=Tier.GPU)
    others = keys_of(len(moved), first=10 * BLOCKS)
    place(cache, others, tier=Tier.GPU, positions=range(len(moved)))  # they take the very slots
    place(cache, keys, tier=Tier.CPU, positions=moved)
    hit = admit(cache, keys)
    assert hit.gpu_tokens + hit.cpu_tokens == BLOCKS - 1
    assert hit.gpu_tokens == len(range(0, BLOCKS - 1, 2)) - len(range(0, BLOCKS - 1, 4))


@pytest.mark.parametrize("tiers", [(Tier.GPU,), (Tier.CPU,), tuple(Tier)])
def test_nothing_of_an_older_epoch_is_hit(tiers: tuple[Tier, ...]) -> None:
    """Invariant 4: the slots hold the very hashes still, from before the reset."""
    keys = keys_of()
    cache = half_and_half(keys)
    look(cache, keys)
    cache.reset(tiers)
    assert admit(cache, keys).compute_tokens >= BLOCKS - 1


def test_who_is_deferred_is_looked_up_faster_next_time_and_rightly() -> None:
    """Invariant 5: nothing but the keys' own notes is different."""
    keys = keys_of()
    cache = half_and_half(keys)
    room = cache.try_acquire(AcquireRequest(request_id="big", keys=keys_of(BLOCKS, first=90_000), prompt_tokens=BLOCKS))
    assert isinstance(room, LeaseRecord)
    before = cache.snapshot()
    asked = AcquireRequest(request_id="r", keys=keys.copy(), prompt_tokens=BLOCKS, reserve_tokens=500)
    assert isinstance(cache.try_acquire(asked), Deferred)
    assert cache.snapshot() == before
    assert keys.notes, "a copy tells the keys that it is of"
    cache.release(room)
    cache.run_slices()
    answer = cache.try_acquire(asked)
    assert isinstance(answer, LeaseRecord)
    assert answer.hit.cpu_tokens == len(range(1, BLOCKS - 1, 2))


def test_guesses_of_another_cache_are_not_seen() -> None:
    keys = keys_of()
    look(half_and_half(keys), keys)
    tiny = CacheState(GEOMETRY, gpu_blocks=BLOCKS * 2 + 66, cpu_blocks=1)
    assert admit(tiny, keys).compute_tokens == BLOCKS


def test_tokens_that_follow_or_change_later_are_looked_up() -> None:
    keys = keys_of()
    cache = half_and_half(keys)
    look(cache, keys)
    place(cache, keys, tier=Tier.GPU, positions=range(BLOCKS - 170, BLOCKS - 100), group=1)
    keys.truncate(BLOCKS - 100)
    keys.append(range(5_000_000, 5_000_200))
    assert admit(cache, keys).compute_tokens == 200


def test_what_was_missing_and_has_not_come_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the blocks are in the CPU tier: the GPU tier has been asked for them, and gets others meanwhile."""
    searched = 0
    find = SlotIndex.find

    def count(index: SlotIndex, keys: DigestArray, group: int) -> Found:
        nonlocal searched
        searched += len(keys)
        return find(index, keys, group)

    keys = keys_of()
    cache = half_and_half(keys)
    look(cache, keys)
    place(cache, keys_of(500, first=90_000), tier=Tier.GPU, positions=range(500))
    monkeypatch.setattr(SlotIndex, "find", count)
    hit = admit(cache, keys)
    assert hit.gpu_tokens + hit.cpu_tokens == BLOCKS - 1
    assert searched < BLOCKS // 8


@pytest.mark.parametrize("others", [0, 3000])
def test_what_has_come_since_it_was_missing_is_hit(others: int) -> None:
    """Invariant 6: also between the slices in which it is looked for, and where it came and went and came again."""
    keys = keys_of()
    cache = half_and_half(keys)
    for turn, _ in enumerate(cache.foresight.look(keys)):
        place(cache, keys, tier=Tier.GPU, positions=range(2 * turn + 1, BLOCKS, 1022))
    late = range(601, 701, 2)
    place(cache, keys, tier=Tier.GPU, positions=late)
    cache.placement.evict(keys, group=0, positions=list(late), tier=Tier.GPU)
    place(cache, keys, tier=Tier.GPU, positions=late)
    place(cache, keys_of(others, first=90_000), tier=Tier.GPU, positions=range(others))
    same = admit(cache, keys_of())
    assert admit(cache, keys) == same


def test_what_was_not_looked_for_behind_a_miss_is_hit_once_that_has_come() -> None:
    """It was there all the while: nothing is known of it, least of all that it is missing."""
    keys, hole = keys_of(), 500
    cache = new_cache()
    place(cache, keys, tier=Tier.GPU, positions=range(hole))
    place(cache, keys, tier=Tier.GPU, positions=range(hole + 1, BLOCKS))
    place(cache, keys, tier=Tier.GPU, positions=range(BLOCKS - 70, BLOCKS), group=1)
    assert look(cache, keys) == 1
    place(cache, keys, tier=Tier.GPU, positions=range(hole, hole + 1))
    assert admit(cache, keys).gpu_tokens == BLOCKS - 1


def test_a_twin_with_other_tokens_is_looked_up() -> None:
    """They share what was found out, the end of their prompts is not the same."""
    keys = keys_of(BLOCKS - 100)
    cache = new_cache()
    place(cache, keys, tier=Tier.CPU, positions=range(BLOCKS - 100))
    ours, theirs = keys.copy(), keys.copy()
    ours.append(range(5_000_000, 5_000_100))
    theirs.append(range(6_000_000, 6_000_100))
    place(cache, theirs, tier=Tier.GPU, positions=range(BLOCKS - 100, BLOCKS))
    place(cache, ours, tier=Tier.CPU, positions=range(BLOCKS - 100, BLOCKS))
    place(cache, theirs, tier=Tier.GPU, positions=range(BLOCKS - 70, BLOCKS), group=1)
    ours.hash_more(BLOCKS)
    look(cache, ours)
    hit = admit(cache, theirs)
    assert hit.gpu_tokens == 99
    assert hit.cpu_tokens == BLOCKS - 100


def test_short_prompts_and_misses_take_one_slice() -> None:
    cache = new_cache()
    short, missing = keys_of(LONG_BLOCKS - 1), keys_of()
    assert look(cache, short) == 1
    assert not short.notes
    assert look(cache, missing) == 1
    assert admit(cache, missing).compute_tokens == BLOCKS


def test_who_is_deferred_knows_what_looking_would_have_found() -> None:
    looked, asked = keys_of(), keys_of()
    cache = half_and_half(looked)
    look(cache, looked)
    admit(cache, keys_of(BLOCKS, first=90_000))
    request = AcquireRequest(request_id="r", keys=asked, prompt_tokens=BLOCKS, reserve_tokens=500)
    assert isinstance(cache.try_acquire(request), Deferred)
    (found,), (told,) = looked.notes.values(), asked.notes.values()
    assert found.slots.keys() == told.slots.keys() == {(tier, 0) for tier in Tier}
    for place_of in found.slots:  # the last block is no part of any prefix
        assert found.slots[place_of].tolist()[: BLOCKS - 1] == told.slots[place_of].tolist()[: BLOCKS - 1]
