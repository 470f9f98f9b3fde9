"""The bridge between device events and the loop: what it asks, when, and when it is silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import final

import pytest
import pytest_asyncio

from aiokv.backends.base import EventStatus, WakeMode
from aiokv.model.ids import Direction
from aiokv.observe.stats import Polls, Stats
from aiokv.runtime import bridge as bridge_module
from aiokv.runtime.bridge import TICK_BLOCKS, TICK_COMPLETIONS, Bridge, Watched
from tests.runtime.support import turns, until

IDLE_S = 0.05
"""How long a test listens to silence: many times the longest step of the bridge."""


@final
class ScriptedEvent:
    """A device event that counts how often it is asked."""

    def __init__(self, status: EventStatus = EventStatus.PENDING) -> None:
        self.status = status
        self.queries = 0

    def query(self) -> EventStatus:
        self.queries += 1
        return self.status

    def detail(self) -> str:
        return "scripted" if self.status in (EventStatus.FAILED, EventStatus.LOST) else ""

    def corrupt_copies(self) -> tuple[int, ...]:
        return ()


@final
class Scene:
    """A bridge, its counts, and what it has told."""

    def __init__(self, wake_mode: WakeMode = WakeMode.POLL) -> None:
        self.stats = Stats()
        self.bridge = Bridge(asyncio.get_running_loop(), wake_mode=wake_mode, stats=self.stats)
        self.ended: list[tuple[ScriptedEvent, EventStatus, str]] = []

    def watch(
        self,
        event: ScriptedEvent | None = None,
        *,
        direction: Direction = Direction.LOAD,
        expected_s: float = 0.0,
        num_blocks: int = 1,
    ) -> ScriptedEvent:
        watched = event or ScriptedEvent()
        self.bridge.watch(
            direction,
            Watched(
                event=watched,
                expected_s=lambda: expected_s,
                on_end=lambda status, detail: self.ended.append((watched, status, detail)),
                num_blocks=num_blocks,
            ),
        )
        return watched

    @property
    def ticks(self) -> int:
        return sum(self.stats.polls.values())


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    made.bridge.close()


async def silence() -> None:
    """Let some time pass, however the loop sees to it."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.call_later(IDLE_S, over.set_result, None)
    await over


# What is asked.


@pytest.mark.parametrize("in_flight", [1, 10_000])
async def test_only_the_head_of_each_stream_is_asked_however_many_are_in_flight(in_flight: int) -> None:
    asyncio.get_running_loop().set_debug(False)
    scene = Scene()
    heads = [scene.watch(direction=direction) for direction in Direction]
    others = [scene.watch(direction=direction) for direction in Direction for _ in range(in_flight - 1)]
    await until_ticks(scene, 20)
    assert [head.queries for head in heads] == [scene.ticks] * len(Direction)
    assert not any(event.queries for event in others)
    assert scene.bridge.in_flight == 2 * in_flight
    scene.bridge.close()


async def until_ticks(scene: Scene, count: int) -> None:
    """Wait for so many looks; each is a real, short, time away."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + 10.0
    while scene.ticks < count:
        assert loop.time() < give_up
        await asyncio.sleep(0)


async def test_a_turn_ends_no_more_than_one_copy_that_failed() -> None:
    """Law 8: whoever waited for it plans again."""
    scene = Scene(WakeMode.DOORBELL)
    fates = [EventStatus.FAILED, EventStatus.DONE, EventStatus.FAILED, EventStatus.FAILED, EventStatus.DONE]
    for status in fates:
        scene.watch(ScriptedEvent(status))
    scene.bridge.ring()
    seen = []
    while len(scene.ended) < len(fates):
        before = len(scene.ended)
        await turns()
        seen.append(len(scene.ended) - before)
    assert [count for count in seen if count] == [1, 2, 1, 1]
    scene.bridge.close()


async def test_a_head_that_was_pending_for_thousands_of_looks_is_still_seen_to_end(scene: Scene) -> None:
    event = scene.watch()
    for _ in range(3000):
        scene.bridge.ring()
        await turns()
    event.status = EventStatus.DONE
    await silence()  # nobody rings any more: the timer must have been set again
    assert scene.ended == [(event, EventStatus.DONE, "")]


async def test_the_next_head_is_asked_when_the_first_has_ended(scene: Scene) -> None:
    first, second = scene.watch(), scene.watch()
    await until_ticks(scene, 3)
    first.status = EventStatus.DONE
    await until(lambda: len(scene.ended) == 1)
    assert scene.ended == [(first, EventStatus.DONE, "")]
    second.status = EventStatus.DONE
    await until_told(scene, 2)
    assert scene.ended[1][0] is second


async def until_told(scene: Scene, count: int) -> None:
    loop = asyncio.get_running_loop()
    give_up = loop.time() + 10.0
    while len(scene.ended) < count:
        assert loop.time() < give_up
        await asyncio.sleep(0)


async def test_ends_are_told_in_the_order_of_the_stream_with_status_and_detail(scene: Scene) -> None:
    events = [
        scene.watch(ScriptedEvent(status))
        for status in (EventStatus.DONE, EventStatus.FAILED, EventStatus.DONE, EventStatus.LOST)
    ]
    await until_told(scene, 4)
    assert [event for event, _, _ in scene.ended] == events
    assert [detail for _, _, detail in scene.ended] == ["", "scripted", "", "scripted"]


async def test_nothing_is_told_inside_watch(scene: Scene) -> None:
    scene.watch(ScriptedEvent(EventStatus.DONE))
    assert scene.ended == []
    await until_told(scene, 1)


async def test_a_tick_ends_a_bounded_number_and_lets_the_loop_turn(scene: Scene) -> None:
    """Law 8."""
    per_turn: list[int] = []
    count = 10 * TICK_COMPLETIONS + 1
    for _ in range(count):
        scene.watch(ScriptedEvent(EventStatus.DONE))
    while len(scene.ended) < count:
        before = len(scene.ended)
        await asyncio.sleep(0)
        per_turn.append(len(scene.ended) - before)
    assert max(per_turn) <= TICK_COMPLETIONS


@pytest.mark.parametrize(
    ("num_blocks", "at_once"), [(TICK_BLOCKS // 2, 1), (TICK_BLOCKS // 4, 2), (100 * TICK_BLOCKS, 1)]
)
async def test_a_tick_ends_fewer_batches_of_many_blocks(scene: Scene, num_blocks: int, at_once: int) -> None:
    """Law 8: what the end of a batch costs grows with its blocks; one is ended whatever it costs."""
    for _ in range(6):
        scene.watch(ScriptedEvent(EventStatus.DONE), num_blocks=num_blocks)
    per_turn: list[int] = []
    while len(scene.ended) < 6:
        before = len(scene.ended)
        await asyncio.sleep(0)
        per_turn.append(len(scene.ended) - before)
    assert max(per_turn) == at_once


async def test_a_slow_copy_of_one_stream_does_not_put_off_the_other() -> None:
    """The later look that the store would need replaces no earlier one: seen long before it, at least once in a few."""
    assert any([await a_load_is_seen_before_the_store_is_expected() for _ in range(5)])


async def a_load_is_seen_before_the_store_is_expected() -> bool:
    scene = Scene()
    loop = asyncio.get_running_loop()
    load = scene.watch(direction=Direction.LOAD, expected_s=0.0)
    scene.watch(direction=Direction.STORE, expected_s=3600.0)
    load.status = EventStatus.DONE
    in_time = loop.create_future()
    loop.call_later(0.02, in_time.set_result, None)
    await in_time
    scene.bridge.close()
    return [event for event, _, _ in scene.ended] == [load]


async def test_a_copy_that_ends_long_before_it_was_expected_is_noticed(scene: Scene) -> None:
    scene.watch(ScriptedEvent(EventStatus.DONE), expected_s=3600.0)
    await until_told(scene, 1)


async def test_an_end_that_is_followed_by_a_new_copy_does_not_stop_the_polling(scene: Scene) -> None:
    loop = asyncio.get_running_loop()
    chain: list[int] = []

    def start_another(status: EventStatus, detail: str) -> None:
        chain.append(len(chain))
        if len(chain) < 50:
            watched = Watched(event=ScriptedEvent(EventStatus.DONE), expected_s=lambda: 0.0, on_end=start_another)
            scene.bridge.watch(Direction.STORE, watched)

    start_another(EventStatus.DONE, "")
    give_up = loop.time() + 10.0
    while len(chain) < 50:
        assert loop.time() < give_up
        await asyncio.sleep(0)


# When it is silent.


async def test_nothing_wakes_the_loop_when_nothing_is_in_flight(scene: Scene) -> None:
    await silence()
    assert scene.ticks == 0
    event = scene.watch(ScriptedEvent(EventStatus.DONE))
    await until_told(scene, 1)
    ticks, queries = scene.ticks, event.queries
    await silence()
    assert (scene.ticks, event.queries) == (ticks, queries)


async def test_waiting_costs_few_looks(scene: Scene) -> None:
    """The steps grow: far fewer looks than a fixed step of the first length would take."""
    loop = asyncio.get_running_loop()
    scene.watch()
    start = loop.time()
    await silence()
    await until_ticks(scene, 5)
    assert scene.ticks <= 0.5 * (loop.time() - start) / 100e-6
    assert scene.stats.polls[Polls.PROGRESS] == 0


async def test_a_paused_bridge_asks_nothing_and_looks_at_once_when_it_goes_on(scene: Scene) -> None:
    event = scene.watch()
    await until_ticks(scene, 2)
    scene.bridge.pause()
    queries = event.queries
    event.status = EventStatus.DONE
    scene.bridge.ring()
    scene.watch()
    await silence()
    assert (event.queries, scene.ended) == (queries, [])
    scene.bridge.resume()
    await turns(2)
    assert len(scene.ended) == 1


async def test_a_closed_bridge_asks_nothing_whoever_rings(scene: Scene) -> None:
    event = scene.watch()
    await until_ticks(scene, 2)
    scene.bridge.close()
    scene.bridge.close()
    queries = event.queries
    event.status = EventStatus.DONE
    scene.bridge.ring()
    await silence()
    assert event.queries == queries
    assert scene.bridge.poll(), "who closes may still look without the loop"
    assert [ended for ended, _, _ in scene.ended] == [event]


# The doorbell.


async def test_a_backend_that_rings_is_not_polled() -> None:
    scene = Scene(WakeMode.DOORBELL)
    event = scene.watch()
    await silence()
    assert event.queries == 0
    scene.bridge.ring()
    scene.bridge.ring()
    assert event.queries == 0, "not inside the call"
    await turns(2)
    assert event.queries == 1, "once for any number of rings"
    event.status = EventStatus.DONE
    scene.bridge.ring()
    await turns(2)
    assert [ended for ended, _, _ in scene.ended] == [event]
    scene.bridge.close()


async def test_one_ring_ends_everything_that_is_done() -> None:
    scene = Scene(WakeMode.DOORBELL)
    for _ in range(3 * TICK_COMPLETIONS):
        scene.watch(ScriptedEvent(EventStatus.DONE))
    scene.bridge.ring()
    await until(lambda: len(scene.ended) == 3 * TICK_COMPLETIONS)
    scene.bridge.close()


# Busy streams.


@final
class ManualTimer:
    """A timer that goes off when the test says so."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.delay_s = 0.0

    def set(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def cancel(self) -> None:
        self.delay_s = 0.0

    def close(self) -> None:
        self.delay_s = 0.0


@final
class TimedEvent:
    """A copy that ends at a time of the test's clock."""

    def __init__(self, clock: list[float], *, done_at: float) -> None:
        self.clock = clock
        self.done_at = done_at

    def query(self) -> EventStatus:
        return EventStatus.DONE if self.clock[0] >= self.done_at else EventStatus.PENDING

    def detail(self) -> str:
        return ""

    def corrupt_copies(self) -> tuple[int, ...]:
        return ()


COPY_S, LATE_S, COPIES = 2e-3, 0.3e-3, 100


@pytest.mark.parametrize("wrong_by", [(1.0, 1.0), (0.95, 0.95), (0.95, 1.05)], ids=["exact", "too_short", "noisy"])
async def test_the_looks_of_a_busy_stream_do_not_come_later_and_later(
    wrong_by: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is always a little late; the next copy has begun all the same, when the one before it had ended."""
    clock, seen_after = [0.0], []
    timers: list[ManualTimer] = []

    def make_timer(_loop: object, callback: Callable[[], None]) -> ManualTimer:
        timers.append(ManualTimer(callback))
        return timers[0]

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(bridge_module, "make_timer", make_timer)
    bridge = Bridge(asyncio.get_running_loop(), wake_mode=WakeMode.POLL, stats=Stats())
    for place in range(COPIES):
        event = TimedEvent(clock, done_at=(place + 1) * COPY_S)

        def on_end(_status: EventStatus, _detail: str, *, done_at: float = event.done_at) -> None:
            seen_after.append(clock[0] - done_at)

        expected_s = COPY_S * wrong_by[place % 2]
        watched = Watched(event=event, expected_s=partial(float, expected_s), on_end=on_end)
        bridge.watch(Direction.LOAD, watched)
    while bridge.in_flight:
        clock[0] += timers[0].delay_s + LATE_S
        timers[0].callback()
    assert len(seen_after) == COPIES
    assert max(seen_after) <= COPY_S
    assert sum(seen_after) / COPIES <= 4 * LATE_S


async def test_how_long_a_copy_takes_is_asked_when_it_begins_not_when_it_is_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind the first copy, whose time nobody knew, the others are looked for when they are due, and not before."""
    clock, known_s, looks = [0.0], [0.0], [0]
    timers: list[ManualTimer] = []

    def make_timer(_loop: object, callback: Callable[[], None]) -> ManualTimer:
        timers.append(ManualTimer(callback))
        return timers[0]

    def learn(_status: EventStatus, _detail: str) -> None:
        known_s[0], looks[0] = COPY_S, 0

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(bridge_module, "make_timer", make_timer)
    bridge = Bridge(asyncio.get_running_loop(), wake_mode=WakeMode.POLL, stats=Stats())
    for place in range(3):
        event = TimedEvent(clock, done_at=(place + 1) * COPY_S)
        bridge.watch(Direction.LOAD, Watched(event=event, expected_s=lambda: known_s[0], on_end=learn))
    seen = []
    while bridge.in_flight:
        before = bridge.in_flight
        clock[0] += timers[0].delay_s
        timers[0].callback()
        looks[0] += 1
        if bridge.in_flight < before:
            seen.append(looks[0])
    assert len(seen) == 3
    assert seen[2] == 1, "the third one is asked once"
