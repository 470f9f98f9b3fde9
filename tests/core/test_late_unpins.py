"""Pins that wait to be dropped: whoever looks at a pool or changes it finds it as if they had been dropped at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from aiokv.core.cache import CacheState
from aiokv.core.lease_table import AcquireRequest, LeaseRecord
from aiokv.core.pool import Pool
from aiokv.errors import ForeignBlock
from aiokv.model.ids import IntArray, Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.spec import CacheGeometry, FullAttention

CAPACITY = 40
NO_LIMIT = 1 << 40
KEYS = np.random.default_rng(0).integers(0, 2**64, (CAPACITY, 4), dtype=np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A pool that three holders have left, who shared some slots; `held` are those of a fourth, who stays."""

    pool: Pool
    held: IntArray
    idle: IntArray


def leave(pool: Pool, *, let_go: Callable[[IntArray], None], stale: bool) -> Left:
    """Slots 0..9 are shared by the first two, 10..19 are the second's and half without a key, 20..23 stay."""
    pool.claim(30)
    slots = pool.name_claimed(30, NO_LIMIT).slots
    pool.register(slots[:15], KEYS[:15], 0)
    pool.register(slots[20:], KEYS[20:30], 1)
    if stale:
        pool.bump_epoch()
        pool.register(slots[15:18], KEYS[:3], 0)
    pool.pin(slots[:10])
    for batch in (slots[:10][::-1], slots[:20][::-1], slots[24:][::-1]):
        let_go(batch)
    return Left(pool=pool, held=slots[20:24], idle=slots[:10])


def name_all(pool: Pool) -> list[int]:
    pool.claim(30)
    slots: list[int] = pool.name_claimed(30, NO_LIMIT).slots.tolist()
    return slots


def is_pinned(pool: Pool, slots: IntArray) -> bool:
    """Stale slots are free by then."""
    try:
        pool.pin(slots)
    except ForeignBlock:
        return False
    return True


CALLS: dict[str, Callable[[Left], object]] = {
    "available": lambda left: left.pool.available,
    "books": lambda left: left.pool.books.pins.tolist(),
    "bump_epoch": lambda left: left.pool.bump_epoch(),
    "check_invariants": lambda left: left.pool.check_invariants(),
    "claim": lambda left: left.pool.claim(30),
    "count_unpinned": lambda left: left.pool.count_unpinned(left.idle),
    "counts": lambda left: left.pool.counts(),
    "evict": lambda left: left.pool.evict(left.pool.find_coldest(3, NO_LIMIT)).keys.tolist(),
    "evictable_count": lambda left: left.pool.evictable_count,
    "find": lambda left: np.where(*left.pool.find(KEYS, 0), -1).tolist(),
    "find_coldest": lambda left: left.pool.find_coldest(CAPACITY, NO_LIMIT).tolist(),
    "fingerprint": lambda left: left.pool.fingerprint(),
    "free_count": lambda left: left.pool.free_count,
    "group_of": lambda left: left.pool.group_of(left.idle).tolist(),
    "holds": lambda left: left.pool.holds(left.idle, KEYS[:10], group=0).tolist(),
    "key_of": lambda left: left.pool.key_of(left.held).tolist(),
    "name_claimed": lambda left: name_all(left.pool),
    "note_tick": lambda left: left.pool.note_tick(7),
    "note_use": lambda left: left.pool.note_use(left.idle),
    "pin": lambda left: is_pinned(left.pool, left.idle),
    "pins_of": lambda left: left.pool.pins_of(np.arange(CAPACITY)).tolist(),
    "quarantine": lambda left: left.pool.quarantine(left.held).keys.tolist(),
    "register": lambda left: left.pool.register(np.arange(0), KEYS[:0], 0).tolist(),
    "reserved_count": lambda left: left.pool.reserved_count,
    "resident_count": lambda left: left.pool.resident_count,
    "settle": lambda left: left.pool.settle(),
    "stale_count": lambda left: left.pool.stale_count,
    "sweep": lambda left: left.pool.sweep(CAPACITY),
    "touch": lambda left: left.pool.touch(left.idle),
    "trim": lambda left: left.pool.trim(CAPACITY),
    "unpin": lambda left: left.pool.unpin(left.held),
    "unpin_in_place": lambda left: left.pool.unpin_in_place(left.held),
    "unregister": lambda left: left.pool.unregister(left.held).keys.tolist(),
}
UNTOUCHED = {
    "ages", "begin_moment", "capacity", "claimed_count", "epoch", "find_copies", "find_in_both", "has_late",
    "may_have_come", "peek_counts", "peeked_books", "quarantined_count", "tier", "unclaim", "unpin_late",
    "usable_count", "warm", "watchers",
}  # fmt: skip
"""Those that no dropped pin changes, those that tell as much, and what asks two pools as `find` asks one."""


@pytest.mark.parametrize("stale", [False, True], ids=["of this epoch", "stale"])
@pytest.mark.parametrize("name", CALLS)
def test_what_waits_to_be_dropped_shows_nowhere(*, name: str, stale: bool) -> None:
    at_once, late = (Pool(Tier.CPU, capacity=CAPACITY) for _ in range(2))
    first = leave(at_once, let_go=at_once.unpin, stale=stale)
    second = leave(late, let_go=late.unpin_late, stale=stale)
    assert CALLS[name](second) == CALLS[name](first)
    assert (late.counts(), late.fingerprint()) == (at_once.counts(), at_once.fingerprint())
    assert late.check_invariants() == []


def test_every_call_of_a_pool_is_looked_at() -> None:
    public = {name for name in dir(Pool) if not name.startswith("_")}
    assert public == set(CALLS) | UNTOUCHED


def test_another_thread_sees_counts_that_sum_up_before_and_after() -> None:
    pool = Pool(Tier.CPU, capacity=CAPACITY)
    leave(pool, let_go=pool.unpin_late, stale=False)
    before = pool.peek_counts()
    assert (before.free, before.reserved, before.resident, before.evictable) == (10, 5, 25, 0)
    assert sum(before.by_state().values()) == CAPACITY
    assert pool.counts() == pool.peek_counts() != before


def test_few_slots_wait_however_many_leases_leave() -> None:
    pool = Pool(Tier.CPU, capacity=20_000)
    pool.claim(20_000)
    slots = pool.name_claimed(20_000, NO_LIMIT).slots
    for start in range(0, 20_000, 10):
        pool.unpin_late(slots[start : start + 10])
        assert start + 10 - pool.peek_counts().free <= 1024


def test_a_long_lease_waits_for_nobody() -> None:
    pool = Pool(Tier.CPU, capacity=4_000)
    pool.claim(4_000)
    slots = pool.name_claimed(4_000, NO_LIMIT).slots
    pool.unpin_late(slots[:500])
    pool.unpin_late(slots[500:])
    assert pool.peek_counts().free == 4_000


def test_a_slice_or_the_next_turn_drops_them_without_anybody_looking() -> None:
    cache = CacheState(CacheGeometry(groups=(FullAttention("full", block_size=16),), hash_block_size=16), gpu_blocks=41)
    for turn in (cache.run_slice, cache.retry_replans):
        keys = BlockKeys(np.arange(160, dtype=np.int32), hash_block_size=16)
        record = cache.try_acquire(AcquireRequest(request_id="a", keys=keys, prompt_tokens=160))
        assert isinstance(record, LeaseRecord)
        cache.release(record)
        assert cache.peek.pools()[Tier.GPU].reserved == 10
        turn()
        assert cache.peek.pools()[Tier.GPU].reserved == 0
