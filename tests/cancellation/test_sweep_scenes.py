"""Laws 2 and 4, invariant 12: every public coroutine, in every state in which it waits, cancelled at every suspension.

By `task.cancel()` (once, twice, a turn later), an anyio scope, a deadline, a failing sibling, on asyncio and uvloop:
what the coroutine had started goes on or ends, whoever waits beside it is served, and nothing is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import count
from typing import Final

import pytest

from tests.cancellation.scenarios import World
from tests.cancellation.scenes import Scene
from tests.cancellation.scenes_of_ends import END_SCENES
from tests.cancellation.scenes_of_leases import LEASE_SCENES
from tests.cancellation.scenes_of_runtimes import RUNTIME_SCENES
from tests.cancellation.scenes_of_streams import STREAM_SCENES
from tests.cancellation.ways import WAYS, Suspensions, Way
from tests.runtime.support import turns

SCENES: Final[Mapping[str, Scene]] = {**LEASE_SCENES, **RUNTIME_SCENES, **STREAM_SCENES, **END_SCENES}


async def struck_at(scene: Scene, *, way: Way, at: int) -> bool:
    """Play the scene once and cancel its act at one suspension; whether that was reached."""
    async with scene.stage() as act:
        run = Suspensions(act.begin(), at=at)
        world = World(act.moves)
        world.start()
        await asyncio.wait_for(way(run), 30.0)
        await turns(3 * len(act.moves) + 3)
        world.stop()
    return run.struck


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
async def test_a_scene_cancelled_at_any_suspension_leaves_nothing_behind(scene: Scene, way: Way) -> None:
    """Laws 2 and 4, invariant 12."""
    asyncio.get_running_loop().set_debug(False)
    for at in count(1):
        if not await struck_at(scene, way=way, at=at):
            break
    assert at > scene.suspensions
