"""One timer for all leases: set only while some lease may become overdue, late by no more than a turn, quiet else."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from aiokv.core.cache import CacheState
from aiokv.core.lease_table import AcquireRequest, LeaseRecord
from aiokv.model.keys import BlockKeys
from aiokv.observe.stats import Stats
from aiokv.runtime.lease_clock import LeaseClock
from tests.runtime.support import BLOCK, GEOMETRY, prompt

LIMIT_S = 10.0


class Scene:
    """A cache and its clock, whose time the test tells; it is the one timer too."""

    def __init__(self, *, limit_s: float | None = LIMIT_S, blocks: int = 4096) -> None:
        self.now = 100.0
        self.fired = 0
        self.alarm: float | None = None
        self.core = CacheState(GEOMETRY, gpu_blocks=blocks)
        self.stats = Stats()
        self.clock = LeaseClock(
            self.core, stats=self.stats, age_limit_s=limit_s, make_timer=self._make_timer, clock=lambda: self.now
        )

    def _make_timer(self, callback: Callable[[], None]) -> Scene:
        self._callback = callback
        return self

    def set(self, delay_s: float) -> None:
        self.alarm = self.now + delay_s

    def cancel(self) -> None:
        self.alarm = None

    def close(self) -> None:
        self.cancel()

    def alarms(self) -> list[float]:
        return [] if self.alarm is None else [self.alarm]

    def turn_until(self, now: float) -> None:
        while self.alarm is not None and self.alarm <= now:
            self.now = max(self.now, self.alarm)
            self.alarm = None
            self.fired += 1
            self._callback()
        self.now = now

    def open(self, name: str = "request") -> LeaseRecord:
        keys = BlockKeys(prompt(1), hash_block_size=BLOCK)
        record = self.core.try_acquire(AcquireRequest(request_id=name, keys=keys, prompt_tokens=BLOCK))
        assert isinstance(record, LeaseRecord)
        self.clock.opened(record)
        return record

    def end(self, record: LeaseRecord) -> None:
        self.clock.closed(record)
        self.core.release(record)


def test_a_lease_becomes_overdue_at_its_limit_and_not_before() -> None:
    scene = Scene()
    record = scene.open()
    assert record.opened_at == 100.0
    scene.turn_until(109.9)
    assert (scene.fired, scene.stats.overdue_leases) == (0, 0)
    scene.turn_until(110.0)
    assert (scene.fired, scene.stats.overdue_leases) == (1, 1)
    assert scene.alarms() == [], "nobody else can become overdue"


def test_nothing_is_waked_when_nothing_is_held() -> None:
    """Design, budgets: no wake-ups when idle."""
    scene = Scene()
    records = [scene.open() for _ in range(3)]
    assert scene.alarms() == [110.0]
    for record in records:
        scene.end(record)
    assert scene.alarms() == []
    scene.end(scene.open())
    assert scene.alarms() == []


def test_many_short_leases_wake_the_loop_once_in_the_time_of_the_limit() -> None:
    scene = Scene()
    held = [scene.open()]
    for _ in range(1000):
        scene.turn_until(scene.now + 0.1)
        held.append(scene.open())
        scene.end(held.pop(0))
    assert scene.fired <= 100.0 / LIMIT_S + 1
    assert scene.stats.overdue_leases == 0


def test_without_a_limit_there_is_no_timer() -> None:
    scene = Scene(limit_s=None)
    record = scene.open()
    assert scene.alarms() == []
    assert scene.clock.read().lease_age_limit is None
    scene.end(record)


def test_each_lease_is_in_one_line_of_the_log_and_lines_are_rare(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="aiokv")
    scene = Scene()
    first = scene.open("first")
    scene.turn_until(110.0)
    for number in range(5):
        scene.turn_until(111.0 + number)
        scene.open(f"later {number}")
    scene.turn_until(126.0)
    assert scene.stats.overdue_leases == 6
    assert [record.getMessage() for record in caplog.records] == [
        "1 leases have become older than 10 s; the oldest one, of request 'first', is held for 10.0 s"
    ]
    scene.end(first)
    scene.turn_until(200.0)
    assert [record.getMessage() for record in caplog.records][1:] == [
        "5 leases have become older than 10 s; the oldest one, of request 'later 0', is held for 59.0 s"
    ]
    assert scene.alarms() == []


def test_so_many_at_once_are_declared_overdue_in_more_than_one_turn() -> None:
    """Law 8."""
    scene = Scene()
    for _ in range(3000):
        scene.open()
    scene.turn_until(110.0)
    assert scene.fired == 3
    assert scene.stats.overdue_leases == 3000


def test_a_closed_lease_is_timed_once() -> None:
    scene = Scene()
    record = scene.open()
    scene.turn_until(120.0)
    scene.end(record)
    scene.clock.closed(record)
    assert scene.stats.overdue_leases == 0
    assert sum(scene.stats.lease_seconds.counts) == 1
    assert scene.stats.lease_seconds.total == 20.0
