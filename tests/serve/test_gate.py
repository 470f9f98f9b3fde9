"""The gate: places are taken all or none, given back once, and whoever waits for its end is told."""

from __future__ import annotations

import asyncio

import pytest

from aiokv_engine.server.errors import ApiError
from aiokv_engine.server.gate import Gate


def test_all_prompts_of_a_request_get_a_place_or_none_does() -> None:
    gate = Gate(max_queue=3)
    gate.take_seats(2)
    with pytest.raises(ApiError) as refused:
        gate.take_seats(2)
    assert refused.value.status == 429
    assert (gate.queued, gate.running) == (2, 0)
    gate.take_seats(1)
    assert gate.queued == 3


def test_a_seat_that_runs_is_not_in_the_queue_any_more() -> None:
    gate = Gate(max_queue=1)
    (seat,) = gate.take_seats(1)
    seat.start()
    assert (gate.queued, gate.running) == (0, 1)
    gate.take_seats(1)
    assert (gate.queued, gate.running) == (1, 1)


@pytest.mark.parametrize("starts", [False, True])
def test_a_seat_is_given_back_once(*, starts: bool) -> None:
    gate = Gate(max_queue=1)
    (seat,) = gate.take_seats(1)
    if starts:
        seat.start()
    seat.leave()
    seat.leave()
    seat.start()
    assert (gate.queued, gate.running) == (0, 0)
    assert gate.is_idle


def test_a_closed_gate_lets_nobody_in_and_keeps_who_is_in() -> None:
    gate = Gate(max_queue=5)
    (seat,) = gate.take_seats(1)
    gate.close()
    with pytest.raises(ApiError) as refused:
        gate.take_seats(1)
    assert refused.value.status == 503
    assert gate.queued == 1
    seat.leave()
    assert gate.is_idle


async def test_who_waits_for_an_idle_gate_is_told_when_the_last_has_left() -> None:
    gate = Gate(max_queue=5)
    first, second = gate.take_seats(2)
    waiting = [asyncio.create_task(gate.wait_idle()) for _ in range(2)]
    gone = asyncio.create_task(gate.wait_idle())
    await asyncio.sleep(0)
    gone.cancel()
    first.leave()
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    with gate.answering(lambda: None):
        second.leave()
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
    await asyncio.gather(*waiting)
    await gate.wait_idle()


def test_cutting_off_ends_every_request_that_is_being_answered() -> None:
    gate = Gate(max_queue=5)
    ended: list[str] = []
    with gate.answering(lambda: ended.append("first")):
        with gate.answering(lambda: ended.append("gone")):
            pass
        assert gate.cut_off() == 1
    assert gate.cut_off() == 0
    assert ended == ["first"]


def test_closing_ends_every_request_that_is_still_coming_and_none_that_is_answered() -> None:
    gate = Gate(max_queue=5)
    ended: list[str] = []
    with gate.reading(lambda: ended.append("coming")), gate.answering(lambda: ended.append("answered")):
        with gate.reading(lambda: ended.append("gone")):
            assert not gate.is_idle
        gate.close()
        assert ended == ["coming"]
        assert gate.cut_off() == 1
    assert ended == ["coming", "answered"]
    assert gate.is_idle
