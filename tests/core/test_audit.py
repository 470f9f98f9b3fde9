"""The audit, in one hold and in slices: it names every holder, finds what is wrong, and tells of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from aiokv.core.audit import Audit, AuditClock, HolderKind
from aiokv.core.audit_run import AuditRun
from aiokv.core.cache import CacheState
from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import LeaseRecord
from aiokv.core.world import World
from aiokv.errors import UsageError
from aiokv.model.ids import Direction, SlotArray, Tier
from aiokv.model.plan import Outcome
from aiokv.model.spec import FullAttention
from aiokv.testing.host import Host
from aiokv.testing.streams import geometry_of

FULL = geometry_of(FullAttention("full", block_size=4))
GPU, CPU = Tier.GPU, Tier.CPU
SLOTS = 32


@dataclass(frozen=True)
class Scene:
    """A cache in the middle of its work: `loading` waits for a load, `computing` is ready, `storing` is a copy."""

    host: Host
    world: World
    loading: LeaseRecord
    computing: LeaseRecord
    load: Transfer
    storing: Transfer

    @property
    def cache(self) -> CacheState:
        return self.host.cache

    def evictable(self) -> SlotArray:
        return self.world.gpu.find_coldest(1, 100)


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> list[World]:
    """The state behind every cache that a test makes, so that faults can be put into it."""
    made: list[World] = []

    def make(*args: object, **options: object) -> World:
        made.append(World(*args, **options))  # type: ignore[arg-type]  # passed on
        return made[-1]

    monkeypatch.setattr("aiokv.core.cache.World", make)
    return made


@pytest.fixture
def scene(worlds: list[World]) -> Scene:
    host = Host(FULL, gpu_blocks=SLOTS + 1, cpu_blocks=SLOTS, slice_blocks=4)
    host.place(0, range(3), tier=GPU)
    host.place(0, range(3, 6), tier=CPU)
    gone = host.admit(2, 30)
    host.run_slices()
    host.release(gone)
    computing = host.admit(1, 17)
    host.run_slices()
    host.confirm(computing, 13)
    host.run_slices()
    loading = host.admit(0, 33)
    host.run_slices()
    host.submit_all()
    (load,) = host.in_flight(direction=Direction.LOAD)
    (storing,) = [t for t in host.in_flight(direction=Direction.STORE) if t.owner == computing.lease_id]
    host.place(1, range(10, 13), tier=GPU)
    host.evict(1, [12], tier=GPU)
    return Scene(host, worlds[-1], loading, computing, load, storing)


def sliced(cache: CacheState, *, slice_slots: int = 3) -> Audit:
    with cache.audit_in_slices(slice_slots=slice_slots) as run:
        while run.run_slice():
            pass
        return run.result


# What is right.


def test_a_cache_that_works_has_no_violations_and_both_ways_agree(scene: Scene) -> None:
    """Invariants 1 to 4, 12 and 13."""
    audit = scene.cache.audit()
    assert audit.violations == ()
    assert audit.pins
    for slice_slots in (1, 2, 7, 1 << 20):
        assert sliced(scene.cache, slice_slots=slice_slots) == audit


@pytest.mark.parametrize(("gpu_blocks", "cpu_blocks"), [(2, 0), (2, 1), (3, 70)])
def test_an_empty_cache_of_any_size(gpu_blocks: int, cpu_blocks: int) -> None:
    cache = CacheState(FULL, gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks)
    nothing = Audit(leases=(), pins=(), reservations=(), violations=())
    assert cache.audit() == sliced(cache) == nothing


def test_every_holding_says_for_whom_and_since_when(scene: Scene) -> None:
    scene.loading.opened_at = 10.0
    scene.computing.opened_at = 20.0
    scene.load.since = 11.0
    for audit in (scene.cache.audit(), sliced(scene.cache)):
        by_holder = {(holding.kind, holding.holder_id, holding.tier): holding for holding in audit.pins}
        lease = by_holder[HolderKind.LEASE, scene.loading.lease_id, GPU]
        assert (lease.request_id, lease.since) == ("s0n33", 10.0)
        source = by_holder[HolderKind.LOAD, scene.load.transfer_id, CPU]
        assert (source.request_id, source.since, source.waiters) == ("s0n33", 11.0, ("s0n33",))
        assert source.blocks == 3
        assert source.holder == f"load {scene.load.transfer_id}"
        store = by_holder[HolderKind.STORE, scene.storing.transfer_id, GPU]
        assert store.since == 20.0, "a transfer that the host has not met yet is as old as its lease"
        assert store.request_id == "s1n17"


def test_claims_are_reservations_of_their_lease(worlds: list[World]) -> None:
    host = Host(FULL, gpu_blocks=SLOTS, cpu_blocks=0, slice_blocks=2)
    record = host.admit(0, 29)
    for audit in (host.cache.audit(), sliced(host.cache)):
        (claims,) = audit.reservations
        assert (claims.holder_id, claims.request_id, claims.blocks) == (record.lease_id, "s0n29", 6)
    host.run_slices()
    assert host.cache.audit().reservations == ()


def test_a_copy_that_nobody_waits_for_is_told_without_a_request(scene: Scene) -> None:
    scene.host.release(scene.loading)
    for audit in (scene.cache.audit(), sliced(scene.cache)):
        orphans = [holding for holding in audit.pins if holding.holder_id == scene.load.transfer_id]
        assert [(o.kind, o.request_id, o.waiters) for o in orphans if o.kind is HolderKind.LOAD] == [
            (HolderKind.LOAD, "", ()),
            (HolderKind.LOAD, "", ()),
        ]
        assert audit.violations == ()


def test_leases_older_than_the_limit_are_overdue(scene: Scene) -> None:
    scene.loading.opened_at = 10.0
    scene.computing.opened_at = 20.0
    clock = AuditClock(now=25.0, lease_age_limit=10.0)
    audit = scene.cache.audit(clock)
    assert [lease.request_id for lease in audit.overdue] == ["s0n33"]
    assert audit.taken_at == 25.0
    with scene.cache.audit_in_slices(clock=clock) as run:
        while run.run_slice():
            pass
    assert run.result.overdue == audit.overdue
    assert scene.cache.audit().overdue == (), "without a clock none is"
    assert scene.cache.audit(AuditClock(now=1e9)).overdue == (), "nor without a limit"


# What is wrong.


def unpin_too_often(scene: Scene) -> None:
    scene.world.gpu.unpin(scene.computing.held_slots()[:1])


def pin_too_often(scene: Scene) -> None:
    scene.world.gpu.pin(scene.computing.held_slots()[:2])


def pin_a_source_too_often(scene: Scene) -> None:
    assert scene.world.cpu is not None
    scene.world.cpu.pin(scene.load.sources[:1])


def forget_a_pin(scene: Scene) -> None:
    scene.computing.tables[0].take_range(0, 1)


def hold_what_does_not_exist(scene: Scene) -> None:
    scene.computing.tables[0].put(np.array([0]), np.array([10_000], np.int32))


def claim_for_nobody(scene: Scene) -> None:
    scene.world.gpu.claim(1)


def lose_a_claim(scene: Scene) -> None:
    scene.world.gpu.claim(2)
    scene.world.gpu.unclaim(1)


def free_what_is_held(scene: Scene) -> None:
    scene.world.gpu.books.free.put(scene.computing.held_slots()[:1])


def free_twice(scene: Scene) -> None:
    free = scene.world.gpu.books.free
    assert free.returned_count
    free.put(free.returned[:1])


def make_a_pin_negative(scene: Scene) -> None:
    scene.world.gpu.books.pins[scene.evictable()] = -1


def hide_a_key(scene: Scene) -> None:
    scene.world.gpu.books.index.remove(scene.evictable())


def drop_from_the_queue(scene: Scene) -> None:
    scene.world.gpu.books.queue.drop(scene.evictable())


def queue_what_is_pinned(scene: Scene) -> None:
    scene.world.gpu.books.queue.push(scene.computing.held_slots()[:1])


def mark_as_out(scene: Scene) -> None:
    scene.world.gpu.books.quarantined[scene.evictable()] = True


def register_at_submit(scene: Scene) -> None:
    digests = scene.host.keys(0).digests(1, 3, 6)
    scene.world.gpu.register(scene.load.bound_targets, digests, 0)


def end_a_copy_and_keep_its_pins(scene: Scene) -> None:
    scene.world.inflight.unmark(scene.load, start=0, stop=len(scene.load))


def give_a_lease_back_in_the_table_alone(scene: Scene) -> None:
    scene.world.leases.remove(scene.computing.lease_id)


def count_a_lease_twice(scene: Scene) -> None:
    scene.world.counters.leases_opened += 1


FAULTS: dict[Callable[[Scene], None], str] = {
    unpin_too_often: "has 0 pins, 1 holders",
    pin_too_often: "pins",
    pin_a_source_too_often: "cpu slot",
    forget_a_pin: "holders",
    hold_what_does_not_exist: "slots are held that do not exist",
    claim_for_nobody: "the leases claim 0 GPU slots, the pool counts 1",
    lose_a_claim: "the leases claim 0 GPU slots, the pool counts 1",
    free_what_is_held: "gpu: a free slot has a pin: 1 slots",
    free_twice: "gpu: a slot is twice on the free stack: 1 slots",
    make_a_pin_negative: "gpu: a pin count is negative: 1 slots",
    hide_a_key: "gpu: the evictable slots are not those with a key and no pin: 1 slots",
    drop_from_the_queue: "gpu: the evictable slots are not those with a key and no pin: 1 slots",
    queue_what_is_pinned: "gpu: the evictable slots are not those with a key and no pin: 1 slots",
    mark_as_out: "gpu: a slot is in no state or in two: 1 slots",
    register_at_submit: "gpu: a slot can be found before its copy has ended: 3 slots",
    end_a_copy_and_keep_its_pins: "has 1 pins, 0 holders",
    give_a_lease_back_in_the_table_alone: "leases live, which is not what was opened less what was closed",
    count_a_lease_twice: "leases live, which is not what was opened less what was closed",
}
every_fault = pytest.mark.parametrize(("fault", "words"), FAULTS.items(), ids=[fault.__name__ for fault in FAULTS])


def assert_found(audit: Audit, words: str) -> None:
    assert any(words in violation for violation in audit.violations), audit.violations


@every_fault
def test_a_fault_is_found_in_one_hold_and_in_slices(scene: Scene, fault: Callable[[Scene], None], words: str) -> None:
    """Invariants 1 to 4 and 13, each broken in some way: both audits find the same and raise nothing."""
    fault(scene)
    audit = scene.cache.audit()
    assert_found(audit, words)
    for slice_slots in (1, 5):
        assert set(sliced(scene.cache, slice_slots=slice_slots).violations) == set(audit.violations)


@every_fault
def test_a_fault_between_two_slices_breaks_no_audit_and_is_found_by_the_next(
    scene: Scene, fault: Callable[[Scene], None], words: str
) -> None:
    with scene.cache.audit_in_slices(slice_slots=4) as run:
        for _ in range(6):
            assert run.run_slice()
        fault(scene)
        while run.run_slice():
            pass
    assert set(run.result.violations) <= set(scene.cache.audit().violations)
    assert_found(sliced(scene.cache), words)


@pytest.mark.parametrize(
    "fault",
    [
        unpin_too_often, forget_a_pin, register_at_submit, claim_for_nobody, end_a_copy_and_keep_its_pins,
        give_a_lease_back_in_the_table_alone,
    ],
)  # fmt: skip
@pytest.mark.parametrize("after", range(0, 40, 3))
def test_a_fault_through_the_calls_of_pools_and_tables_is_found_whenever_it_comes(
    scene: Scene, fault: Callable[[Scene], None], after: int
) -> None:
    """What was looked at already is noted and looked at again."""
    with scene.cache.audit_in_slices(slice_slots=4) as run:
        for _ in range(after):
            if not run.run_slice():
                return
        fault(scene)
        while run.run_slice():
            pass
    assert_found(run.result, FAULTS[fault])


def test_a_state_that_cannot_be_read_is_a_violation(scene: Scene) -> None:
    scene.world.gpu.books.free.put(np.array([10_000], np.int32))
    for audit in (scene.cache.audit(), sliced(scene.cache)):
        (violation,) = audit.violations
        assert "the state cannot be read: IndexError" in violation
    assert_nobody_watches(scene.world)


def test_many_wrong_slots_are_counted_and_a_few_are_named(worlds: list[World]) -> None:
    cache = CacheState(FULL, gpu_blocks=200, cpu_blocks=0)
    (world,) = worlds
    world.gpu.claim(150)
    world.gpu.name_claimed(150, 1000)
    for audit in (cache.audit(), sliced(cache)):
        assert sum("has 1 pins, 0 holders" in violation for violation in audit.violations) == 32
        assert "118 more gpu slots have wrong pins" in audit.violations


# Between slices.


def assert_nobody_watches(world: World) -> None:
    pools = [pool for pool in (world.gpu, world.cpu) if pool is not None]
    watchers = [*world.leases.watchers, *world.inflight.watchers]
    for pool in pools:
        watchers += [*pool.watchers, *pool.books.free.watchers]  # type: ignore[list-item]  # whatever they are
    assert not watchers


def test_an_audit_that_has_ended_or_was_closed_is_told_of_nothing_more(scene: Scene) -> None:
    ended = scene.cache.audit_in_slices()
    while ended.run_slice():
        pass
    assert_nobody_watches(scene.world)
    closed = scene.cache.audit_in_slices(slice_slots=1)
    closed.run_slice()
    closed.close()
    closed.close()
    assert_nobody_watches(scene.world)
    assert not ended.run_slice(), "it stays ended"
    assert ended.result.violations == ()


def test_there_is_no_result_before_the_last_slice(scene: Scene) -> None:
    run = scene.cache.audit_in_slices(slice_slots=1)
    with pytest.raises(UsageError, match="has not ended"):
        _ = run.result
    run.close()


@pytest.mark.parametrize("slice_slots", [0, -1, True, 1.5, float("nan"), "8", None])
def test_a_slice_of_no_slots_is_refused(scene: Scene, slice_slots: Any) -> None:  # noqa: ANN401  # anything
    """Such an audit would never end."""
    with pytest.raises(UsageError, match="slice_slots must be a whole number of at least 1"):
        scene.cache.audit_in_slices(slice_slots=slice_slots)


def leave(scene: Scene) -> None:
    scene.host.release(scene.loading)
    scene.host.release(scene.computing)


def end_the_copies(scene: Scene) -> None:
    scene.host.end_all()


def fail_the_copies(scene: Scene) -> None:
    scene.host.end_all(Outcome.FAILED)


def compute_on(scene: Scene) -> None:
    scene.host.confirm(scene.computing, 17)
    scene.host.append(scene.computing, 8)
    scene.host.extend(scene.computing, 8)
    scene.host.run_slices()


def take_a_free_slot_and_others(scene: Scene) -> None:
    assert scene.world.gpu.books.free.returned_count
    scene.host.admit(1, 30)
    scene.host.run_slices()


def take_and_leave(scene: Scene) -> None:
    """The free stack ends as high as it was, with other slots in it."""
    record = scene.host.admit(1, 30)
    scene.host.run_slices()
    scene.host.release(record)


@pytest.mark.parametrize(
    "step",
    [leave, end_the_copies, fail_the_copies, compute_on, take_a_free_slot_and_others, take_and_leave],
)
@pytest.mark.parametrize("after", range(0, 60, 3))
def test_steps_of_the_cache_between_two_slices_are_no_violation(
    scene: Scene, step: Callable[[Scene], None], after: int
) -> None:
    with scene.cache.audit_in_slices(slice_slots=4) as run:
        for _ in range(after):
            run.run_slice()
        if not run.run_slice():
            return
        step(scene)
        drive_to_the_end(run)
    assert run.result == scene.cache.audit()
    assert run.result.violations == ()


def test_two_audits_at_once_do_not_disturb_each_other(scene: Scene) -> None:
    first, second = scene.cache.audit_in_slices(slice_slots=4), scene.cache.audit_in_slices(slice_slots=9)
    for _ in range(5):
        first.run_slice()
        second.run_slice()
    scene.host.release(scene.computing)
    scene.host.end_all()
    drive_to_the_end(first)
    drive_to_the_end(second)
    assert first.result == second.result == scene.cache.audit()
    assert first.result.violations == ()


def drive_to_the_end(run: AuditRun) -> None:
    while run.run_slice():
        pass


def test_a_reset_between_two_slices_is_no_violation(scene: Scene) -> None:
    for moment in range(0, 60, 4):
        run = scene.cache.audit_in_slices(slice_slots=4)
        for _ in range(moment):
            run.run_slice()
        scene.host.reset(GPU if moment % 8 else CPU)
        run.run_slice()
        scene.host.run_slices()
        drive_to_the_end(run)
        assert run.result.violations == ()


@pytest.mark.parametrize("moment", [0, 5, 20, 40])
def test_a_reset_whose_slots_are_not_swept_yet_is_no_violation(scene: Scene, moment: int) -> None:
    """What was looked at before it is of another epoch now, though nothing about the slot has changed."""
    with scene.cache.audit_in_slices(slice_slots=4) as run:
        for _ in range(moment):
            run.run_slice()
        scene.host.reset(GPU)
        drive_to_the_end(run)
        assert run.result.violations == ()


def test_a_fault_that_is_undone_before_the_end_is_not_told(scene: Scene) -> None:
    """What is told of a slot is its last verdict."""
    for moment in range(0, 60, 3):
        slots = scene.evictable()[:1]
        scene.world.gpu.pin(slots)
        with scene.cache.audit_in_slices(slice_slots=4) as run:
            is_running = all(run.run_slice() for _ in range(moment))
            scene.world.gpu.unpin(slots)
            if is_running:
                drive_to_the_end(run)
                assert run.result.violations == ()


def test_an_audit_ends_while_more_slots_change_than_it_looks_at_and_holders_rest_in_between() -> None:
    """Its holders are known after each slice, the slots that they change never; it gives up to follow them."""
    host = Host(geometry_of(*(FullAttention(name, block_size=4) for name in "ab")), gpu_blocks=50, hint_quota=1.0)
    for group in range(2):
        host.place(0, range(24), group=group, tier=GPU)
    run = host.cache.audit_in_slices(slice_slots=70)
    slices = 0
    while run.run_slice():
        slices += 1
        assert slices < 500, "it never ends"
        for hint in list(host.hints):
            host.release_hint(hint)
        if slices % 2:
            host.keep(0, 96)
    assert run.result.violations == ()


def test_an_audit_ends_while_leases_come_and_go_before_each_slice(scene: Scene) -> None:
    """Holders change faster than a slice can follow; nothing false is told."""
    run = scene.cache.audit_in_slices(slice_slots=2)
    slices = 0
    while run.run_slice():
        slices += 1
        assert slices < 1000
        record = scene.host.admit(2, 9, request_id=f"r{slices}")
        scene.host.run_slices()
        scene.host.confirm(record, 8)
        scene.host.run_slices()
        scene.host.release(record)
    assert slices > 64
    assert run.result.violations == ()
    assert len(run.result.leases) == 2


@pytest.mark.parametrize("seed", range(4))
def test_an_audit_ends_while_more_slots_change_than_a_slice_can_follow(scene: Scene, seed: int) -> None:
    """Counts are compared as closely as the slots in doubt allow."""
    run = scene.cache.audit_in_slices(slice_slots=2)
    slices, placed, random = 0, range(0), np.random.default_rng(seed)
    while run.run_slice():
        slices += 1
        assert slices < 1000
        scene.host.evict(1, placed, tier=GPU)
        placed = range(14, 14 + int(random.integers(7)))
        scene.host.place(1, placed, tier=GPU)
    assert slices > 64
    assert run.result.violations == ()


def test_a_holder_that_left_a_copy_begun_after_its_visit_waits_for_it_no_more() -> None:
    host = Host(FULL, gpu_blocks=400, cpu_blocks=400)
    record = host.admit(0, 17)
    host.run_slices()
    with host.cache.audit_in_slices(slice_slots=64) as run:
        assert run.run_slice()
        host.confirm(record, 17)
        host.run_slices()
        for _ in range(2):
            assert run.run_slice()
        host.submit_all()
        host.finish(record)
        host.run_slices()
        while run.run_slice():
            pass
    assert run.result.pins == host.cache.audit().pins
    assert {pin.waiters for pin in run.result.pins} == {()}
