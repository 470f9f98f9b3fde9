"""The cancellation sweeps once more, on the CUDA backend and the fake driver, with every adversary and oracle on.

Law 4, invariant 12: what the fake backend holds back, the device really has not copied yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

import pytest

from tests.backends.cuda.rig import Rig
from tests.cancellation.scenarios import SCENARIOS, Scenario
from tests.cancellation.scenes import Scene
from tests.cancellation.test_sweep_requests import ENTRIES, Entry, acquire_as_context_manager, admit
from tests.cancellation.test_sweep_requests import struck_at as request_struck_at
from tests.cancellation.test_sweep_scenes import SCENES
from tests.cancellation.test_sweep_scenes import struck_at as scene_struck_at
from tests.cancellation.ways import WAYS, Way
from tests.device.plug import DevicePlug
from tests.runtime.support import plugged_into

ONE_LOOP = pytest.mark.asyncio(loop_factories=["uvloop"])
OF_PINNING = ("ready_while_the_arena_is_pinned", "quiesce_that_waits_for_a_registration")
"""What they wait for is a pinning that is steered by hand: not the device's."""
SOME_WAYS = ("by_task_cancel_twice", "by_anyio_scope")


@pytest.fixture
def plug(watched_rig: Rig) -> Iterator[DevicePlug]:
    plug = DevicePlug(watched_rig)
    with plugged_into(plug):
        yield plug


@ONE_LOOP
@pytest.mark.parametrize("way", [pytest.param(WAYS[way], id=way) for way in SOME_WAYS])
@pytest.mark.parametrize("scene", [pytest.param(SCENES[name], id=name) for name in SCENES if name not in OF_PINNING])
async def test_a_scene_cancelled_at_any_suspension_leaves_nothing_behind(
    plug: DevicePlug, scene: Scene, way: Way
) -> None:
    asyncio.get_running_loop().set_debug(False)
    for at in count(1):
        if not await scene_struck_at(scene, way=way, at=at):
            break
    assert at > scene.suspensions
    assert plug.opened == at


@ONE_LOOP
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
async def test_a_request_cancelled_at_any_suspension_leaves_nothing_behind(
    plug: DevicePlug, entry: Entry, scenario: Scenario
) -> None:
    asyncio.get_running_loop().set_debug(False)
    for at in count(1):
        if not await request_struck_at(scenario, entry=entry, way=WAYS["by_task_cancel"], at=at):
            break
    assert entry is admit or at > scenario.suspensions
    assert plug.opened == at
    assert entry is not acquire_as_context_manager or plug.computed
