"""What a request may be waiting for when it is cancelled, and how the world around it goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

from aiokv import Lease
from aiokv.testing import make_resident
from tests.runtime.support import BLOCK, GROUP, Case, granted, prompt

__all__ = ["SCENARIOS", "Arranged", "Scenario", "World"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """A prompt to ask for, the moves of the world that let it go on, and what others hold or wait for."""

    token_ids: list[int]
    moves: tuple[Callable[[], object], ...] = ()
    others: list[Lease] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    async def leave(self) -> None:
        """Everybody else gives back; who was left waiting must have been served."""
        for lease in self.others:
            lease.release()
        for task in self.tasks:
            await task


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`suspensions` is how often the request is suspended at least: a sweep that finds fewer has tried nothing."""

    arrange: Callable[[Case], Arranged]
    suspensions: int
    gpu_blocks: int = 9


@final
class World:
    """Makes one move every third turn of the loop, whatever the tasks do."""

    def __init__(self, moves: tuple[Callable[[], object], ...]) -> None:
        self._moves = list(moves)
        self._turn = 0
        self._handle: asyncio.Handle | None = None

    def start(self) -> None:
        self._handle = asyncio.get_running_loop().call_soon(self._next_turn)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _next_turn(self) -> None:
        self._turn += 1
        if self._turn % 3 == 0 and self._moves:
            self._moves.pop(0)()
        self.start()


def hold(case: Case, *, blocks: int, seed: int = 900) -> Lease:
    """Somebody else's lease of so many blocks."""
    lease = case.kv.try_acquire(f"other {seed}", prompt(blocks, seed=seed, extra=0))
    assert isinstance(lease, Lease)
    return lease


def nothing_to_wait_for(case: Case) -> Arranged:
    return Arranged(token_ids=prompt(3))


def a_long_prompt(case: Case) -> Arranged:
    """Hashed in slices of 8,192 tokens."""
    return Arranged(token_ids=prompt(1200))


def a_full_pool(case: Case) -> Arranged:
    other = hold(case, blocks=8)
    return Arranged(token_ids=prompt(3), moves=(other.release,), others=[other])


def a_full_pool_and_somebody_behind(case: Case) -> Arranged:
    """Both fit in turn only, so the one behind must be served whether the first is granted, cancelled or both."""
    other = hold(case, blocks=8)
    tasks: list[asyncio.Task[Any]] = []

    async def behind() -> None:
        async with case.kv.acquire("behind", prompt(7, seed=901)):
            pass

    def queue() -> None:
        tasks.append(asyncio.create_task(behind()))

    return Arranged(token_ids=prompt(6), moves=(queue, other.release), others=[other], tasks=tasks)


def loads(case: Case) -> Arranged:
    token_ids = prompt(4)
    make_resident(case.kv, token_ids, {GROUP: "gcgc"})
    return Arranged(token_ids=token_ids, moves=(case.backend.complete,))


def a_full_pool_then_loads(case: Case) -> Arranged:
    token_ids = prompt(4)
    make_resident(case.kv, token_ids, {GROUP: "cccc"})
    other = hold(case, blocks=8)
    return Arranged(token_ids=token_ids, moves=(other.release, case.backend.complete), others=[other])


def the_loads_of_another(case: Case) -> Arranged:
    """Joins a copy that somebody else's lease has started."""
    token_ids = prompt(3)
    make_resident(case.kv, token_ids, {GROUP: "ccc"})
    other = case.kv.try_acquire("other", token_ids)
    assert isinstance(other, Lease)
    return Arranged(token_ids=token_ids, moves=(case.backend.complete,), others=[other])


def the_loads_of_another_who_leaves(case: Case) -> Arranged:
    arranged = the_loads_of_another(case)
    return Arranged(token_ids=arranged.token_ids, moves=(arranged.others[0].release, case.backend.complete))


def loads_of_two_copies_of_which_one_fails(case: Case) -> Arranged:
    """Joins the copy of blocks 0 and 1, loads block 2 itself; its own copy fails, so it is planned again."""
    token_ids = prompt(3)
    make_resident(case.kv, token_ids, {GROUP: "ccc"})
    other = case.kv.try_acquire("other", token_ids[: 2 * BLOCK + 1])
    assert isinstance(other, Lease)
    moves = (lambda: case.backend.complete(1), lambda: case.backend.fail(1))
    return Arranged(token_ids=token_ids, moves=moves, others=[other])


def room_after_a_failed_load(case: Case) -> Arranged:
    """Somebody joins the load; it fails; both need slots of their own now, and there are enough for one of them."""
    token_ids = prompt(3, extra=0)
    make_resident(case.kv, token_ids, {GROUP: "cc-"})
    others = [hold(case, blocks=4)]

    def join() -> None:
        joined = case.kv.try_acquire("other", token_ids)
        assert isinstance(joined, Lease)
        others.append(joined)

    return Arranged(token_ids=token_ids, moves=(join, case.backend.fail, others[0].release), others=others)


def loads_across_a_reset(case: Case) -> Arranged:
    """Of an older epoch when the copy ends: it serves the request and registers nothing (invariant 4)."""
    token_ids = prompt(3)
    make_resident(case.kv, token_ids, {GROUP: "ccc"})
    tasks: list[asyncio.Task[Any]] = []

    def reset() -> None:
        tasks.append(asyncio.create_task(case.kv.reset()))

    return Arranged(token_ids=token_ids, moves=(reset, case.backend.complete), tasks=tasks)


def the_line_behind_one_who_is_planned_again(case: Case) -> Arranged:
    """A lease with a failed load waits for room, before everybody who is not admitted yet."""
    token_ids = prompt(3, extra=0)
    make_resident(case.kv, token_ids, {GROUP: "cc-"})
    others = [granted(case.kv, token_ids, name=name) for name in ("first", "second")]
    others.append(hold(case, blocks=4))
    moves = (case.backend.fail, others[2].release, others[0].release)
    return Arranged(token_ids=prompt(2, seed=1), moves=moves, others=others)


SCENARIOS: Final[Mapping[str, Scenario]] = {
    scenario.arrange.__name__: scenario
    for scenario in (
        Scenario(arrange=nothing_to_wait_for, suspensions=0),
        Scenario(arrange=a_long_prompt, suspensions=2, gpu_blocks=1300),
        Scenario(arrange=a_full_pool, suspensions=1),
        Scenario(arrange=a_full_pool_and_somebody_behind, suspensions=1),
        Scenario(arrange=loads, suspensions=1),
        Scenario(arrange=a_full_pool_then_loads, suspensions=2),
        Scenario(arrange=the_loads_of_another, suspensions=1),
        Scenario(arrange=the_loads_of_another_who_leaves, suspensions=1),
        Scenario(arrange=loads_of_two_copies_of_which_one_fails, suspensions=1),
        Scenario(arrange=room_after_a_failed_load, suspensions=1),
        Scenario(arrange=loads_across_a_reset, suspensions=1),
        Scenario(arrange=the_line_behind_one_who_is_planned_again, suspensions=1),
    )
}
