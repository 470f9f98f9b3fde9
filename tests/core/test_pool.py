"""The pool's rules, one at a time; `test_pool_machine.py` checks them together against a naive model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from aiokv.core.pool import NamedSlots, Pool
from aiokv.errors import ForeignBlock, UsageError
from aiokv.model.ids import DigestArray, SlotArray, Tier

NO_LIMIT = 1 << 40
KEYS: DigestArray = np.random.default_rng(0).integers(0, 2**64, (64, 4), dtype=np.uint64)


def array(*slots: int) -> SlotArray:
    return np.array(slots, dtype=np.int32)


def reserve(pool: Pool, n: int) -> NamedSlots:
    pool.claim(n)
    return pool.name_claimed(n, NO_LIMIT)


def fill(pool: Pool, keys: DigestArray, group: int = 0) -> SlotArray:
    """Register `keys` in new slots and leave them evictable, the first one coldest."""
    slots = reserve(pool, len(keys)).slots
    assert pool.register(slots, keys, group).all()
    pool.unpin(slots)
    return slots


@pytest.fixture
def pool() -> Pool:
    """Eight usable slots, 1 to 8; slot 0 is the null block."""
    return Pool(Tier.GPU, capacity=8, first_slot=1)


def test_a_new_pool_is_free(pool: Pool) -> None:
    assert (pool.free_count, pool.available, pool.capacity) == (8, 8, 8)
    assert (pool.resident_count, pool.reserved_count, pool.quarantined_count, pool.claimed_count) == (0, 0, 0, 0)
    assert pool.check_invariants() == []


def test_the_null_block_is_never_named(pool: Pool) -> None:
    assert sorted(reserve(pool, 8).slots.tolist()) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sorted(reserve(Pool(Tier.CPU, capacity=3), 3).slots.tolist()) == [0, 1, 2]


def test_a_pool_without_slots_answers_too() -> None:
    empty = Pool(Tier.GPU, capacity=0, first_slot=1)
    assert (empty.available, len(reserve(empty, 0).slots)) == (0, 0)
    assert not empty.find(KEYS[:3], 0).present.any()
    assert empty.sweep(10) == 0
    assert empty.check_invariants() == []


def test_a_claim_is_capacity_without_a_slot(pool: Pool) -> None:
    pool.claim(5)
    assert (pool.claimed_count, pool.available, pool.free_count) == (5, 3, 8)
    assert pool.name_claimed(2, NO_LIMIT).slots.tolist() == [1, 2]
    assert (pool.claimed_count, pool.available, pool.free_count, pool.reserved_count) == (3, 3, 6, 2)
    pool.unclaim(3)
    assert (pool.claimed_count, pool.available) == (0, 6)


def test_no_more_is_named_than_was_claimed(pool: Pool) -> None:
    pool.claim(2)
    assert len(pool.name_claimed(5, NO_LIMIT).slots) == 2
    assert len(pool.name_claimed(5, NO_LIMIT).slots) == 0


def test_a_registered_key_is_found_and_a_reserved_one_is_not(pool: Pool) -> None:
    slots = reserve(pool, 3).slots
    assert not pool.find(KEYS[:3], 0).present.any()
    assert pool.register(slots, KEYS[:3], 0).all()
    found = pool.find(KEYS[:4], 0)
    assert found.present.tolist() == [True, True, True, False]
    assert found.slots[:3].tolist() == slots.tolist()
    assert (pool.resident_count, pool.reserved_count, pool.evictable_count) == (3, 0, 0)


def test_eviction_follows_the_order_of_release(pool: Pool) -> None:
    slots = reserve(pool, 8).slots
    pool.register(slots, KEYS[:8], 0)
    pool.unpin(slots[4:][::-1])
    pool.unpin(slots[:4][::-1])
    named = reserve(pool, 6)
    assert named.slots.tolist() == [8, 7, 6, 5, 4, 3]
    assert (named.evicted.keys == KEYS[[7, 6, 5, 4, 3, 2]]).all()
    assert named.evicted.groups.tolist() == [0] * 6
    assert pool.find(KEYS[:8], 0).present.tolist() == [True, True] + [False] * 6


def test_free_slots_go_before_any_is_evicted(pool: Pool) -> None:
    kept = fill(pool, KEYS[:5], group=3)
    named = reserve(pool, 5)
    assert named.slots[:3].tolist() == [6, 7, 8]
    assert named.slots[3:].tolist() == kept[:2].tolist()
    assert (named.evicted.keys == KEYS[:2]).all()
    assert named.evicted.groups.tolist() == [3, 3]


def test_an_unregistered_slot_is_free_at_its_last_pin(pool: Pool) -> None:
    slots = reserve(pool, 2).slots
    pool.pin(slots[:1])
    pool.unpin(slots)
    assert (pool.free_count, pool.reserved_count) == (7, 1)
    pool.unpin(slots[:1])
    assert (pool.free_count, pool.reserved_count) == (8, 0)


@pytest.mark.parametrize("keyed", [(0, 2), (1, 3), (1, 2), (2, 3), (0, 1, 3), ()])
def test_of_what_one_holder_leaves_only_what_has_a_key_stays(keyed: tuple[int, ...], pool: Pool) -> None:
    slots = reserve(pool, 4).slots
    with_key = slots[list(keyed)]
    assert pool.register(with_key, KEYS[: len(keyed)], 0).all()
    pool.unpin(slots)
    assert (pool.free_count, pool.evictable_count) == (8 - len(keyed), len(keyed))
    assert pool.find_coldest(8, NO_LIMIT).tolist() == with_key.tolist()
    assert pool.find(KEYS[: len(keyed)], 0).present.all()


def test_more_pins_than_there_are_cannot_be_dropped(pool: Pool) -> None:
    slots = reserve(pool, 2).slots
    pool.pin(slots[:1])
    with pytest.raises(ForeignBlock):
        pool.unpin(slots, np.array([2, 2], np.int32))
    assert pool.pins_of(slots).tolist() == [2, 1]
    pool.unpin(slots, np.array([2, 1], np.int32))
    assert pool.free_count == 8


def test_a_duplicate_stays_private_and_is_freed_with_its_holder(pool: Pool) -> None:
    first, second = reserve(pool, 2).slots, reserve(pool, 2).slots
    assert pool.register(first, KEYS[:2], 0).tolist() == [True, True]
    assert pool.register(second, KEYS[1:3], 0).tolist() == [False, True]
    assert pool.find(KEYS[1:2], 0).slots.tolist() == [int(first[1])]
    pool.unpin(second)
    assert (pool.free_count, pool.evictable_count) == (5, 1)


def test_a_key_twice_in_one_batch_goes_to_the_first_slot(pool: Pool) -> None:
    slots = reserve(pool, 3).slots
    assert pool.register(slots, KEYS[[4, 5, 4]], 0).tolist() == [True, True, False]
    assert pool.find(KEYS[[4]], 0).slots.tolist() == [int(slots[0])]


def test_a_pin_protects_from_eviction(pool: Pool) -> None:
    slots = fill(pool, KEYS[:8])
    pool.pin(slots[:6])
    assert (pool.available, pool.count_unpinned(slots)) == (2, 2)
    assert sorted(reserve(pool, 2).slots.tolist()) == sorted(slots[6:].tolist())
    assert pool.available == 0
    assert pool.find(KEYS[:6], 0).present.all()


def test_pins_are_counted(pool: Pool) -> None:
    slots = fill(pool, KEYS[:3])
    pool.pin(slots)
    pool.pin(slots[1:])
    assert pool.pins_of(slots).tolist() == [1, 2, 2]
    pool.unpin(slots)
    assert (pool.pins_of(slots).tolist(), pool.evictable_count) == ([0, 1, 1], 1)


def test_touch_changes_recency_only(pool: Pool) -> None:
    slots = fill(pool, KEYS[:5])
    pool.pin(slots[2:3])
    pool.touch(array(int(slots[1]), int(slots[2]), int(slots[0]), 8))
    assert pool.find_coldest(8, NO_LIMIT).tolist() == slots[[3, 4, 1, 0]].tolist()
    assert pool.pins_of(slots).tolist() == [0, 0, 1, 0, 0]


def test_find_and_find_coldest_change_nothing(pool: Pool) -> None:
    fill(pool, KEYS[:5])
    before = pool.fingerprint()
    pool.find(KEYS, 0)
    pool.find_coldest(3, NO_LIMIT)
    assert pool.fingerprint() == before


def test_naming_stops_at_the_scan_limit_and_goes_on() -> None:
    pool = Pool(Tier.CPU, capacity=500)
    keys = np.random.default_rng(1).integers(0, 2**64, (500, 4), dtype=np.uint64)
    slots = fill(pool, keys)
    pool.pin(slots[:300])
    pool.claim(10)
    assert len(pool.name_claimed(10, 200).slots) == 0
    assert pool.name_claimed(10, 200).slots.tolist() == slots[300:310].tolist()
    assert pool.claimed_count == 0


def test_evict_frees_and_tells_the_keys(pool: Pool) -> None:
    slots = fill(pool, KEYS[:4], group=2)
    evicted = pool.evict(slots[[2, 0]])
    assert (evicted.keys == KEYS[[2, 0]]).all()
    assert evicted.groups.tolist() == [2, 2]
    assert (pool.free_count, pool.evictable_count) == (6, 2)
    assert pool.find(KEYS[:4], 2).present.tolist() == [False, True, False, True]


def test_unregister_makes_a_pinned_slot_reserved_again(pool: Pool) -> None:
    slots = reserve(pool, 3).slots
    pool.register(slots, KEYS[:3], 0)
    evicted = pool.unregister(slots[:2])
    assert (evicted.keys == KEYS[:2]).all()
    assert (pool.reserved_count, pool.resident_count) == (2, 1)
    assert pool.register(slots[:2], KEYS[5:7], 1).all()


def test_a_quarantined_slot_never_comes_back(pool: Pool) -> None:
    slots = reserve(pool, 4).slots
    pool.register(slots[:2], KEYS[:2], 0)
    assert (pool.quarantine(slots[1:3]).keys == KEYS[1:2]).all()
    pool.quarantine(slots[2:3])
    assert (pool.quarantined_count, pool.reserved_count, pool.resident_count) == (2, 1, 1)
    pool.unpin(slots)
    assert (pool.free_count, pool.available, pool.evictable_count) == (5, 6, 1)
    assert not set(reserve(pool, 6).slots.tolist()) & set(slots[1:3].tolist())
    with pytest.raises(UsageError):
        pool.claim(1)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_quarantined_slot_is_not_freed_wherever_it_stands(lost: int, pool: Pool) -> None:
    """The first slots have no key, as the tail of a lease that comes first."""
    slots = reserve(pool, 3).slots
    pool.register(slots[1:], KEYS[:2], 0)
    pool.quarantine(slots[lost : lost + 1])
    pool.unpin(slots)
    assert (pool.quarantined_count, pool.free_count + pool.evictable_count) == (1, 7)
    assert int(slots[lost]) not in reserve(pool, 7).slots.tolist()


def test_a_bump_makes_every_key_unfindable_and_keeps_capacity(pool: Pool) -> None:
    slots = fill(pool, KEYS[:6])
    pool.pin(slots[:2])
    counts = pool.counts()
    pool.bump_epoch()
    assert not pool.find(KEYS[:6], 0).present.any()
    assert pool.counts() == counts
    assert (pool.epoch, pool.stale_count) == (1, 6)
    assert pool.sweep(3) == 3
    assert pool.sweep(3) == 0
    assert (pool.free_count, pool.reserved_count, pool.resident_count) == (6, 2, 0)
    pool.unpin(slots[:2])
    assert (pool.free_count, pool.check_invariants()) == (8, [])


def test_a_key_is_registered_again_before_the_sweep(pool: Pool) -> None:
    old = fill(pool, KEYS[:4])
    pool.pin(old[:1])
    pool.bump_epoch()
    new = reserve(pool, 4).slots
    assert pool.register(new, KEYS[:4], 0).all()
    assert pool.find(KEYS[:4], 0).slots.tolist() == new.tolist()
    assert (pool.stale_count, pool.resident_count, pool.reserved_count, pool.free_count) == (0, 4, 1, 3)
    assert pool.check_invariants() == []


def test_a_holder_from_before_the_bump_frees_at_its_last_pin(pool: Pool) -> None:
    slots = reserve(pool, 2).slots
    pool.register(slots, KEYS[:2], 0)
    pool.bump_epoch()
    pool.unpin(slots)
    assert (pool.free_count, pool.stale_count) == (8, 0)


def test_stale_keys_are_not_told_as_evicted(pool: Pool) -> None:
    fill(pool, KEYS[:4])
    pool.bump_epoch()
    fill(pool, KEYS[4:8])
    named = reserve(pool, 6)
    assert (named.evicted.keys == KEYS[4:6]).all()
    assert len(named.slots) == 6
    assert (pool.stale_count, pool.check_invariants()) == (0, [])


def test_a_second_bump_restarts_the_sweep(pool: Pool) -> None:
    fill(pool, KEYS[:4])
    pool.bump_epoch()
    pool.sweep(2)
    fill(pool, KEYS[4:6])
    pool.bump_epoch()
    assert not pool.find(KEYS[:6], 0).present.any()
    while pool.sweep(1):
        pass
    assert (pool.free_count, pool.check_invariants()) == (8, [])


REFUSED: dict[str, tuple[type[Exception], Callable[[Pool], object]]] = {
    "claim more than is available": (UsageError, lambda pool: pool.claim(6)),
    "claim less than nothing": (UsageError, lambda pool: pool.claim(-1)),
    "unclaim more than is claimed": (UsageError, lambda pool: pool.unclaim(2)),
    "pin a free slot": (ForeignBlock, lambda pool: pool.pin(array(1, 8))),
    "pin the null block": (ForeignBlock, lambda pool: pool.pin(array(0))),
    "unpin a slot without a pin": (ForeignBlock, lambda pool: pool.unpin(array(4, 1))),
    "unpin a free slot": (ForeignBlock, lambda pool: pool.unpin(array(4, 8))),
    "register a slot without a pin": (ForeignBlock, lambda pool: pool.register(array(4, 8), KEYS[10:12], 0)),
    "register a resident slot": (UsageError, lambda pool: pool.register(array(4, 3), KEYS[10:12], 0)),
    "register a quarantined slot": (UsageError, lambda pool: pool.register(array(4, 5), KEYS[10:12], 0)),
    "register fewer keys than slots": (UsageError, lambda pool: pool.register(array(4), KEYS[10:12], 0)),
    "evict a pinned slot": (ForeignBlock, lambda pool: pool.evict(array(1, 3))),
    "evict a free slot": (ForeignBlock, lambda pool: pool.evict(array(1, 8))),
    "unregister an evictable slot": (ForeignBlock, lambda pool: pool.unregister(array(3, 1))),
    "unregister a reserved slot": (ForeignBlock, lambda pool: pool.unregister(array(3, 4))),
    "quarantine a slot without a pin": (ForeignBlock, lambda pool: pool.quarantine(array(4, 1))),
}


@pytest.mark.parametrize("what", list(REFUSED))
@pytest.mark.parametrize("bumped", [0, 1])
def test_a_refused_call_changes_nothing(what: str, bumped: int) -> None:
    """Slots 1, 2 evictable, 3 resident and pinned, 4 reserved, 5 quarantined, one claim, three more free."""
    pool = Pool(Tier.GPU, capacity=8, first_slot=1)
    for _ in range(bumped):
        fill(pool, KEYS[20:21])
        pool.bump_epoch()
        pool.evict(array(1))
    slots = np.sort(reserve(pool, 5).slots)
    pool.register(slots[:3], KEYS[:3], 0)
    pool.quarantine(slots[4:])
    pool.unpin(slots[:2])
    pool.claim(1)
    assert (pool.available, pool.check_invariants()) == (4, [])
    before = pool.fingerprint(), pool.counts()
    error, call = REFUSED[what]
    with pytest.raises(error):
        call(pool)
    assert (pool.fingerprint(), pool.counts()) == before


def test_a_pin_may_not_break_a_claim(pool: Pool) -> None:
    slots = fill(pool, KEYS[:8])
    pool.claim(6)
    before = pool.fingerprint()
    with pytest.raises(UsageError, match="claims"):
        pool.pin(slots[:3])
    assert pool.fingerprint() == before
    pool.pin(slots[:2])
    assert len(pool.name_claimed(6, NO_LIMIT).slots) == 6


def test_a_refusal_names_the_slot_and_the_tier(pool: Pool) -> None:
    slots = reserve(pool, 2).slots
    with pytest.raises(ForeignBlock) as refusal:
        pool.unpin(array(int(slots[0]), 7))
    assert (refusal.value.slot, refusal.value.tier) == (7, "gpu")


def test_equal_pools_print_equal() -> None:
    pools = [Pool(Tier.CPU, capacity=8) for _ in range(2)]
    for pool in pools:
        fill(pool, KEYS[:5])
    assert pools[0].fingerprint() == pools[1].fingerprint()
    pools[0].touch(array(0))
    assert pools[0].fingerprint() != pools[1].fingerprint()


@pytest.mark.parametrize(("capacity", "first_slot"), [(-1, 0), (3, -1)])
def test_an_impossible_pool_is_refused(capacity: int, first_slot: int) -> None:
    with pytest.raises(UsageError):
        Pool(Tier.CPU, capacity=capacity, first_slot=first_slot)


@pytest.mark.parametrize("is_stale", [False, True])
def test_looking_where_a_key_is_known_to_lie_answers_as_find_does(is_stale: bool) -> None:  # noqa: FBT001
    pool = Pool(Tier.CPU, capacity=64)
    first = fill(pool, KEYS[:20], group=0)
    if is_stale:
        pool.bump_epoch()
    second = fill(pool, KEYS[20:40], group=1)
    slots = array(*first.tolist(), *second.tolist())
    keys = KEYS[:40]
    shifted = array(*np.roll(slots, 1).tolist())
    for group in (0, 1):
        found = pool.find(keys, group)
        for asked in (slots, shifted):
            expected = found.present & (found.slots == asked)
            assert np.array_equal(pool.holds(asked, keys, group=group), expected)
    assert np.count_nonzero(pool.holds(slots, keys, group=0)) == (0 if is_stale else 20)
    assert not len(pool.holds(slots[:0], keys[:0], group=0))
