"""Law 4: whatever a request waits for and however it is ended, at every suspension, nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from itertools import count
from typing import Any, Final

import pytest

from tests.cancellation.scenarios import SCENARIOS, Scenario, World
from tests.cancellation.ways import WAYS, Suspensions, Way
from tests.runtime.support import Case, assert_all_given_back, opened, turns

Entry = Callable[[Case, list[int]], Coroutine[Any, Any, object]]


async def acquire(case: Case, token_ids: list[int]) -> None:
    lease = await case.kv.acquire("request", token_ids)
    lease.release()


async def acquire_as_context_manager(case: Case, token_ids: list[int]) -> None:
    """Confirms, so that stores are in flight when the body is cancelled."""
    async with case.kv.acquire("request", token_ids) as lease:
        case.compute(lease)
        lease.confirm(lease.num_tokens)
        await turns(2)


async def acquire_under_its_own_timeout(case: Case, token_ids: list[int]) -> None:
    lease = await case.kv.acquire("request", token_ids, timeout=3600.0)
    lease.finish()


async def admit(case: Case, token_ids: list[int]) -> None:
    lease = await case.kv.admit("request", token_ids)
    lease.release()


async def admit_then_ready(case: Case, token_ids: list[int]) -> None:
    lease = await case.kv.admit("request", token_ids)
    try:
        await lease.ready()
    finally:
        lease.release()


SOME_WAYS: Final = ("by_task_cancel", "by_anyio_scope", "by_asyncio_timeout")
ENTRIES: Final[Mapping[Entry, Iterable[str]]] = {
    acquire_as_context_manager: WAYS,
    admit_then_ready: (*SOME_WAYS, "by_task_cancel_twice"),
    acquire: SOME_WAYS,
    acquire_under_its_own_timeout: SOME_WAYS,
    admit: SOME_WAYS,
}


async def struck_at(scenario: Scenario, *, entry: Entry, way: Way, at: int) -> bool:
    """Run the scenario in a runtime of its own and cancel at one suspension; whether that was reached."""
    async with opened(gpu_blocks=scenario.gpu_blocks) as case:
        arranged = scenario.arrange(case)
        run = Suspensions(entry(case, arranged.token_ids), at=at)
        world = World(arranged.moves)
        world.start()
        await asyncio.wait_for(way(run), 30.0)
        await turns(3 * len(arranged.moves))
        world.stop()
        case.backend.complete_all()
        await arranged.leave()
        await assert_all_given_back(case)
    return run.struck


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
@pytest.mark.parametrize(
    ("entry", "way"),
    [pytest.param(entry, WAYS[way], id=f"{entry.__name__}-{way}") for entry, ways in ENTRIES.items() for way in ways],
)
async def test_a_request_cancelled_at_any_suspension_leaves_nothing_behind(
    entry: Entry, scenario: Scenario, way: Way
) -> None:
    asyncio.get_running_loop().set_debug(False)
    for at in count(1):
        if not await struck_at(scenario, entry=entry, way=way, at=at):
            break
    assert entry is admit or at > scenario.suspensions
