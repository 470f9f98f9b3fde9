"""Short timers, and the descriptors behind them."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable

import numpy as np
import pytest
import uvloop

from aiokv import KVRuntime
from aiokv.runtime.timers import LoopTimer, Timer, TimerFd, make_timer
from tests.runtime.support import GROUP, config_of, granted, prompt, turns

MakeTimer = Callable[[asyncio.AbstractEventLoop, Callable[[], None]], Timer]

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="timerfd and /proc are Linux")
every_timer = pytest.mark.parametrize(
    "make", [pytest.param(TimerFd, marks=linux_only), LoopTimer], ids=["timerfd", "loop timer"]
)


async def ringing(make: MakeTimer) -> tuple[Timer, list[float]]:
    loop = asyncio.get_running_loop()
    rung: list[float] = []
    return make(loop, lambda: rung.append(loop.time())), rung


async def passed(delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.call_later(delay_s, over.set_result, None)
    await over


@every_timer
async def test_a_timer_rings_once(make: MakeTimer) -> None:
    timer, rung = await ringing(make)
    timer.set(50e-6)
    await passed(0.02)
    assert len(rung) == 1
    timer.set(0.0)
    await passed(0.02)
    assert len(rung) == 2
    timer.close()


@every_timer
async def test_setting_it_again_replaces_the_alarm(make: MakeTimer) -> None:
    timer, rung = await ringing(make)
    for _ in range(5):
        timer.set(0.001)
    timer.set(3600.0)
    await passed(0.02)
    assert rung == []
    timer.set(0.001)
    await passed(0.02)
    assert len(rung) == 1
    timer.close()


@every_timer
async def test_a_cancelled_or_closed_timer_does_not_ring(make: MakeTimer) -> None:
    timer, rung = await ringing(make)
    timer.set(0.001)
    timer.cancel()
    timer.cancel()
    await passed(0.02)
    timer.set(0.001)
    timer.close()
    timer.close()
    await passed(0.02)
    assert rung == []


@every_timer
async def test_an_alarm_that_is_set_again_by_its_own_ring_rings_again(make: MakeTimer) -> None:
    loop = asyncio.get_running_loop()
    rung: list[int] = []

    def ring() -> None:
        rung.append(len(rung))
        if len(rung) < 5:
            timer.set(10e-6)

    timer = make(loop, ring)
    timer.set(10e-6)
    await passed(0.05)
    assert rung == list(range(5))
    timer.close()


@linux_only
async def test_linux_gets_a_timerfd_and_others_the_timer_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    timer = make_timer(loop, lambda: None)
    assert isinstance(timer, TimerFd)
    timer.close()

    class NoTimerFd:
        def __init__(self, *args: object, **kwargs: object) -> None: ...

    monkeypatch.setattr("ctypes.CDLL", NoTimerFd)
    other = make_timer(loop, lambda: None)
    assert isinstance(other, LoopTimer)
    other.close()


# Descriptors.


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@linux_only
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("end", ["aclose", "close in a dead loop"])
def test_no_descriptor_is_left_behind(new_loop: Callable[[], asyncio.AbstractEventLoop], end: str) -> None:
    def once() -> None:
        kv = KVRuntime(config_of(backend="host"), arenas={GROUP: [np.zeros((9, 64), np.uint8)]})

        async def main() -> None:
            await kv.open()
            granted(kv, prompt(2)).finish()
            await turns(2)
            if end == "aclose":
                await kv.aclose()

        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(main())
        kv.close()

    once()
    before = open_descriptors()
    for _ in range(20):
        once()
    assert open_descriptors() <= before


@linux_only
async def test_a_descriptor_that_is_used_again_is_not_read_by_a_closed_timer() -> None:
    """Closed only after its reader is gone: the number may belong to somebody else at once."""
    loop = asyncio.get_running_loop()
    rung: list[int] = []
    for _ in range(50):
        timer = TimerFd(loop, lambda: rung.append(1))
        timer.set(1e-6)
        timer.close()
        reader, writer = os.pipe()
        os.write(writer, b"12345678")
        await turns(2)
        assert os.read(reader, 8) == b"12345678"
        os.close(reader)
        os.close(writer)
    assert rung == []
