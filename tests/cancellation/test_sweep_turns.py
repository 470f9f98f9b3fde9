"""Law 4: cancelled in any turn of the loop, right before or right after the world's move in that same turn.

So a request is also cancelled when it was granted, or its load has ended, and it has not been resumed since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from itertools import count
from typing import final

import anyio
import pytest

from tests.cancellation.scenarios import SCENARIOS, Arranged, Scenario
from tests.runtime.support import Case, assert_all_given_back, opened

MOVE_EVERY = 2


class Order(Enum):
    CANCEL_FIRST = "cancel first"
    MOVE_FIRST = "move first"


@final
class Asking:
    """A request in a task of its own, inside a scope of its own; released as soon as it is granted."""

    def __init__(self, case: Case, token_ids: list[int]) -> None:
        self._case = case
        self._token_ids = token_ids
        self.scope = anyio.CancelScope()
        self.task = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        with self.scope:
            lease = await self._case.kv.acquire("request", self._token_ids)
            lease.release()


def cancel_task(asking: Asking) -> None:
    asking.task.cancel()


def cancel_task_twice(asking: Asking) -> None:
    asking.task.cancel()
    asking.task.cancel()


def cancel_scope(asking: Asking) -> None:
    asking.scope.cancel()


async def pass_turns(arranged: Arranged, *, struck: int, order: Order, strike: Callable[[], None]) -> None:
    """Let the loop turn: the world makes one move every other turn, all of them; `strike` in the turn `struck`."""
    moves = list(arranged.moves)
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


@pytest.mark.parametrize("cancel", [cancel_task, cancel_task_twice, cancel_scope])
@pytest.mark.parametrize("order", Order, ids=lambda order: order.value)
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
async def test_a_request_cancelled_in_any_turn_leaves_nothing_behind(
    scenario: Scenario, order: Order, cancel: Callable[[Asking], None]
) -> None:
    asyncio.get_running_loop().set_debug(False)
    for turn in count():
        was_cancelled = False
        async with opened(gpu_blocks=scenario.gpu_blocks) as case:
            arranged = scenario.arrange(case)
            asking = Asking(case, arranged.token_ids)

            def strike(asking: Asking = asking) -> None:
                nonlocal was_cancelled
                was_cancelled = not asking.task.done()
                cancel(asking)

            await pass_turns(arranged, struck=turn, order=order, strike=strike)
            case.backend.complete_all()
            await asyncio.wait([asking.task])
            await arranged.leave()
            await assert_all_given_back(case)
        if not was_cancelled:
            break
    assert turn > MOVE_EVERY * len(arranged.moves)
