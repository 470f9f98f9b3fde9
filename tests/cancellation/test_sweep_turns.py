"""Law 4: cancelled in any turn of the loop, right before or right after the world's move in that same turn.

So a coroutine is also cancelled when it was granted, or its load has ended, and it has not been resumed since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from enum import Enum
from functools import partial
from itertools import count
from typing import Any, final

import anyio
import pytest

from tests.cancellation.scenarios import SCENARIOS, Scenario
from tests.cancellation.scenes import Move, Scene
from tests.cancellation.test_sweep_scenes import SCENES
from tests.runtime.support import Case, assert_all_given_back, opened

MOVE_EVERY = 2


class Order(Enum):
    CANCEL_FIRST = "cancel first"
    MOVE_FIRST = "move first"


@final
class Asking:
    """A coroutine in a task of its own, inside a scope of its own."""

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, object]]) -> None:
        self._begin = begin
        self._was_struck = False
        self.scope = anyio.CancelScope()
        self.task = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        with self.scope:
            await self._begin()

    def strike(self, cancel: Cancel) -> None:
        self._was_struck = not self.task.done()
        cancel(self)

    async def end(self) -> bool:
        """Wait for its end, which is no error; whether it was struck before."""
        await asyncio.wait_for(asyncio.wait([self.task]), 30.0)
        if not self.task.cancelled():
            self.task.result()
        return self._was_struck


Cancel = Callable[[Asking], object]


def cancel_task(asking: Asking) -> None:
    asking.task.cancel()


def cancel_task_twice(asking: Asking) -> None:
    asking.task.cancel()
    asking.task.cancel()


def cancel_scope(asking: Asking) -> None:
    asking.scope.cancel()


every_way = pytest.mark.parametrize("cancel", [cancel_task, cancel_task_twice, cancel_scope])
either_order = pytest.mark.parametrize("order", Order, ids=lambda order: order.value)


async def pass_turns(all_moves: tuple[Move, ...], *, struck: int, order: Order, strike: Callable[[], None]) -> None:
    """Let the loop turn: the world makes one move every other turn, all of them; `strike` in the turn `struck`."""
    moves = list(all_moves)
    for turn in count():
        if turn == struck and order is Order.CANCEL_FIRST:
            strike()
        if moves and turn % MOVE_EVERY == MOVE_EVERY - 1:
            moves.pop(0)()
        if turn == struck and order is Order.MOVE_FIRST:
            strike()
        if not moves and turn >= struck:
            return
        await asyncio.sleep(0)


@every_way
@either_order
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
async def test_a_request_cancelled_in_any_turn_leaves_nothing_behind(
    scenario: Scenario, order: Order, cancel: Cancel
) -> None:
    """Law 4, invariant 12."""
    asyncio.get_running_loop().set_debug(False)
    for turn in count():
        async with opened(gpu_blocks=scenario.gpu_blocks) as case:
            arranged = scenario.arrange(case)

            async def acquire(case: Case = case, token_ids: list[int] = arranged.token_ids) -> None:
                lease = await case.kv.acquire("request", token_ids)
                lease.release()

            asking = Asking(acquire)
            await pass_turns(arranged.moves, struck=turn, order=order, strike=partial(asking.strike, cancel))
            case.backend.complete_all()
            was_struck = await asking.end()
            await arranged.leave()
            await assert_all_given_back(case)
        if not was_struck:
            break
    assert turn > MOVE_EVERY * len(arranged.moves)


@every_way
@either_order
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
async def test_a_scene_cancelled_in_any_turn_leaves_nothing_behind(scene: Scene, order: Order, cancel: Cancel) -> None:
    """Laws 2 and 4, invariant 12. From the turn after the first step on: what never began cannot give back."""
    asyncio.get_running_loop().set_debug(False)
    for turn in count(1):
        async with scene.stage() as act:
            asking = Asking(act.begin)
            await pass_turns(act.moves, struck=turn, order=order, strike=partial(asking.strike, cancel))
            was_struck = await asking.end()
        if not was_struck:
            break
    assert turn > scene.suspensions
