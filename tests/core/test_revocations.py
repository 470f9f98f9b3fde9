"""Residence hints make nobody wait: which are revoked when a request needs the room, and that none is in vain."""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv.core.counters import RevokeReason
from aiokv.core.hint_table import HintRecord, HintState
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.core.slot_counts import HeldSlots, SlotCounts, count_repeats
from aiokv.errors import CapacityError
from aiokv.model.ids import SlotArray, Tier
from aiokv.model.plan import DeferReason, Deferred, Outcome
from aiokv.model.spec import FullAttention, GroupSpec, RecurrentState, SlidingWindow
from aiokv.testing.host import Host
from aiokv.testing.streams import geometry_of

GPU, CPU = Tier.GPU, Tier.CPU
FULL: Final = FullAttention("full", block_size=4)
STATE: Final = RecurrentState("state", block_size=4)


def host(*groups: GroupSpec, gpu: int = 21, cpu: int = 0, watermark: float = 0.0, slice_blocks: int = 1024) -> Host:
    return Host(
        geometry_of(*(groups or (FULL,))),
        gpu_blocks=gpu, cpu_blocks=cpu, watermark=watermark, hint_quota=1.0, slice_blocks=slice_blocks,
    )  # fmt: skip


def keep(h: Host, tokens: int, *, stream: int = 0, tenant: str = "a", tier: Tier = GPU) -> HintRecord:
    """A hint on so many tokens, all of whose blocks are there."""
    h.place(stream, range(tokens // 4), tier=tier)
    hint = h.cache.hints.keep(h.keys(stream, tokens), tenant=tenant, tier=tier)
    assert isinstance(hint, HintRecord), hint
    assert hint.length == tokens
    h.check()
    return hint


def press(h: Host, blocks: int) -> LeaseRecord:
    """A request that takes so many blocks and hits none: one block, then an extension."""
    record = h.admit(1, 1)
    assert h.extend(record, 4 * blocks - 1) == 4 * blocks
    h.check()
    return record


def press_beyond(h: Host) -> None:
    """A request that takes one block of each group more than hints leave."""
    counts = h.counts(GPU)
    blocks = (counts.free + counts.evictable) // len(h.sizes) + 1
    assert isinstance(h.acquire(2, 1, reserve_tokens=4 * blocks - 1), LeaseRecord)
    h.check()


def deferred(answer: object) -> DeferReason:
    assert isinstance(answer, Deferred), answer
    return answer.reason


def revoked(h: Host) -> int:
    return h.cache.counters.hints_revoked[RevokeReason.CAPACITY]


# Which.


def test_a_request_that_fits_beside_the_hints_revokes_none() -> None:
    h = host()
    hint = keep(h, 40)
    h.admit(1, 40)
    h.check()
    assert (hint.state, revoked(h)) == (HintState.HELD, 0)
    h.tear_down()


def test_the_hint_whose_owner_was_silent_longest_goes_first_and_the_others_stay() -> None:
    h = host()
    first, second = keep(h, 24), keep(h, 24, stream=1)
    press(h, 9)
    assert (first.state, second.state) == (HintState.REVOKED, HintState.HELD)
    assert revoked(h) == 1
    h.tear_down()


def test_an_owner_that_speaks_keeps_its_hint_longer() -> None:
    h = host()
    first, second = keep(h, 24), keep(h, 24, stream=1)
    h.cache.hints.update(first, h.keys(0, 24))
    press(h, 9)
    assert (first.state, second.state) == (HintState.HELD, HintState.REVOKED)
    h.tear_down()


def test_a_hint_that_requests_hit_stays_longer_than_one_that_nobody_hits() -> None:
    """A system prompt is kept once, at the start, and worth most."""
    h = host()
    first, second, third = keep(h, 24), keep(h, 24, stream=1), keep(h, 24, stream=2)
    h.release(h.admit(1, 25))
    h.release(h.admit(0, 25))
    h.release(h.admit(2, 21))
    h.run_slices()
    press(h, 14)
    assert (first.state, second.state, third.state) == (HintState.HELD, HintState.REVOKED, HintState.REVOKED)
    h.tear_down()


WINDOW: Final = SlidingWindow("window", block_size=4, window=6)
DRAFT: Final = FullAttention("draft", block_size=4, lookahead=True)


@pytest.mark.parametrize(
    ("groups", "tokens"), [((DRAFT,), 18), ((FULL, WINDOW), 25), ((WINDOW, FULL), 25)], ids=("draft", "last", "first")
)
def test_what_a_request_only_probes_or_needs_no_more_makes_no_hint_less_worth(
    groups: tuple[GroupSpec, ...], tokens: int
) -> None:
    """The block behind a prefix is never pinned, and a longer prefix needs others of a window, in whatever order."""
    h = host(*groups, gpu=27)
    hints = []
    for stream in (0, 1):
        for group in range(len(groups)):
            h.place(stream, range(6), group=group, tier=GPU)
        hints.append(h.cache.hints.keep(h.keys(stream, 17), tenant="a"))
    used, silent = hints
    assert isinstance(used, HintRecord) and isinstance(silent, HintRecord)
    h.release(h.admit(0, tokens, first_chunk=1))
    h.run_slices()
    press_beyond(h)
    assert (used.state, silent.state) == (HintState.HELD, HintState.REVOKED)
    h.tear_down()


def test_what_a_slot_held_before_makes_no_hint_worth_more() -> None:
    """A hit of the block whose slot became the last one of a hint was no hit of that hint."""
    h = host(WINDOW, gpu=13)
    h.place(0, range(2), tier=GPU)
    silent = h.cache.hints.keep(h.keys(0, 12), tenant="a")
    assert isinstance(silent, HintRecord)
    later = keep(h, 12, stream=1)
    h.place(2, (8, 9), tier=GPU)
    h.release(h.admit(2, 41, first_chunk=1))
    others = h.cache.find_blocks(h.keys(2), group=0, tier=GPU).slots[8:10].tolist()
    h.evict(2, (8, 9), tier=GPU)
    h.place(0, (2,), tier=GPU)
    h.run_slices()
    assert silent.length == 12
    assert set(silent.slots.tolist()) & set(others)
    press_beyond(h)
    assert (silent.state, later.state) == (HintState.REVOKED, HintState.HELD)
    h.tear_down()


def test_a_hint_that_turns_out_not_to_be_needed_is_spared() -> None:
    """As few as will do: the first in the order gives too little, the second enough by itself."""
    h = host()
    small, large = keep(h, 4), keep(h, 40, stream=1)
    press(h, 11)
    assert (small.state, large.state) == (HintState.HELD, HintState.REVOKED)
    h.tear_down()


def test_a_hint_that_would_give_nothing_is_spared() -> None:
    """A running request holds its blocks as well."""
    h = host()
    used, idle = keep(h, 16), keep(h, 16, stream=1)
    h.admit(0, 17)
    press(h, 12)
    assert (used.state, idle.state) == (HintState.HELD, HintState.REVOKED)
    h.tear_down()


def test_hints_that_share_their_blocks_go_together() -> None:
    h = host()
    hints = [keep(h, 40), keep(h, 40, tenant="b"), keep(h, 20, tenant="c")]
    press(h, 11)
    assert [hint.state for hint in hints] == [HintState.REVOKED, HintState.REVOKED, HintState.HELD]
    h.tear_down()


def test_what_the_request_hits_itself_gives_no_room() -> None:
    """Revoking the hint on its own prefix would help nobody, so the other one goes."""
    h = host()
    own, other = keep(h, 40), keep(h, 20, stream=1)
    record = h.admit(0, 64)
    h.check()
    assert record.length == 40
    assert (own.state, other.state) == (HintState.HELD, HintState.REVOKED)
    h.tear_down()


def test_where_revoking_all_would_not_do_none_is_and_nothing_changes() -> None:
    """Law 2; the harness compares the snapshots."""
    h = host()
    h.admit(1, 40)
    hint = keep(h, 40)
    assert deferred(h.acquire(2, 44)) is DeferReason.CAPACITY
    assert (hint.state, revoked(h)) == (HintState.HELD, 0)
    h.tear_down()


def test_what_is_revoked_stays_resident_as_far_as_there_is_room() -> None:
    """The tail of the prefix goes first."""
    h = host()
    hint = keep(h, 40)
    h.release(press(h, 13))
    h.run_slices()
    assert hint.state is HintState.REVOKED
    assert h.letters(0)[:10] == "ggggggg---"
    h.tear_down()


# For whom.


def test_the_watermark_is_kept_free_of_admissions_and_not_for_hints() -> None:
    h = host(watermark=0.1)
    h.admit(1, 20)
    hint = keep(h, 24)
    h.admit(1, 32)
    assert hint.state is HintState.REVOKED
    h.tear_down()


def test_a_request_that_only_the_watermark_stops_is_told_so() -> None:
    h = host(watermark=0.1)
    h.admit(1, 40)
    hint = keep(h, 40)
    assert deferred(h.acquire(2, 36)) is DeferReason.WATERMARK
    assert hint.state is HintState.HELD
    h.tear_down()


def test_an_extension_gets_room_from_hints() -> None:
    h = host()
    record = h.admit(1, 40)
    hint = keep(h, 40)
    assert h.extend(record, 4) == 44
    h.check()
    assert hint.state is HintState.REVOKED
    h.tear_down()


def test_what_can_never_fit_is_told_so_whatever_is_kept() -> None:
    h = host()
    hint = keep(h, 40)
    with pytest.raises(CapacityError):
        h.acquire(1, 81)
    record = h.admit(1, 40)
    with pytest.raises(CapacityError):
        h.extend(record, 41)
    assert hint.state is HintState.HELD
    h.tear_down()


def test_a_fork_gets_room_from_hints() -> None:
    h = host()
    record = h.admit(0, 40)
    h.confirm(record, 40)
    hint = keep(h, 40, stream=1)
    forked = h.fork(record, 38)
    assert isinstance(forked, LeaseRecord)
    assert hint.state is HintState.REVOKED
    h.tear_down()


def test_a_truncation_gets_room_from_hints() -> None:
    """A fork holds the block that must be written again, so the parent needs another one."""
    h = host()
    record = h.admit(0, 40)
    h.confirm(record, 40)
    assert isinstance(h.fork(record, 40), LeaseRecord)
    hint = keep(h, 40, stream=1)
    assert h.truncate(record, 38) == 36
    h.check()
    assert hint.state is HintState.REVOKED
    h.tear_down()


def test_a_truncation_counts_what_it_gives_back_itself_once_its_hint_is_revoked() -> None:
    """The block that leaves the table is held by nobody else but the hint: revoking that one is enough."""
    h = host(gpu=11)
    record = h.admit(0, 40)
    h.confirm(record, 40)
    hint = keep(h, 40)
    assert h.truncate(record, 38) == 36
    h.check()
    assert hint.state is HintState.REVOKED
    h.tear_down()


def test_a_captured_state_gets_its_successor_from_hints() -> None:
    h = host(FULL, STATE, gpu=12)
    record = h.admit(0, 16, reserve_tokens=8)
    h.place(1, range(2), tier=GPU)
    h.place(1, [1], group=1, tier=GPU)
    hint = h.cache.hints.keep(h.keys(1, 8), tenant="a")
    assert isinstance(hint, HintRecord)
    assert (hint.length, h.counts(GPU).free, h.counts(GPU).evictable) == (8, 0, 0)
    h.confirm(record, 16, states=(16,))
    h.check()
    assert hint.state is HintState.REVOKED
    assert all(h.cache.state_slots(record, group=1).tolist())
    h.tear_down()


def test_a_failed_load_is_planned_again_with_room_from_hints() -> None:
    """Hits that its shorter prefix drops are kept by a hint, so they give no room until that is revoked."""
    h = host(gpu=10, cpu=8)
    hint = keep(h, 24)
    h.place(0, [6, 7], tier=CPU)
    record = h.acquire(0, 33, align=16)
    assert isinstance(record, LeaseRecord)
    h.submit_all()
    h.end(h.running[0], Outcome.FAILED)
    h.turn()
    h.check()
    assert (record.state, record.length, hint.state) == (LeaseState.READY, 16, HintState.REVOKED)
    h.tear_down()


def test_a_lease_behind_another_takes_from_hints_what_it_gives_back_and_no_more() -> None:
    """The first cannot go on, as a running request holds what it drops; the second must not wait for a hint."""
    h = host(gpu=22, cpu=8)
    idle, first_hint, hint = keep(h, 28, stream=2), keep(h, 28), keep(h, 24, stream=1)
    h.place(0, [7], tier=CPU)
    h.place(1, [6, 7], tier=CPU)
    runs = h.admit(0, 29)
    first, second = h.acquire(0, 33, align=16), h.acquire(1, 33, align=16)
    assert isinstance(first, LeaseRecord)
    assert isinstance(second, LeaseRecord)
    h.submit_all()
    for _ in range(2):
        h.end(h.running[0], Outcome.FAILED)
        h.turn()
        h.check()
    assert (first.state, second.state) == (LeaseState.HELD, LeaseState.READY)
    assert (first_hint.state, hint.state) == (HintState.HELD, HintState.REVOKED)
    assert (idle.state, len(idle.slots)) == (HintState.HELD, 7)
    h.release(runs)
    h.turn()
    h.check()
    assert first.state is LeaseState.READY
    h.tear_down()


def test_a_block_that_was_lost_in_a_copy_gives_no_room_though_a_hint_still_holds_it() -> None:
    """Until the hint has let go of it in a later slice."""
    h = host(gpu=11, cpu=20)
    record = h.admit(0, 16)
    h.confirm(record, 16)
    h.run_slices()
    hint = h.cache.hints.keep(h.keys(0, 16), tenant="a")
    assert isinstance(hint, HintRecord)
    h.finish(record)
    h.submit_all()
    h.end(h.running[0], Outcome.LOST)
    assert (h.counts(GPU).quarantined, len(hint.slots)) == (4, 4)
    h.admit(1, 4)
    assert deferred(h.acquire(1, 24)) is DeferReason.CAPACITY
    assert hint.state is HintState.HELD
    h.tear_down()


def test_revoking_wakes_nobody_in_vain_and_claims_are_named_from_what_came_back() -> None:
    h = host(slice_blocks=1)
    hint = keep(h, 80)
    record = h.admit(1, 80)
    assert record.unnamed_claims
    h.check()
    h.run_slices()
    h.check()
    assert (hint.state, record.unnamed_claims) == (HintState.REVOKED, 0)
    h.tear_down()


def test_hints_of_the_cpu_tier_are_not_touched_for_gpu_room() -> None:
    h = host(cpu=20)
    hint = keep(h, 40, tier=CPU)
    h.admit(1, 80)
    assert hint.state is HintState.HELD
    h.tear_down()


# Whatever happened before.

STREAMS: Final = st.integers(0, 2)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Host, list[HintRecord], int]:
    """A small pool with blocks of three streams, some leases, and hints of two tenants that share prefixes; and how
    many slots the watermark keeps free.
    """
    gpu, watermark = draw(st.integers(6, 25)), draw(st.sampled_from([0.0, 0.2]))
    h = host(gpu=gpu, watermark=watermark)
    hints: list[HintRecord] = []
    for _ in range(draw(st.integers(0, 4))):
        stream, tokens = draw(STREAMS), draw(st.integers(1, 40))
        try:
            record = h.acquire(stream, tokens)
        except CapacityError:
            continue
        if isinstance(record, LeaseRecord):
            h.confirm(record, tokens)
            if draw(st.booleans()):
                h.release(record)
    h.run_slices()
    for _ in range(draw(st.integers(0, 6))):
        keys = h.keys(draw(STREAMS), draw(st.integers(0, 40)))
        hint = h.cache.hints.keep(keys, tenant=draw(st.sampled_from("ab")))
        if isinstance(hint, HintRecord):
            hints.append(hint)
    for stream in draw(st.lists(STREAMS, max_size=3)):
        try:
            record = h.acquire(stream, draw(st.integers(1, 30)))
        except CapacityError:
            continue
        if isinstance(record, LeaseRecord):
            h.release(record)
    h.run_slices()
    h.check()
    return h, hints, int((gpu - 1) * watermark)


@settings(max_examples=200)
@given(situation=situations(), stream=STREAMS, tokens=st.integers(1, 90))
def test_hints_are_revoked_only_if_that_lets_a_request_in_and_none_in_vain(
    situation: tuple[Host, list[HintRecord], int], stream: int, tokens: int
) -> None:
    """Law 2, and as few as will do: with any one of them held, the request would not have been let in."""
    h, hints, watermark = situation
    held = [hint for hint in hints if hint.state is HintState.HELD]
    slots = {hint.hint_id: set(hint.slots.tolist()) for hint in held}
    try:
        record = h.acquire(stream, tokens)
    except CapacityError:
        assert all(hint.state is HintState.HELD for hint in held)
        return
    h.check()
    if isinstance(record, Deferred):
        assert all(hint.state is HintState.HELD for hint in held)
        for hint in held:
            h.cache.hints.revoke(hint)
        again = h.acquire(stream, tokens)
        assert isinstance(again, Deferred), "it would have been let in without hints"
        return
    gone = [hint for hint in held if hint.state is HintState.REVOKED]
    kept = set().union(*(slots[hint.hint_id] for hint in held if hint not in gone))
    leased = {slot for lease in h.leases.values() if lease is not record for slot in lease.held_slots().tolist()}
    hits = set(record.tables[0].view()[: record.length // 4].tolist())
    counts = h.counts(GPU)
    left = counts.free + counts.evictable - counts.claimed
    left -= watermark if len(h.leases) > 1 else 0
    for hint in gone:
        only = slots[hint.hint_id] - kept - leased - hits
        assert len(only) > left, f"{hint.hint_id} was revoked in vain: {len(only)} of it, {left} are left"
    h.tear_down()


MANY: Final = st.lists(st.tuples(STREAMS, st.integers(1, 14)), min_size=60, max_size=150)


def crowd(wanted: list[tuple[int, int]]) -> tuple[Host, list[HintRecord]]:
    """A pool full of blocks of three streams, and many hints of three tenants that share them."""
    h = host(gpu=64)
    for stream in range(3):
        h.place(stream, range(15), tier=GPU)
    hints = []
    for number, (stream, blocks) in enumerate(wanted):
        hint = h.cache.hints.keep(h.keys(stream, 4 * blocks), tenant="abc"[number % 3])
        assert isinstance(hint, HintRecord)
        hints.append(hint)
    return h, hints


@settings(max_examples=40)
@given(wanted=MANY, blocks=st.integers(24, 63))
def test_of_many_hints_those_are_revoked_that_trying_one_by_one_finds_and_so_is_the_order_they_leave(
    wanted: list[tuple[int, int]], blocks: int
) -> None:
    """Law 2, as few as will do; a block goes to where the last of its hints leaves it."""
    h, hints = crowd(wanted)
    expected = tried_one_by_one([set(hint.slots.tolist()) for hint in hints], lacking=blocks - room(h))
    press(h, blocks)
    assert [number for number, hint in enumerate(hints) if hint.state is HintState.REVOKED] == expected
    other, others = crowd(wanted)
    for number in expected:
        other.cache.hints.revoke(others[number])
    press(other, blocks)
    assert h.cache.snapshot().gpu_order == other.cache.snapshot().gpu_order
    h.tear_down()


def tried_one_by_one(holds: list[set[int]], *, lacking: int) -> list[int]:
    """Which holds to give up: from the first on until that is enough, then back again whatever can be spared."""
    gone: list[int] = []
    while given_by(holds, gone) < lacking:
        gone.append(len(gone))
    for number in reversed(gone[:-1]):
        without = [other for other in gone if other != number]
        if given_by(holds, without) >= lacking:
            gone = without
    return gone


def given_by(holds: list[set[int]], gone: list[int]) -> int:
    """Slots that nobody holds once these have gone."""
    kept = set().union(*(slots for number, slots in enumerate(holds) if number not in gone))
    return len(set().union(*holds) - kept)


def room(h: Host) -> int:
    counts = h.counts(GPU)
    return counts.free + counts.evictable - counts.claimed


@given(st.lists(st.lists(st.integers(0, 30), unique=True), max_size=12), st.integers(1, 3))
def test_slots_are_counted_as_in_a_multiset(batches: list[list[int]], at_once: int) -> None:
    held, counts = HeldSlots(31), SlotCounts()
    model: Counter[int] = Counter()
    added: list[list[int]] = []
    for index, batch in enumerate(batches):
        assert counts.count_absent(as_slots(batch)) == sum(not model[slot] for slot in batch)
        assert counts.count_last(as_slots(batch)) == sum(model[slot] == 1 for slot in batch)
        held.add(as_slots(batch))
        counts.add(as_slots(batch))
        model.update(batch)
        added.append(batch)
        if index % 3 == 2:
            gone, added = added[:at_once], added[at_once:]
            held.remove(*count_repeats(list(map(as_slots, gone))))
            counts.remove(*count_repeats(list(map(as_slots, gone))))
            model.subtract(slot for one in gone for slot in one)
        for books in (held, counts):
            assert dict(zip(books.slots.tolist(), books.counts.tolist(), strict=True)) == +model
            assert len(books) == len(+model)
        places = held.places(as_slots(batch))
        assert held.slots[places].tolist() == [slot for slot in batch if model[slot]]


def as_slots(slots: list[int]) -> SlotArray:
    return np.array(slots, np.int32)
