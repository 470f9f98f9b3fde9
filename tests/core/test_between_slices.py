"""Whatever can happen to a lease happens between two slices of whatever goes on: a sweep over all pairs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import pytest

from aiokv.core.lease_table import LeaseRecord
from aiokv.errors import CapacityError, UsageError
from aiokv.model.ids import Tier
from aiokv.model.plan import Outcome
from aiokv.model.spec import FullAttention, SlidingWindow
from aiokv.testing.host import Host
from aiokv.testing.streams import geometry_of

GPU, CPU = Tier.GPU, Tier.CPU
TOKENS: Final = 33
GEOMETRY: Final = geometry_of(FullAttention("full", block_size=4), SlidingWindow("window", block_size=4, window=10))
Step = Callable[[Host], LeaseRecord]
Event = Callable[[Host, LeaseRecord], object]


def started(h: Host) -> LeaseRecord:
    """A lease without a prefix, all of its slots named."""
    record = h.admit(0, TOKENS)
    h.run_slices()
    return record


def naming(h: Host) -> LeaseRecord:
    return h.admit(0, TOKENS)


def naming_load_targets(h: Host) -> LeaseRecord:
    h.place(0, range(8), tier=CPU)
    h.place(0, range(8), group=1, tier=CPU)
    return h.admit(0, TOKENS)


def loading(h: Host) -> LeaseRecord:
    record = naming_load_targets(h)
    h.run_slices()
    h.submit_all()
    return record


def completing(h: Host) -> LeaseRecord:
    record = loading(h)
    h.end(h.running[0])
    return record


def failing(h: Host) -> LeaseRecord:
    record = loading(h)
    h.admit(0, TOKENS)
    for transfer in list(h.running):
        h.end(transfer, Outcome.FAILED)
    return record


def losing(h: Host) -> LeaseRecord:
    record = loading(h)
    h.admit(0, TOKENS - 4)
    h.end(h.running[0], Outcome.LOST)
    return record


def registering(h: Host) -> LeaseRecord:
    record = started(h)
    h.confirm(record, TOKENS)
    return record


def storing(h: Host) -> LeaseRecord:
    record = registering(h)
    h.run_slices()
    h.submit_all()
    return record


def flushing(h: Host) -> LeaseRecord:
    record = registering(h)
    h.finish(record)
    return record


def extending(h: Host) -> LeaseRecord:
    record = started(h)
    h.append(record, 20)
    h.extend(record, 20)
    return record


def sweeping(h: Host) -> LeaseRecord:
    record = registering(h)
    h.run_slices()
    h.reset()
    return record


STEPS: Final[list[Step]] = [
    naming,
    naming_load_targets,
    loading,
    completing,
    failing,
    losing,
    registering,
    storing,
    flushing,
    extending,
    sweeping,
]


def release(h: Host, record: LeaseRecord) -> None:
    h.release(record)


def finish(h: Host, record: LeaseRecord) -> None:
    h.finish(record)


def reset_both(h: Host, record: LeaseRecord) -> None:
    h.reset()


def reset_gpu(h: Host, record: LeaseRecord) -> None:
    h.reset(GPU)


def reset_cpu(h: Host, record: LeaseRecord) -> None:
    h.reset(CPU)


def join(h: Host, record: LeaseRecord) -> None:
    h.acquire(0, TOKENS)
    h.acquire(2, TOKENS)


def copies_end(h: Host, record: LeaseRecord) -> None:
    for transfer in list(h.running):
        h.end(transfer)


def copies_fail(h: Host, record: LeaseRecord) -> None:
    for transfer in list(h.running) + list(h.queued):
        if transfer in h.running or transfer in h.queued:
            h.end(transfer, Outcome.FAILED)


def a_copy_is_lost(h: Host, record: LeaseRecord) -> None:
    for transfer in list(h.running)[:1]:
        h.end(transfer, Outcome.LOST)


def the_pool_fills(h: Host, record: LeaseRecord) -> None:
    for tokens in range(60, 0, -3):
        with suppress(CapacityError):
            h.acquire(1, tokens)


def extend(h: Host, record: LeaseRecord) -> None:
    before = list(record.capacity_tokens)
    with suppress(CapacityError, UsageError):
        h.extend(record, 9)
        h.check()
        h.undo_extend(record, before)
        h.extend(record, 5)


def confirm(h: Host, record: LeaseRecord) -> None:
    with suppress(UsageError):
        h.cache.block_ids(record, group=0)
        h.confirm(record, min(record.capacity_tokens[0], record.keys.num_tokens))


def evict(h: Host, record: LeaseRecord) -> None:
    h.make_room(CPU)
    h.make_room(GPU)


EVENTS: Final[list[Event]] = [
    release,
    finish,
    reset_both,
    reset_gpu,
    reset_cpu,
    join,
    copies_end,
    copies_fail,
    a_copy_is_lost,
    the_pool_fills,
    extend,
    confirm,
    evict,
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_any_event_between_any_two_slices(step: Step, event: Event) -> None:
    for slices in range(0, 12, 2):
        h = Host(GEOMETRY, gpu_blocks=48, cpu_blocks=40, slice_blocks=3)
        record = step(h)
        for _ in range(slices):
            h.cache.run_slice()
            h.settle()
        event(h, record)
        h.check()
        had_work = h.cache.has_work
        h.run_slices()
        h.check()
        h.end_all()
        h.check()
        h.tear_down()
        if not had_work:
            return


@pytest.mark.parametrize("second", EVENTS, ids=lambda event: event.__name__)
@pytest.mark.parametrize("first", EVENTS, ids=lambda event: event.__name__)
def test_any_two_events_while_a_shared_load_runs(first: Event, second: Event) -> None:
    h = Host(GEOMETRY, gpu_blocks=48, cpu_blocks=40, slice_blocks=3)
    record = loading(h)
    joiner = h.acquire(2, TOKENS)
    first(h, record)
    h.check()
    h.cache.run_slice()
    second(h, joiner if isinstance(joiner, LeaseRecord) else record)
    h.check()
    h.end_all()
    h.check()
    h.tear_down()
