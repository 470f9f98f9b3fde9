"""A scene: one public coroutine in one state of the world, to be cancelled at any moment.

A stage makes the state, yields what is done in it, and when that is over, however it ended, says what must hold: at
least invariant 12, and that whoever else was waiting has been served. `test_sweep_scenes.py` cancels every scene at
every suspension, `test_sweep_turns.py` in every turn; `test_sweep_is_complete.py` says which coroutine has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, final

from aiokv import KVRuntime, Outcome, Preempted
from aiokv.testing import FakeBackend
from tests.runtime.support import Case, assert_all_given_back, config_of, granted, plug_in

__all__ = [
    "Act",
    "Move",
    "Scene",
    "Scenes",
    "all_served",
    "answer",
    "assert_ranks_gave_back",
    "opened_with_a_remote_rank",
    "preempted_request",
]

Move = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """What is done on the stage, and the moves of the world that let it go on."""

    begin: Callable[[], Coroutine[Any, Any, object]]
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """`suspensions` is how often its act is suspended at least: a sweep that finds fewer has tried nothing."""

    stage: Callable[[], AbstractAsyncContextManager[Act]]
    suspensions: int


@final
class Scenes(dict[str, Scene]):
    """Scenes by name."""

    def add(self, *, suspensions: int) -> Callable[[Callable[[], AsyncIterator[Act]]], None]:
        """Decorates the generator that makes a stage."""

        def added(stage: Callable[[], AsyncIterator[Act]]) -> None:
            self[stage.__name__] = Scene(stage=asynccontextmanager(stage), suspensions=suspensions)

        return added


async def all_served(tasks: list[asyncio.Task[Any]]) -> None:
    """Nobody who was waiting beside the act is forgotten."""
    await asyncio.wait_for(asyncio.gather(*tasks), 10.0)


def preempted_request(case: Case, token_ids: list[int]) -> Preempted:
    """A request between two leases, of which nothing is cached."""
    return granted(case.kv, token_ids).preempt()


@asynccontextmanager
async def opened_with_a_remote_rank(*, gpu_blocks: int = 9) -> AsyncIterator[Case]:
    """Rank 0 is local, rank 1 remote, behind a fake link: see `answer` and `assert_ranks_gave_back`."""
    backend = FakeBackend()
    settings: dict[str, Any] = {
        "world_size": 2,
        "remote_ranks": (1,),
        "cpu_blocks": 16,
        "watermark": 0.0,
        "close_grace_s": 5.0,
    }
    plugged = plug_in(backend, gpu_blocks=gpu_blocks)
    settings |= {"backend": plugged.backend, "compute_stream": plugged.compute_stream}
    async with KVRuntime(config_of(gpu_blocks=gpu_blocks, **settings), arenas=plugged.arenas) as kv:
        try:
            yield Case(kv=kv, backend=backend)
        finally:
            backend.complete_all()


async def assert_ranks_gave_back(case: Case) -> None:
    """Invariant 12, once the remote rank has answered what it was not asked before."""
    answering = asyncio.create_task(_answer_all(case.kv))
    await assert_all_given_back(case)
    answering.cancel()
    await asyncio.wait([answering])
    assert answering.cancelled(), "whoever read before has left the place to the next reader"


def answer(kv: KVRuntime) -> None:
    """The remote rank makes every transfer that nobody has taken, and says so."""
    for transfer in kv.transfers().take():
        kv.report(transfer.transfer_id, 1, Outcome.OK)


async def _answer_all(kv: KVRuntime) -> None:
    async for transfer in kv.transfers():
        kv.report(transfer.transfer_id, 1, Outcome.OK)
