"""The threads in which answers are made: a few, however many ask, leave and are cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from aiokv_asgi.answers import Workers, encode_json
from tests.asgi.support import reached
from tests.runtime.support import turns


class Slow:
    """An answer that takes until it may end; counts those that are being made."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.has_begun = threading.Event()
        self.keeps_all_busy = threading.Event()
        self.begun = 0
        self._lock = threading.Lock()

    def make(self) -> str:
        with self._lock:
            self.begun += 1
            if self.begun == 4:
                self.keeps_all_busy.set()
        self.has_begun.set()
        assert self.may_end.wait(20.0)
        return "made"


async def test_those_who_leave_take_no_more_threads_than_those_who_stay() -> None:
    workers, slow = Workers(), Slow()
    for _ in range(12):
        asking = asyncio.ensure_future(workers.run(slow.make))
        await reached(slow.has_begun)
        await turns(3)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
    staying = asyncio.ensure_future(workers.run(slow.make))
    await turns(3)
    begun = slow.begun
    slow.may_end.set()
    assert begun <= 4
    assert await staying == "made"


async def test_who_leaves_before_its_turn_is_not_served() -> None:
    workers, slow = Workers(), Slow()
    served: list[int] = []

    def serve(number: int) -> Callable[[], None]:
        return lambda: served.append(number)

    busy = [asyncio.ensure_future(workers.run(slow.make)) for _ in range(4)]
    await reached(slow.keeps_all_busy)
    late = [asyncio.ensure_future(workers.run(serve(number))) for number in range(3)]
    await turns(3)
    late[1].cancel()
    await turns(3)
    slow.may_end.set()
    await asyncio.gather(*busy, *late, return_exceptions=True)
    assert sorted(served) == [0, 2]


async def test_what_an_answer_raises_reaches_who_asked() -> None:
    with pytest.raises(ZeroDivisionError):
        await Workers().run(lambda: 1 // 0)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_json_has_no_number_for_is_no_answer(number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_json({"number": number})
