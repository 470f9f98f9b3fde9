from __future__ import annotations

import pytest

from aiokv.backends.arena import Layout
from aiokv.backends.base import EventStatus
from aiokv.backends.fake import FakeBackend, FakeCopy
from aiokv.errors import BackendLost, ConfigError, CopyFailed, UsageError
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch
from tests.backends.support import geometry_of, load, store


class Doorbell:
    """Counts how often it was rung."""

    def __init__(self) -> None:
        self.rings = 0

    def __call__(self) -> None:
        self.rings += 1


@pytest.fixture
def bell() -> Doorbell:
    return Doorbell()


@pytest.fixture
def fake(bell: Doorbell) -> FakeBackend:
    return opened(FakeBackend(manual=True), bell)


def opened(backend: FakeBackend, bell: Doorbell) -> FakeBackend:
    backend.open(Layout(geometry=geometry_of("full", "swa"), gpu_blocks=10, cpu_blocks=8))
    backend.attach_doorbell(bell)
    return backend


def directions(backend: FakeBackend) -> list[str]:
    return [copy.direction for copy in backend.pending]


def test_a_submitted_copy_is_pending_and_readable(fake: FakeBackend) -> None:
    event = fake.submit(store({1: 5, 2: 6}, group="swa"))
    assert fake.pending == (FakeCopy(direction="store", group="swa", source_blocks=(1, 2), target_blocks=(5, 6)),)
    assert event.query() is EventStatus.PENDING
    assert event.detail() == ""


def test_complete_ends_the_oldest_of_both_directions_and_rings_once(fake: FakeBackend, bell: Doorbell) -> None:
    events = [fake.submit(batch) for batch in (store({1: 1}), load({2: 2}), store({3: 3}))]
    fake.complete(2)
    assert [event.query() for event in events] == [EventStatus.DONE, EventStatus.DONE, EventStatus.PENDING]
    assert fake.pending[0].source_blocks == (3,)
    assert bell.rings == 1


def test_complete_of_one_direction_leaves_the_other(fake: FakeBackend) -> None:
    for batch in (store({1: 1}), load({2: 2}), load({3: 3})):
        fake.submit(batch)
    fake.complete(direction="load")
    assert directions(fake) == ["store", "load"]
    fake.fail(5, direction="load")
    assert directions(fake) == ["store"]


def test_more_than_pending_is_all_and_nothing_pending_rings_nothing(fake: FakeBackend, bell: Doorbell) -> None:
    event = fake.submit(store({1: 1}))
    fake.complete(100)
    assert event.query() is EventStatus.DONE
    fake.complete()
    fake.complete(0)
    fake.complete_all()
    fake.fail()
    assert bell.rings == 1


@pytest.mark.parametrize("end", [FakeBackend.complete, FakeBackend.fail])
def test_a_negative_count_changes_nothing(fake: FakeBackend, bell: Doorbell, end: object) -> None:
    fake.submit(store({1: 1}))
    with pytest.raises(UsageError, match="negative"):
        end(fake, -1)  # type: ignore[operator]  # both are functions of a backend and a count
    assert len(fake.pending) == 1
    assert bell.rings == 0


def test_fail_says_why_and_never_changes_again(fake: FakeBackend, bell: Doorbell) -> None:
    event = fake.submit(load({1: 1}))
    fake.fail()
    fake.complete_all()
    assert event.query() is EventStatus.FAILED
    assert event.detail()
    assert bell.rings == 1


def test_without_manual_a_copy_is_done_when_submit_returns(bell: Doorbell) -> None:
    backend = opened(FakeBackend(manual=False), bell)
    assert backend.submit(store({1: 1})).query() is EventStatus.DONE
    assert backend.pending == ()
    assert bell.rings == 1


def test_history_keeps_every_accepted_copy(fake: FakeBackend) -> None:
    fake.submit(store({1: 1}))
    fake.complete_all()
    with pytest.raises(UsageError):
        fake.submit(store({10: 1}))
    fake.submit(load({1: 2}))
    assert [(copy.direction, len(copy)) for copy in fake.history] == [("store", 1), ("load", 1)]


def test_fail_next_submit_raises_once_and_starts_nothing(fake: FakeBackend) -> None:
    error = CopyFailed(7, detail="queue full")
    fake.fail_next_submit(error)
    with pytest.raises(CopyFailed) as caught:
        fake.submit(store({1: 1}))
    assert caught.value is error
    assert fake.pending == fake.history == ()
    fake.submit(store({1: 1}))


def test_lose_ends_everything_for_good(fake: FakeBackend, bell: Doorbell) -> None:
    done, lost = fake.submit(store({1: 1})), fake.submit(load({2: 2}))
    fake.complete()
    fake.lose("the device fell off the bus")
    assert (done.query(), lost.query()) == (EventStatus.DONE, EventStatus.LOST)
    assert lost.detail() == "the device fell off the bus"
    assert bell.rings == 2
    with pytest.raises(BackendLost, match="fell off"):
        fake.submit(store({3: 3}))


BAD_BATCHES = {
    "GPU slot too large": store({10: 0}),
    "CPU slot too large": store({1: 8}),
    "negative slot": load({-1: 1}),
    "null block written": load({1: 0}),
    "target named twice": store({1: 3, 2: 3}),
}


@pytest.mark.parametrize("batch", BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_a_wrong_slot_is_refused(fake: FakeBackend, batch: CopyBatch) -> None:
    with pytest.raises(UsageError):
        fake.submit(batch)
    assert fake.pending == ()


def test_an_unknown_group_is_refused(fake: FakeBackend) -> None:
    with pytest.raises(ConfigError, match="'mamba'"):
        fake.submit(store({1: 1}, group="mamba"))


REUSES = {
    "GPU source overwritten": (store({1: 1}), load({2: 1})),
    "CPU source overwritten": (load({1: 1}), store({2: 1})),
    "CPU target read": (store({1: 1}), load({1: 2})),
    "GPU target read": (load({1: 1}), store({1: 2})),
    "target written twice": (load({1: 1}), load({2: 1})),
    "another group's slot": (load({1: 1}, group="swa"), load({2: 1}, group="full")),
}


@pytest.mark.parametrize(("first", "second"), REUSES.values(), ids=REUSES.keys())
@pytest.mark.parametrize("end", [FakeBackend.complete_all, FakeBackend.fail])
def test_a_slot_is_not_reused_before_its_copy_ended(
    fake: FakeBackend, first: CopyBatch, second: CopyBatch, end: object
) -> None:
    """Law 4: while a copy may still run, its blocks are not reused."""
    fake.submit(first)
    with pytest.raises(UsageError, match="another copy"):
        fake.submit(second)
    assert len(fake.pending) == 1
    end(fake)  # type: ignore[operator]  # both are functions of a backend
    fake.submit(second)


def test_one_source_may_be_read_by_two_copies(fake: FakeBackend) -> None:
    fake.submit(load({1: 1}))
    fake.submit(load({1: 2}))
    fake.complete()
    with pytest.raises(UsageError, match="another copy"):
        fake.submit(store({3: 1}))


def test_close_reports_pending_copies_and_ends_intake(fake: FakeBackend) -> None:
    event = fake.submit(store({1: 1}))
    assert not fake.close(deadline_s=1.0)
    with pytest.raises(UsageError, match="closed"):
        fake.submit(store({2: 2}))
    fake.complete_all()
    assert event.query() is EventStatus.DONE
    assert fake.close(deadline_s=1.0)


def test_submit_before_open_is_refused() -> None:
    with pytest.raises(UsageError, match="open"):
        FakeBackend().submit(store({1: 1}))


def test_there_is_no_memory_and_no_clock(fake: FakeBackend) -> None:
    assert fake.block_bytes("full") == 0
    assert FakeBackend(block_bytes=4096).block_bytes("full") == 4096
    assert fake.eta_seconds(Direction.LOAD, 1 << 30) == 0.0
