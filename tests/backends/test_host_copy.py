"""The copying itself, against one assignment per row. Sizes are chosen so that every method is taken."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.backends.arena import ByteRows
from aiokv.backends.copy_map import CopyMap
from aiokv.backends.gil_watch import Gil, GilWatch
from aiokv.backends.host_copy import BOUNCE_BYTES, STEP_BYTES, HostRows, copy_steps
from aiokv.model.ids import SlotArray
from tests.backends.support import GUARD_S, give_way

BOUNCE = np.zeros(BOUNCE_BYTES, dtype=np.uint8)


def rows(count: int, width: int, *, gap: int, seed: int) -> ByteRows:
    """Random rows, `gap` bytes apart."""
    memory = np.random.default_rng(seed).integers(0, 256, size=(count, width + gap), dtype=np.uint8)
    return memory[:, gap // 2 : gap // 2 + width]


@final
class ScarceGil:
    """A watch over a GIL that others want all the time."""

    is_scarce = True

    def begin(self) -> None:
        """A step begins."""

    def end(self) -> None:
        """A step has ended."""


def copy(source: ByteRows, target: ByteRows, *, sources: SlotArray, targets: SlotArray, gil: Gil | None = None) -> int:
    """Copies rows; the number of steps it took."""
    blocks = CopyMap(sources, targets)
    rows_of = {"source": HostRows(source), "target": HostRows(target)}
    return sum(1 for _ in copy_steps(blocks, **rows_of, bounce=BOUNCE, gil=gil or GilWatch()))


@st.composite
def slots(draw: st.DrawFn, *, count: int, pool: int) -> SlotArray:
    """`count` distinct slots: scattered, adjacent, or in runs of three."""
    match draw(st.sampled_from(["scattered", "adjacent", "runs"])):
        case "scattered":
            chosen = draw(st.permutations(range(pool)))[:count]
        case "adjacent":
            first = draw(st.integers(0, pool - count))
            chosen = list(range(first, first + count))
        case _:
            order = draw(st.permutations(range(pool // 3)))
            chosen = [3 * run + k for run in order for k in range(3)][:count]
    return np.array(chosen, dtype=np.int32)


@given(st.data(), st.sampled_from([1, 3, 250, 256, 4096]), st.sampled_from([0, 6, 512, 768]), st.sampled_from([0, 512]))
def test_every_row_arrives_and_no_other_byte_changes(data: st.DataObject, width: int, gap: int, other_gap: int) -> None:
    pool, count = 36, data.draw(st.integers(0, 33), label="count")
    sources = data.draw(slots(count=count, pool=pool), label="sources")
    targets = data.draw(slots(count=count, pool=pool), label="targets")
    source, target = rows(pool, width, gap=gap, seed=1), rows(pool, width, gap=other_gap, seed=2)
    memory = target if target.base is None else target.base
    source_before, expected = source.copy(), memory.copy()
    start = other_gap // 2
    for here, there in zip(sources.tolist(), targets.tolist(), strict=True):
        expected[there, start : start + width] = source_before[here]
    copy(source, target, sources=sources, targets=targets, gil=data.draw(st.sampled_from([None, ScarceGil()])))
    assert np.array_equal(memory, expected)
    assert np.array_equal(source, source_before)


SCATTERED = np.random.default_rng(5).permutation(np.arange(1200, dtype=np.int32))
METHODS = {
    "long runs": (64 << 10, np.arange(1200), np.arange(1200)),
    "scattered long rows": (64 << 10, SCATTERED, SCATTERED[::-1].copy()),
    "scatter": (16 << 10, np.arange(1200), SCATTERED),
    "gather": (16 << 10, SCATTERED, np.arange(1200)),
    "bounce": (16 << 10, SCATTERED, SCATTERED[::-1].copy()),
}


@pytest.fixture
def gil_kept_unless_given_up() -> object:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    yield
    sys.setswitchinterval(before)


ENOUGH_TURNS = 4


def turns_while(work: Callable[[], object], *, repeats: int) -> int:
    """How often this thread gets the GIL while another one works, when nobody is ever forced to give it up.

    The work is repeated until that was often enough, as a busy machine may wake this thread late.
    """
    turns = 0
    started, ended = threading.Event(), threading.Event()

    def run() -> None:
        started.set()
        for _ in range(repeats):
            work()
            if turns >= ENOUGH_TURNS:
                break
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(GUARD_S)
    while not ended.is_set():
        turns += 1
        give_way()
    thread.join(GUARD_S)
    return turns


@pytest.mark.usefixtures("gil_kept_unless_given_up")
@pytest.mark.parametrize(("width", "sources", "targets"), METHODS.values(), ids=METHODS.keys())
def test_the_gil_is_given_up_while_bytes_move(width: int, sources: SlotArray, targets: SlotArray) -> None:
    """Law 8. A turn or two come at the start and the end; a copy that holds the GIL leaves no further one."""
    source, target = rows(1200, width, gap=0, seed=1), rows(1200, width, gap=0, seed=2)
    turns = turns_while(lambda: copy(source, target, sources=sources, targets=targets), repeats=500)
    assert turns >= ENOUGH_TURNS


@pytest.mark.usefixtures("gil_kept_unless_given_up")
def test_that_check_notices_a_copy_that_holds_the_gil() -> None:
    source, target = memoryview(bytearray(16 << 20)), memoryview(bytearray(16 << 20))

    def copy_slices() -> None:
        for start in range(0, len(source), 1 << 20):
            target[start : start + (1 << 20)] = source[start : start + (1 << 20)]

    assert turns_while(copy_slices, repeats=5) < ENOUGH_TURNS


@pytest.mark.parametrize(("width", "sources", "targets"), METHODS.values(), ids=METHODS.keys())
def test_no_step_is_longer_than_allowed(width: int, sources: SlotArray, targets: SlotArray) -> None:
    source, target = rows(1200, width, gap=0, seed=1), rows(1200, width, gap=0, seed=2)
    steps = copy(source, target, sources=sources, targets=targets)
    assert steps >= 1200 * width / STEP_BYTES
    assert np.array_equal(target[targets], source[sources])


@pytest.mark.parametrize("width", [16 << 10, 64 << 10, 1 << 20])
@pytest.mark.parametrize("run", [1, 2], ids=["scattered", "in pairs"])
def test_a_scarce_gil_is_asked_for_less_often(width: int, run: int) -> None:
    """Each step, and each row of a loop, has to wait for it: as many rows go in one step as fit."""
    count = 256 if width < 1 << 20 else 24
    slots = np.arange(count * run, dtype=np.int32).reshape(-1, run)
    order = np.random.default_rng(3).permutation(count)
    sources, targets = slots[order].ravel()[:count], slots[order[::-1]].ravel()[:count]
    source, target = rows(count * run, width, gap=0, seed=1), rows(count * run, width, gap=0, seed=2)
    steps = copy(source, target, sources=sources, targets=targets, gil=ScarceGil())
    assert steps <= -(-count * width // STEP_BYTES) + 1
    assert np.array_equal(target[targets], source[sources])


def test_a_batch_in_long_stretches_backwards_goes_in_few_steps() -> None:
    """As a pool hands slots out again that one request has given back."""
    width, count = 4 << 10, 1024
    source, target = rows(count, width, gap=0, seed=1), rows(count, width, gap=0, seed=2)
    sources = np.arange(count, dtype=np.int32)[::-1].copy()
    targets = np.random.default_rng(3).permutation(count).astype(np.int32)
    blocks = CopyMap(sources, targets)
    assert len(blocks.source_stretches) == 1
    assert copy(source, target, sources=sources, targets=targets) == 1
    assert np.array_equal(target[targets], source[sources])


# Whether the GIL is scarce.


@final
class Clocks:
    """Time passes, and work is done, when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.work = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "thread_time", lambda: self.work)

    def step(self, watch: GilWatch, *, seconds: float, work: float) -> bool:
        watch.begin()
        self.now += seconds
        self.work += work
        watch.end()
        return watch.is_scarce


def test_one_step_that_waited_is_chance_two_are_a_scarce_gil_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, watch, interval = Clocks(monkeypatch), GilWatch(), sys.getswitchinterval()
    assert not clocks.step(watch, seconds=5 * interval, work=interval)
    assert not clocks.step(watch, seconds=2.5 * interval, work=interval)
    assert not clocks.step(watch, seconds=5 * interval, work=interval)
    assert clocks.step(watch, seconds=5 * interval, work=interval)
    steps = 1
    while clocks.step(watch, seconds=interval, work=interval):
        steps += 1
        assert steps < 100, "it is never tried again"
    assert steps > 1
    assert not clocks.step(watch, seconds=5 * interval, work=interval)
