"""Residence hints: what they hold, for how much of a pool, what comes to them later, and how they let go."""

from __future__ import annotations

import pytest

from aiokv.core.counters import HintClosing, RevokeReason
from aiokv.core.hint_table import HintRecord, HintState
from aiokv.core.lease_table import LeaseRecord
from aiokv.errors import ConfigError, InvalidTransition, UsageError
from aiokv.model.ids import Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import Declined, DeclineReason, Deferred, Outcome
from aiokv.model.spec import ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from aiokv.testing.host import Host
from aiokv.testing.streams import geometry_of

GPU, CPU = Tier.GPU, Tier.CPU
FULL = FullAttention("full", block_size=4)
DRAFT = FullAttention("draft", block_size=4, lookahead=True)
WINDOW = SlidingWindow("window", block_size=4, window=6)
CHUNKED = ChunkedLocal("chunked", block_size=4, chunk=12)
STATE = RecurrentState("state", block_size=4)


def host(*groups: GroupSpec, gpu: int = 41, cpu: int = 0, quota: float = 1.0, slice_blocks: int = 1024) -> Host:
    geometry = geometry_of(*(groups or (FULL,)))
    return Host(geometry, gpu_blocks=gpu, cpu_blocks=cpu, hint_quota=quota, slice_blocks=slice_blocks)


def keep(h: Host, tokens: int, *, stream: int = 0, tenant: str = "a", tier: Tier = GPU, align: int = 1) -> HintRecord:
    hint = h.cache.hints.keep(h.keys(stream, tokens), tenant=tenant, tier=tier, align=align)
    assert isinstance(hint, HintRecord), hint
    h.check()
    return hint


def declined(h: Host, tokens: int, *, stream: int = 0, tenant: str = "a", tier: Tier = GPU) -> DeclineReason:
    """Why a hint is declined; nothing has changed (law 2, invariant 5)."""
    before = h.cache.snapshot()
    answer = h.cache.hints.keep(h.keys(stream, tokens), tenant=tenant, tier=tier)
    assert isinstance(answer, Declined)
    assert h.cache.snapshot() == before
    return answer.reason


def blocks_of(h: Host, hint: HintRecord, *, group: int = 0, stream: int = 0) -> list[int]:
    """Positions of the blocks of one group that a hint holds."""
    found = h.cache.find_blocks(h.keys(stream), group=group, tier=hint.tier)
    held = set(hint.slots.tolist())
    return [i for i, slot in enumerate(found.slots.tolist()) if found.present[i] and slot in held]


def end(h: Host, *hints: HintRecord) -> None:
    for hint in hints:
        h.cache.hints.release(hint)
        h.check()
    h.tear_down()


# What is held.


def test_what_is_kept_is_not_evicted_and_is_hit() -> None:
    h = host(gpu=11)
    h.place(0, range(4), tier=GPU)
    hint = keep(h, 17)
    assert (hint.length, hint.is_whole, blocks_of(h, hint)) == (16, True, [0, 1, 2, 3])
    for tokens in (21, 24, 20):
        h.release(h.admit(1, tokens))
        h.run_slices()
    assert h.letters(0)[:5] == "gggg-"
    assert h.admit(0, 30).length == 16
    end(h, hint)


def test_without_a_hint_the_same_pressure_evicts_it() -> None:
    h = host(gpu=11)
    h.place(0, range(4), tier=GPU)
    h.release(h.admit(1, 40))
    h.run_slices()
    assert h.letters(0)[:4] == "----"
    h.tear_down()


def test_blocks_behind_a_hole_are_not_held() -> None:
    h = host()
    h.place(0, [0, 1, 3, 4], tier=GPU)
    hint = keep(h, 21)
    assert (hint.length, hint.is_whole, blocks_of(h, hint)) == (8, False, [0, 1])
    end(h, hint)


def test_a_prefix_that_ends_with_a_block_is_held_whole() -> None:
    """Unlike a prompt of so many tokens, whose last one is computed again: who extends it has more of them."""
    h = host()
    h.place(0, range(4), tier=GPU)
    hint = keep(h, 16)
    assert (hint.length, hint.is_whole) == (16, True)
    assert h.admit(0, 17).length == 16
    end(h, hint)


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_prefix_without_a_full_block_is_held_for_nothing(tokens: int) -> None:
    h = host(quota=0.0)
    hint = keep(h, tokens)
    assert (hint.length, hint.is_whole, len(hint.slots)) == (0, True, 0)
    assert hint.state is HintState.HELD
    end(h, hint)


@pytest.mark.parametrize(
    ("groups", "blocks"),
    [
        ((FULL, WINDOW), ([0, 1, 2, 3, 4, 5], [4, 5])),
        ((FULL, CHUNKED), ([0, 1, 2, 3, 4, 5], [])),
        ((FULL, STATE), ([0, 1, 2, 3, 4, 5], [5])),
        ((WINDOW, STATE), ([4, 5], [5])),
        ((FULL, DRAFT), ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5])),
    ],
)
def test_each_kind_holds_what_a_longer_request_needs(
    groups: tuple[GroupSpec, ...], blocks: tuple[list[int], ...]
) -> None:
    """Section 5: the coverage of the prefix, and the block behind it where draft heads probe one."""
    h = host(*groups)
    for group in range(len(groups)):
        h.place(0, range(6), group=group, tier=GPU)
    hint = keep(h, 25)
    assert tuple(blocks_of(h, hint, group=group) for group in range(len(groups))) == blocks
    h.make_room(GPU)
    assert h.admit(0, 40).length == hint.length == (20 if DRAFT in groups else 24)
    end(h, hint)


def test_hits_that_end_at_multiples_of_a_chunk_are_held_so() -> None:
    h = host(FULL, WINDOW)
    for group in range(2):
        h.place(0, range(6), group=group, tier=GPU)
    hint = keep(h, 25, align=16)
    assert (hint.length, hint.is_whole) == (16, True)
    assert [blocks_of(h, hint, group=group) for group in range(2)] == [[0, 1, 2, 3], [2, 3]]
    end(h, hint)


def test_the_lookup_of_a_hint_changes_no_order() -> None:
    """Invariant 6; the eviction order of what it does not hold stays."""
    h = host(gpu=11)
    h.place(0, range(2), tier=GPU)
    h.place(1, range(2), tier=GPU)
    before = h.cache.snapshot()
    h.cache.hints.release(keep(h, 3, stream=1))
    assert h.cache.snapshot() == before
    h.tear_down()


# Quotas.


def test_more_than_the_quota_is_declined_and_nothing_changes() -> None:
    h = host(gpu=41, quota=0.1)
    h.place(0, range(5), tier=GPU)
    assert h.cache.hints.quota_blocks(GPU) == 4
    assert declined(h, 20) is DeclineReason.QUOTA
    hint = keep(h, 16)
    assert h.cache.counters.hints_declined[DeclineReason.QUOTA] == 1
    assert h.cache.counters.hints_opened == 1
    end(h, hint)


def test_what_could_never_fit_the_quota_is_declined_before_it_is_resident() -> None:
    h = host(gpu=41, quota=0.1)
    assert declined(h, 20) is DeclineReason.QUOTA
    h.tear_down()


def test_a_block_that_two_hints_of_a_tenant_hold_counts_once_and_for_each_of_two_tenants() -> None:
    h = host(gpu=41, quota=0.1)
    h.place(0, range(4), tier=GPU)
    h.place(1, range(2), tier=GPU)
    hints = [keep(h, 16), keep(h, 12), keep(h, 16, tenant="b")]
    assert h.cache.hints.held_blocks(GPU) == 4
    assert declined(h, 4, stream=1) is DeclineReason.QUOTA
    assert declined(h, 4, stream=1, tenant="b") is DeclineReason.QUOTA
    h.cache.hints.release(hints[0])
    hints.append(keep(h, 4, stream=1))
    assert declined(h, 8, stream=1) is DeclineReason.QUOTA
    end(h, *hints)


def test_quotas_of_the_tiers_are_apart() -> None:
    h = host(gpu=41, cpu=20, quota=0.1)
    h.place(0, range(4), tier=GPU)
    h.place(0, range(4), tier=CPU)
    hint = keep(h, 16)
    assert declined(h, 12, tier=CPU) is DeclineReason.QUOTA
    other = keep(h, 8, tier=CPU)
    end(h, hint, other)


def test_slots_that_requests_were_promised_are_not_taken() -> None:
    """Law 2: the claims of an admitted request that have no name yet stay good."""
    h = host(gpu=11, slice_blocks=1)
    h.place(0, range(5), tier=GPU)
    record = h.admit(1, 40)
    assert record.unnamed_claims > 5
    assert declined(h, 8) is DeclineReason.POOL_FULL
    h.run_slices()
    h.check()
    h.release(record)
    h.tear_down()


# What comes later.


def test_a_system_prompt_is_held_from_its_next_computation_on() -> None:
    h = host()
    hint = keep(h, 24)
    assert (hint.length, hint.is_whole) == (0, False)
    record = h.admit(0, 33)
    h.confirm(record, 13)
    h.run_slices()
    assert hint.length == 12
    h.confirm(record, 33)
    h.run_slices()
    h.check()
    assert (hint.length, hint.is_whole, blocks_of(h, hint)) == (24, True, [0, 1, 2, 3, 4, 5])
    h.release(record)
    h.make_room(GPU)
    assert h.letters(0)[:7] == "gggggg-"
    end(h, hint)


def test_a_hole_is_closed_by_the_load_of_a_request() -> None:
    h = host(FULL, WINDOW, cpu=20)
    h.place(0, [0, 1, 3, 4], tier=GPU)
    h.place(0, [2], tier=CPU)
    h.place(0, range(5), group=1, tier=GPU)
    hint = keep(h, 20)
    assert hint.length == 8
    record = h.admit(0, 21)
    assert hint.length == 8, "a block is held once its copy has ended"
    h.end_all()
    assert (hint.length, hint.is_whole) == (20, True)
    assert [blocks_of(h, hint, group=group) for group in range(2)] == [[0, 1, 2, 3, 4], [3, 4]]
    h.release(record)
    end(h, hint)


def test_a_captured_state_is_held_when_it_comes() -> None:
    h = host(FULL, STATE)
    record = h.admit(0, 25)
    h.confirm(record, 24)
    hint = keep(h, 24)
    assert hint.length == 0
    h.release(record)
    record = h.admit(0, 25)
    h.confirm(record, 24, states=(24,))
    h.run_slices()
    assert (hint.length, hint.is_whole) == (24, True)
    h.release(record)
    end(h, hint)


def test_what_comes_stops_at_the_quota_and_goes_on_when_its_owner_asks() -> None:
    h = host(gpu=41, quota=0.1)
    h.place(1, range(2), tier=GPU)
    other = keep(h, 8, stream=1)
    hint = keep(h, 16)
    record = h.admit(0, 17)
    h.confirm(record, 17)
    h.run_slices()
    h.check()
    assert (hint.length, hint.state) == (0, HintState.HELD)
    h.cache.hints.release(other)
    h.run_slices()
    assert hint.length == 0
    assert h.cache.hints.update(hint, h.keys(0, 16)) == 16
    h.release(record)
    end(h, hint)


def test_the_arrival_of_other_blocks_is_no_work() -> None:
    h = host()
    hint = keep(h, 24)
    h.place(1, range(5), tier=GPU)
    assert not h.cache.has_work
    h.place(0, [3], tier=GPU)
    assert not h.cache.has_work, "it waits for the first block"
    end(h, hint)


def test_while_a_full_group_has_a_hole_the_blocks_of_others_are_no_work() -> None:
    h = host(FULL, WINDOW)
    hint = keep(h, 24)
    h.place(0, range(6), group=1, tier=GPU)
    assert not h.cache.has_work
    h.place(0, range(6), tier=GPU)
    h.run_slices()
    assert hint.is_whole
    end(h, hint)


def test_a_released_hint_waits_for_nothing() -> None:
    h = host()
    hint = keep(h, 24)
    h.cache.hints.release(hint)
    h.place(0, range(5), tier=GPU)
    assert not h.cache.has_work
    h.tear_down()


# Another prefix, and the end.


def test_a_hint_moves_with_its_session_and_lets_go_of_what_the_next_prefix_does_not_need() -> None:
    h = host(FULL, WINDOW)
    for group in range(2):
        h.place(0, range(8), group=group, tier=GPU)
    hint = keep(h, 16)
    assert [blocks_of(h, hint, group=group) for group in range(2)] == [[0, 1, 2, 3], [2, 3]]
    assert h.cache.hints.update(hint, h.keys(0, 32)) == 32
    h.check()
    assert [blocks_of(h, hint, group=group) for group in range(2)] == [[0, 1, 2, 3, 4, 5, 6, 7], [6, 7]]
    assert h.cache.hints.update(hint, h.keys(1, 9)) == 0
    assert len(hint.slots) == 0
    end(h, hint)


def test_an_update_beyond_the_quota_is_declined_and_the_hint_holds_what_it_held() -> None:
    """Law 2, invariant 5."""
    h = host(gpu=41, quota=0.1)
    h.place(0, range(6), tier=GPU)
    hint = keep(h, 16)
    before = (h.cache.snapshot(), hint.length, hint.slots.tolist())
    assert h.cache.hints.update(hint, h.keys(0, 20)) == Declined(DeclineReason.QUOTA)
    assert (h.cache.snapshot(), hint.length, hint.slots.tolist()) == before
    end(h, hint)


def test_a_released_hint_is_released_once_and_takes_hold_no_more() -> None:
    h = host()
    h.place(0, range(4), tier=GPU)
    hint = keep(h, 16)
    before = h.cache.capacity_generation
    h.cache.hints.release(hint)
    assert h.cache.capacity_generation > before, "who waits for capacity is worth another try"
    h.cache.hints.release(hint, how=HintClosing.FINALIZER)
    h.cache.hints.revoke(hint)
    assert hint.state is HintState.RELEASED
    assert h.cache.counters.hints_closed == {
        HintClosing.RELEASED: 1, HintClosing.FINALIZER: 0, HintClosing.SHUTDOWN: 0,
    }  # fmt: skip
    with pytest.raises(InvalidTransition, match="residence hint 1 cannot take hold while it is released"):
        h.cache.hints.update(hint, h.keys(0, 16))
    h.tear_down()


def test_an_operator_revokes_and_the_owner_takes_hold_again() -> None:
    h = host()
    h.place(0, range(4), tier=GPU)
    hint = keep(h, 16)
    h.cache.hints.revoke(hint)
    h.cache.hints.revoke(hint)
    h.check()
    assert (hint.state, hint.length, h.cache.hints.held_blocks(GPU)) == (HintState.REVOKED, 0, 0)
    assert h.cache.counters.hints_revoked[RevokeReason.OPERATOR] == 1
    h.place(0, [4], tier=GPU)
    assert not h.cache.has_work, "a revoked hint takes hold of nothing by itself"
    assert h.cache.hints.update(hint, h.keys(0, 16)) == 16
    assert hint.state is HintState.HELD
    end(h, hint)


# Resets and faults.


@pytest.mark.parametrize("slice_blocks", [1, 1024])
def test_a_reset_revokes_the_hints_of_its_tier_in_slices(slice_blocks: int) -> None:
    h = host(cpu=20, slice_blocks=slice_blocks)
    h.place(0, range(4), tier=GPU)
    h.place(0, range(4), tier=CPU)
    hints = [keep(h, 16), keep(h, 8, tenant="b"), keep(h, 4)]
    other = keep(h, 16, tier=CPU)
    h.reset(GPU)
    h.check()
    assert [hint.state for hint in (*hints, other)] == [HintState.REVOKED] * 3 + [HintState.HELD]
    assert h.cache.is_sweeping
    h.run_slices()
    h.check()
    assert h.cache.hints.held_blocks(GPU) == 0
    assert h.counts(GPU).free == 40
    assert h.cache.counters.hints_revoked[RevokeReason.RESET] == 3
    end(h, *hints, other)


def test_in_the_step_of_a_reset_nothing_stands_in_the_way() -> None:
    """The pins of cleared hints come back later, but neither a request nor another hint has to wait for that."""
    h = host(gpu=11, quota=0.5)
    h.place(0, range(5), tier=GPU)
    hint = keep(h, 20)
    h.reset(GPU)
    h.place(0, range(5), tier=GPU)
    assert h.cache.hints.update(hint, h.keys(0, 20)) == 20
    h.check()
    other = keep(h, 20, tenant="b")
    h.reset(GPU)
    assert isinstance(h.acquire(1, 40), LeaseRecord)
    h.check()
    h.cache.hints.release(other)
    h.check()
    end(h, hint)


def test_a_block_that_was_lost_in_a_copy_is_let_go() -> None:
    """Quarantined, it serves nobody; what follows it is useless too."""
    h = host(cpu=20)
    record = h.admit(0, 17)
    h.confirm(record, 17)
    hint = keep(h, 16)
    h.finish(record)
    h.submit_all()
    h.end(h.running[0], Outcome.LOST)
    h.run_slices()
    h.check()
    assert h.counts(GPU).quarantined == 4
    assert (hint.length, len(hint.slots), hint.state) == (0, 0, HintState.HELD)
    end(h, hint)


def test_a_block_whose_bytes_have_rotted_is_let_go() -> None:
    """It has no key any more; its slot is free once the hint and its last reader are done."""
    h = host(cpu=20)
    h.place(0, range(4), tier=CPU)
    hint = keep(h, 16, tier=CPU)
    record = h.admit(0, 17)
    h.submit_all()
    h.report(h.running[0], 0, outcome=Outcome.CORRUPT, corrupt=(1,))
    h.run_slices()
    h.check()
    assert (hint.length, len(hint.slots), hint.is_whole) == (4, 1, False)
    assert h.counts(CPU).reserved == 0
    h.release(record)
    end(h, hint)


@pytest.mark.parametrize("hints", [1, 2, 3])
def test_hints_that_share_a_rotten_block_let_it_go_though_their_quota_is_used_up(hints: int) -> None:
    """A shorter prefix needs another block of the window: there is room for it once all have let go of the rest."""
    h = host(FULL, WINDOW, cpu=10, quota=0.7)
    h.place(0, range(5), tier=CPU)
    h.place(0, range(2, 5), group=1, tier=CPU)
    kept = [keep(h, 20, tier=CPU) for _ in range(hints)]
    assert [(hint.length, len(hint.slots)) for hint in kept] == [(20, 7)] * hints
    record = h.admit(0, 24)
    h.submit_all()
    load = next(transfer for transfer in h.running if transfer.group == 0)
    h.report(load, 0, outcome=Outcome.CORRUPT, corrupt=(4,))
    h.run_slices()
    h.check()
    assert h.letters(0)[:5] == "cccc-"
    assert [(hint.length, len(hint.slots)) for hint in kept] == [(16, 6)] * hints
    h.release(record)
    h.turn()
    h.end_all()
    for hint in kept[1:]:
        h.cache.hints.release(hint)
    h.place(0, (4,), tier=CPU)
    h.run_slices()
    assert kept[0].length == 20, "what has gone is waited for"
    end(h, *kept)


def test_a_lost_block_is_let_go_though_nothing_else_can_be_held() -> None:
    """All that a shorter prefix would need was promised to a request: the hint holds nothing, and waits."""
    h = host(FULL, WINDOW, gpu=18, cpu=20, slice_blocks=1)
    h.place(0, range(5), tier=GPU)
    h.place(0, range(2, 5), group=1, tier=GPU)
    hint = keep(h, 20)
    record = h.admit(0, 21, first_chunk=1)
    h.turn()
    h.submit_all()
    store = next(transfer for transfer in h.running if transfer.group == 0 and 4 in transfer.positions)
    h.release(record)
    busy = h.admit(1, 8)
    h.confirm(busy, 8)
    h.end(store, Outcome.LOST)
    h.run_slice()
    assert len(hint.slots) == 7
    rival = h.acquire(2, 1, reserve_tokens=8)
    assert isinstance(rival, LeaseRecord)
    h.run_slices()
    h.check()
    assert (hint.length, len(hint.slots), hint.state) == (0, 0, HintState.HELD)
    h.release(busy)
    h.release(rival)
    end(h, hint)


def test_from_the_report_of_a_loss_on_a_hint_vouches_for_no_more_than_a_request_hits() -> None:
    """A request that comes before the next slice hits less than was held; the hint must not say otherwise."""
    h = host(cpu=20)
    h.place(0, range(4), tier=CPU)
    hint = keep(h, 16, tier=CPU)
    record = h.admit(0, 17)
    h.submit_all()
    h.report(h.running[0], 0, outcome=Outcome.CORRUPT, corrupt=(1,))
    other = h.acquire(0, 17)
    assert isinstance(other, LeaseRecord)
    assert hint.length <= other.length == 4
    assert not hint.is_whole
    h.run_slices()
    assert hint.length == 4
    h.release(record)
    h.release(other)
    end(h, hint)


def test_hints_that_lost_a_block_find_room_for_what_is_left_when_all_have_let_go() -> None:
    """The shorter prefix needs other blocks of the window; the quota is counted while a second hint holds the old."""
    h = host(FULL, WINDOW, cpu=20, quota=0.5)
    h.place(0, range(8), tier=CPU)
    h.place(0, range(8), tier=CPU, group=1)
    hints = [keep(h, 32, tier=CPU), keep(h, 32, tier=CPU)]
    record = h.admit(0, 33)
    h.submit_all()
    h.report(h.running[0], 0, outcome=Outcome.CORRUPT, corrupt=(5,))
    h.run_slices()
    h.check()
    assert [(hint.length, len(hint.slots)) for hint in hints] == [(20, 7), (20, 7)]
    assert h.cache.hints.update(hints[0], h.keys(0, 32)) == 20
    h.check()
    h.release(record)
    end(h, *hints)


def test_the_cpu_tier_stores_around_what_is_kept() -> None:
    """A store never revokes: it is skipped and counted."""
    h = host(cpu=6)
    h.place(1, range(5), tier=CPU)
    hint = keep(h, 20, stream=1, tier=CPU)
    record = h.admit(0, 17)
    h.confirm(record, 17)
    h.run_slices()
    h.end_all()
    assert h.cache.counters.store_skipped_blocks[DeclineReason.POOL_FULL] > 0
    assert h.letters(1)[:5] == "ccccc"
    assert (hint.state, hint.length) == (HintState.HELD, 20)
    h.release(record)
    end(h, hint)


def test_a_lost_backend_leaves_nothing_to_keep_in_the_cpu_tier() -> None:
    h = host(cpu=20)
    h.place(0, range(4), tier=CPU)
    hint = keep(h, 16, tier=CPU)
    h.cache.lose_backend()
    assert h.cache.hints.update(hint, h.keys(0, 16)) == 0
    assert len(hint.slots) == 0
    end(h, hint)


# Books.


def test_the_audit_names_each_hint_with_its_tenant_and_blocks() -> None:
    """Invariant 2: leases, transfers and hints hold the pins; invariant 12: without the others only those of hints."""
    h = host()
    h.place(0, range(4), tier=GPU)
    hint, shared = keep(h, 16, tenant="acme"), keep(h, 8)
    record = h.admit(0, 30)
    audit = h.cache.audit()
    assert [(view.tenant, view.tier, view.state, view.held_tokens, view.blocks) for view in audit.hints] == [
        ("acme", GPU, "held", 16, 4), ("a", GPU, "held", 8, 2),
    ]  # fmt: skip
    assert {pin.holder: pin.blocks for pin in audit.pins} == {
        "lease 1": 8, f"hint {hint.hint_id} of acme": 4, f"hint {shared.hint_id} of a": 2,
    }  # fmt: skip
    h.release(record)
    h.run_slices()
    assert sum(pin.blocks for pin in h.cache.audit().pins) == 6
    assert h.counts(GPU).reserved == 0
    assert h.cache.hints.find(hint.hint_id) is hint
    assert h.cache.hints.live() == (hint, shared)
    end(h, hint, shared)


def test_an_audit_in_slices_follows_hints_that_change_meanwhile() -> None:
    h = host()
    h.place(0, range(4), tier=GPU)
    h.place(1, range(4), tier=GPU)
    hints = [keep(h, 16), keep(h, 8, tenant="b"), keep(h, 4, tenant="c")]
    with h.cache.audit_in_slices(slice_slots=2) as run:
        assert run.run_slice()
        h.cache.hints.update(hints[0], h.keys(1, 12))
        h.cache.hints.release(hints[1])
        h.cache.hints.revoke(hints[2])
        hints.append(keep(h, 16, tenant="d"))
        while run.run_slice():
            pass
    assert run.result.violations == ()
    assert {(view.tenant, view.blocks) for view in run.result.hints} == {("a", 3), ("d", 4)}
    assert sum(pin.blocks for pin in run.result.pins) == 7
    end(h, *hints)


def test_hints_are_part_of_the_snapshot() -> None:
    h = host()
    before = h.cache.snapshot()
    hint = keep(h, 16)
    assert h.cache.snapshot() != before
    h.cache.hints.release(hint)
    assert h.cache.snapshot() == before
    h.tear_down()


def test_one_request_can_have_the_whole_pool_though_all_of_it_is_kept() -> None:
    """Invariant 12."""
    h = host(gpu=11)
    h.place(0, range(10), tier=GPU)
    keep(h, 40)
    assert not isinstance(h.acquire(1, 40), Deferred)
    for record in list(h.leases.values()):
        h.release(record)
    h.tear_down()


# What is refused.


@pytest.mark.parametrize("quota", [-0.1, 1.1, float("nan")])
def test_a_quota_is_a_part_of_the_pool(quota: float) -> None:
    with pytest.raises(ConfigError, match="hint_quota"):
        host(quota=quota)


def test_wrong_hints_are_refused() -> None:
    h = host()
    with pytest.raises(UsageError, match="no cpu tier"):
        keep(h, 16, tier=CPU)
    with pytest.raises(UsageError, match="align"):
        keep(h, 16, align=0)
    with pytest.raises(UsageError, match="hash blocks of 8"):
        h.cache.hints.keep(BlockKeys(range(16), hash_block_size=8), tenant="a")
    assert h.cache.audit().hints == ()
    h.tear_down()
