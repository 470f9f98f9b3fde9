"""Every public coroutine is in a sweep: those that the API has are compared with those that the sweeps really call."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType

from tests.cancellation.public_coroutines import find_public_coroutines
from tests.cancellation.scenarios import SCENARIOS
from tests.cancellation.test_sweep_requests import ENTRIES
from tests.cancellation.test_sweep_requests import struck_at as request_struck_at
from tests.cancellation.test_sweep_run import interrupted_at
from tests.cancellation.test_sweep_scenes import SCENES
from tests.cancellation.test_sweep_scenes import struck_at as scene_struck_at
from tests.cancellation.ways import WAYS, Suspensions

NEVER = sys.maxsize


@contextmanager
def calls_recorded(wanted: Mapping[str, CodeType]) -> Iterator[set[str]]:
    """The names of the functions that are called meanwhile by what a sweep cancels; what a stage calls is left out."""
    names = {code: name for name, code in wanted.items()}
    called: set[str] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in names and is_cancelled(frame):
            called.add(names[frame.f_code])

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        yield called
    finally:
        sys.setprofile(before)


def is_cancelled(frame: FrameType | None) -> bool:
    """Whether this call is made by the coroutine that a sweep cancels, or by the program that it interrupts."""
    while frame is not None:
        if frame.f_code in {Suspensions.send.__code__, Suspensions.throw.__code__, interrupted_at.__code__}:
            return True
        frame = frame.f_back
    return False


async def play_everything() -> None:
    """Each scene and each way in once, undisturbed."""
    way = WAYS["by_task_cancel"]
    for scene in SCENES.values():
        assert not await scene_struck_at(scene, way=way, at=NEVER)
    for entry in ENTRIES:
        assert not await request_struck_at(SCENARIOS["loads"], entry=entry, way=way, at=NEVER)


def test_every_public_coroutine_is_cancelled_at_every_suspension_by_some_sweep() -> None:
    """Law 4. A coroutine that is new in the API needs a scene in one of the `scenes_of_*` modules."""
    wanted = find_public_coroutines()
    with calls_recorded(wanted) as called:
        asyncio.run(play_everything())
        interrupted_at(NEVER)
    assert wanted.keys() - called == set()


def test_the_search_finds_every_kind_of_coroutine() -> None:
    """Otherwise the comparison above would hold for want of anything to compare."""
    known = {
        "run",
        "KVRuntime.open",
        "KVRuntime.aclose",
        "KVRuntime.__aenter__",
        "KVRuntime.__aexit__",
        "KVRuntime.acquire",
        "KVRuntime.admit",
        "KVRuntime.quiesce",
        "KVRuntime.events",
        "KVRuntime.transfers",
        "AcquireCall.__await__",
        "AcquireCall.__aenter__",
        "AcquireCall.__aexit__",
        "EventStream.__anext__",
        "EventStream.__aexit__",
        "TransferStream.__anext__",
        "Lease.extend",
        "Lease.ready",
        "Preempted.resume",
    }
    assert known <= find_public_coroutines().keys()
