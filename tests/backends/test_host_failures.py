"""The host backend as a device: streams in order, faults one by one, a dead thread, a stuck copy, a fork, an exit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from aiokv.backends.arena import Layout
from aiokv.backends.base import DeviceEvent, EventStatus, WakeMode
from aiokv.backends.host import HostBackend, HostFaults, Stall
from aiokv.errors import BackendLost, ConfigError, UsageError
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch
from tests.backends.support import GUARD_S, end_of, geometry_of, layout_of, load, store

ROOT = Path(__file__).resolve().parent.parent.parent
BLOCKS = 9
PENDING, DONE, FAILED, LOST = EventStatus.PENDING, EventStatus.DONE, EventStatus.FAILED, EventStatus.LOST


class Rig:
    """Open backends over small tensors; closes what a test left open."""

    def __init__(self) -> None:
        self.kv = np.arange(BLOCKS * 4, dtype=np.uint8).reshape(BLOCKS, 4)
        self.stalls: list[Stall] = []
        self._backends: list[HostBackend] = []

    def open(self, faults: HostFaults | None = None) -> HostBackend:
        backend = HostBackend(faults=faults)
        backend.open(layout_of({"full": [self.kv]}, gpu_blocks=BLOCKS, cpu_blocks=BLOCKS))
        self._backends.append(backend)
        return backend

    def open_stalling(self, *numbers: int) -> HostBackend:
        """The copies `numbers` stand still until their stall in `stalls` is released."""
        self.stalls = [Stall() for _ in numbers]
        return self.open(HostFaults(stall=dict(zip(numbers, self.stalls, strict=True))))

    def reach(self, index: int = 0) -> None:
        assert self.stalls[index].reached.wait(GUARD_S)

    def release(self, index: int = 0) -> None:
        self.stalls[index].release.set()

    def end(self) -> None:
        for stall in self.stalls:
            stall.release.set()
        for backend in self._backends:
            backend.close(deadline_s=GUARD_S)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.end()


def statuses(*events: DeviceEvent) -> list[EventStatus]:
    return [event.query() for event in events]


def test_a_copy_is_pending_until_it_ended(rig: Rig) -> None:
    backend = rig.open_stalling(0)
    event = backend.submit(store({1: 1}))
    rig.reach()
    assert event.query() is PENDING
    assert event.detail() == ""
    rig.release()
    assert end_of(event) is DONE
    assert event.detail() == ""


def test_copies_of_one_direction_end_in_order(rig: Rig) -> None:
    backend = rig.open_stalling(1, 3)
    events = [backend.submit(store({block: block})) for block in range(1, 6)]
    rig.reach(0)
    assert statuses(*events) == [DONE, PENDING, PENDING, PENDING, PENDING]
    rig.release(0)
    rig.reach(1)
    assert statuses(*events) == [DONE, DONE, DONE, PENDING, PENDING]


def test_the_last_of_two_copies_to_one_target_wins(rig: Rig) -> None:
    backend = rig.open()
    for block in range(1, 6):
        event = backend.submit(store({block: 0}))
    end_of(event)
    assert backend.cpu_slot(0).tolist() == rig.kv[5].tolist()


def test_a_load_does_not_wait_for_a_long_queue_of_stores() -> None:
    kv = np.zeros((2, 48 << 20), dtype=np.uint8)
    stalls = [Stall(), Stall()]
    backend = HostBackend(faults=HostFaults(stall={0: stalls[0], 2: stalls[1]}))
    backend.open(layout_of({"full": [kv], "small": [np.zeros((2, 4), dtype=np.uint8)]}, gpu_blocks=2, cpu_blocks=2))
    backend.submit(store({1: 0}, group="small"))
    assert stalls[0].reached.wait(GUARD_S)
    long_store = backend.submit(store({1: 0}))
    backend.submit(load({1: 1}, group="small"))
    stalls[0].release.set()
    assert stalls[1].reached.wait(GUARD_S)
    assert long_store.query() is PENDING
    stalls[1].release.set()
    assert end_of(long_store) is DONE
    assert backend.close(deadline_s=GUARD_S)


def test_an_empty_batch_ends_well(rig: Rig) -> None:
    assert end_of(rig.open().submit(store({}))) is DONE


def test_a_failed_copy_says_why_and_later_ones_are_not_affected(rig: Rig) -> None:
    backend = rig.open(HostFaults(fail=frozenset({1})))
    events = [backend.submit(store({block: block})) for block in (1, 2, 3)]
    assert [end_of(event) for event in events] == [DONE, FAILED, DONE]
    assert "wanted this copy to fail" in events[1].detail()
    assert backend.cpu_slot(3).tolist() == rig.kv[3].tolist()
    assert end_of(backend.submit(load({3: 1}))) is DONE


def test_a_corrupt_copy_ends_well_with_one_wrong_byte(rig: Rig) -> None:
    backend = rig.open(HostFaults(corrupt=frozenset({0})))
    assert end_of(backend.submit(store({1: 4, 2: 5}))) is DONE
    wrong = backend.cpu_slot(4) != rig.kv[1]
    assert wrong.tolist() == [True, False, False, False]
    assert backend.cpu_slot(5).tolist() == rig.kv[2].tolist()


def test_a_dead_thread_loses_what_it_had_and_refuses_more(rig: Rig) -> None:
    stall = Stall()
    backend = rig.open(HostFaults(kill=frozenset({1}), stall={0: stall}))
    first, second, third = (backend.submit(batch) for batch in (store({1: 1}), store({2: 2}), load({3: 3})))
    assert stall.reached.wait(GUARD_S)
    stall.release.set()
    assert end_of(second) is LOST
    assert end_of(third) in (DONE, LOST)
    assert end_of(first) is DONE
    assert "died" in second.detail()
    with pytest.raises(BackendLost, match="died"):
        backend.submit(load({1: 1}))
    assert backend.close(deadline_s=GUARD_S)
    assert second.query() is LOST


BAD_BATCHES = {
    "GPU slot too large": store({BLOCKS: 0}),
    "CPU slot too large": store({1: BLOCKS}),
    "negative source": load({-1: 1}),
    "negative target": load({1: -1}),
}


@pytest.mark.parametrize("batch", BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_a_slot_that_does_not_exist_is_refused(rig: Rig, batch: CopyBatch) -> None:
    backend = rig.open()
    before = rig.kv.copy()
    with pytest.raises(UsageError, match="slots"):
        backend.submit(batch)
    assert end_of(backend.submit(store({}))) is DONE
    assert np.array_equal(rig.kv, before)


def test_an_unknown_group_or_cpu_slot_is_refused(rig: Rig) -> None:
    backend = rig.open()
    with pytest.raises(ConfigError, match="'swa'"):
        backend.submit(store({1: 1}, group="swa"))
    with pytest.raises(UsageError, match="no slot"):
        backend.cpu_slot(BLOCKS)


def test_close_finishes_what_is_queued(rig: Rig) -> None:
    backend = rig.open()
    events = [backend.submit(store({block: block})) for block in range(1, BLOCKS)]
    slot = backend.cpu_slot(BLOCKS - 1)
    assert backend.close(deadline_s=GUARD_S)
    assert statuses(*events) == [DONE] * len(events)
    assert slot.tolist() == rig.kv[BLOCKS - 1].tolist()
    assert backend.close(deadline_s=0.0)


def test_close_with_a_stuck_copy_says_so_and_loses_it(rig: Rig) -> None:
    """Law 4: memory that a copy may still write is leaked, not freed."""
    backend = rig.open_stalling(1)
    events = [backend.submit(store({block: block})) for block in (1, 2, 3)]
    slot = weakref.ref(backend.cpu_slot(2).base)
    rig.reach()
    assert not backend.close(deadline_s=0.0)
    assert statuses(*events) == [DONE, LOST, LOST]
    assert "stuck" in events[1].detail()
    assert slot() is not None
    rig.release()
    assert not backend.close(deadline_s=GUARD_S)
    assert statuses(*events) == [DONE, LOST, LOST]


CALLS: dict[str, Callable[[HostBackend], object]] = {
    "submit": lambda backend: backend.submit(store({1: 1})),
    "cpu_slot": lambda backend: backend.cpu_slot(0),
    "block_bytes": lambda backend: backend.block_bytes("full"),
    "eta_seconds": lambda backend: backend.eta_seconds(Direction.LOAD, 1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_before_open_and_after_close_it_is_not_usable(rig: Rig, call: Callable[[HostBackend], object]) -> None:
    with pytest.raises(UsageError, match="not open"):
        call(HostBackend())
    backend = rig.open()
    backend.close(deadline_s=GUARD_S)
    with pytest.raises(UsageError, match="not open"):
        call(backend)


def test_a_backend_is_opened_once(rig: Rig) -> None:
    backend = rig.open()
    layout = layout_of({"full": [rig.kv]}, gpu_blocks=BLOCKS)
    with pytest.raises(UsageError, match="once"):
        backend.open(layout)
    backend.close(deadline_s=GUARD_S)
    with pytest.raises(UsageError, match="once"):
        backend.open(layout)


def test_closing_what_was_never_opened_is_clean() -> None:
    assert HostBackend().close(deadline_s=0.0)


def test_arenas_are_needed() -> None:
    with pytest.raises(ConfigError, match="needs arenas"):
        HostBackend().open(Layout(geometry=geometry_of("full"), gpu_blocks=2, cpu_blocks=2))


def test_the_bridge_is_told_to_poll_and_gets_an_estimate(rig: Rig) -> None:
    backend = rig.open()
    assert backend.wake_mode is WakeMode.POLL
    assert backend.eta_seconds(Direction.STORE, 1 << 20) == 0.0
    end_of(backend.submit(store({1: 1})))
    assert backend.eta_seconds(Direction.STORE, 2 << 20) == 2 * backend.eta_seconds(Direction.STORE, 1 << 20) > 0.0
    assert backend.eta_seconds(Direction.LOAD, 1 << 20) == 0.0


def test_a_dead_loop_does_not_matter(rig: Rig) -> None:
    backend = rig.open_stalling(0)

    async def submit() -> DeviceEvent:
        return backend.submit(store({1: 1}))

    event = asyncio.run(submit())
    rig.reach()
    rig.release()
    assert backend.close(deadline_s=GUARD_S)
    assert statuses(event) == [DONE]


def test_a_backend_that_nobody_closed_lets_go_of_the_tensors() -> None:
    tensor = torch.zeros(4, 4)
    owner = weakref.ref(tensor)
    backend = HostBackend()
    backend.open(layout_of({"full": [tensor]}, gpu_blocks=4))
    slot = weakref.ref(backend.cpu_slot(0).base)
    del tensor, backend
    assert owner() is None
    assert slot() is None


SCRIPT = """
import os, sys
import numpy as np
from aiokv.backends.host import HostBackend
from aiokv.errors import UsageError
from tests.backends.support import GUARD_S, end_of, layout_of, store

kv = np.ones((4, 4096), dtype=np.uint8)
backend = HostBackend()
backend.open(layout_of({"full": [kv]}, gpu_blocks=4, cpu_blocks=4))
end_of(backend.submit(store({1: 1})))
address = backend.cpu_slot(1).__array_interface__["data"][0]
"""

FORK = """
def is_mapped(address):
    ranges = (line.split()[0].split("-") for line in open("/proc/self/maps"))
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)

def refused(call):
    try:
        call()
    except UsageError as error:
        return "forked" in str(error)
    return False

calls = (
    lambda: backend.submit(store({2: 2})),
    lambda: backend.cpu_slot(1),
    lambda: backend.eta_seconds(None, 1),
    lambda: backend.close(deadline_s=1.0),
    lambda: backend.open(layout_of({"full": [kv]}, gpu_blocks=4)),
)
assert is_mapped(address)
child = os.fork()
if child == 0:
    os._exit(0 if all(map(refused, calls)) and not is_mapped(address) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
end_of(backend.submit(store({2: 2})))
assert backend.close(deadline_s=GUARD_S)
"""


def run_script(text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + text], capture_output=True, text=True, check=False, cwd=ROOT, timeout=GUARD_S
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_a_forked_child_is_refused_and_has_no_cpu_arena() -> None:
    run_script(FORK)


def test_an_open_backend_does_not_keep_the_interpreter_from_exiting() -> None:
    run_script("")
