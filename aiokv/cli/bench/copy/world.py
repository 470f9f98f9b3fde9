"""Two tiers of blocks of one size, copies between them by the host backend, and a memcpy between memory of their kind.

The copies are made by the backend's own thread, as in a server; a round is over when its event says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from aiokv.backends.arena import CpuArena, Layout
from aiokv.backends.base import DeviceEvent, EventStatus
from aiokv.backends.host import HostBackend, HostFaults, Stall
from aiokv.cli.bench.copy.batches import GEOMETRY, GROUP, ROOM, Batches
from aiokv.cli.bench.copy.settings import Adjacency
from aiokv.cli.bench.waiting import wait_for_copy
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch

__all__ = ["CopyWorld", "Shared", "Took", "opened_world"]

_LOOK_S: Final = 200e-6
_ALONE_QUERIES: Final = 100_000
_CLOSE_S: Final = 30.0
_POISON: Final = {Direction.STORE: 0x5A, Direction.LOAD: 0xA5}
"""Not the same, or what was never copied in one direction would look right in the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """What one copy took."""

    seconds: float
    cpu_seconds: float
    """Of the thread that copied: what other programs do on the machine meanwhile does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A copy while another thread runs Python code without a pause."""

    seconds: float
    python_share: float
    """How often that thread came round its loop, of how often it does when nothing is copied."""


@final
class CopyWorld:
    """Copies of `round_bytes` in blocks of `block_bytes`."""

    __slots__ = ("_alone", "_backend", "_batches", "_gpu", "_memory", "_random", "_round_bytes", "blocks")

    def __init__(self, backend: HostBackend, *, gpu: NDArray[np.uint8], round_bytes: int, queries_per_s: float) -> None:
        self._backend = backend
        self._gpu = gpu
        self._round_bytes = round_bytes
        self._alone = queries_per_s
        self._random = np.random.default_rng(0)
        self._memory = CpuArena(blocks=ROOM, block_bytes=round_bytes).rows
        self.blocks: int = round_bytes // gpu.shape[1]
        """Copies of one round."""
        self._batches = Batches(blocks=self.blocks, slots=len(gpu), random=self._random)

    def plain(self, direction: Direction) -> Took:
        """One memcpy of as many bytes, the same way between memory of the same kinds."""
        stretch = self.blocks * self._gpu.shape[1]
        start = int(self._random.integers(0, len(self._gpu) - self.blocks))
        engine = self._gpu.reshape(-1)[start * self._gpu.shape[1] :][:stretch]
        cpu = self._memory[int(self._random.integers(ROOM))][:stretch]
        source, target = (engine, cpu) if direction is Direction.STORE else (cpu, engine)
        began, began_work = time.perf_counter(), time.thread_time()
        target[:] = source
        return Took(cpu_seconds=time.thread_time() - began_work, seconds=time.perf_counter() - began)

    def copy(self, direction: Direction, adjacency: Adjacency) -> Took:
        """One transfer, from its submission until it is seen to have ended."""
        batch = self._batches.draw(direction, adjacency)
        began, began_work = time.perf_counter(), _work_of_others()
        wait_for_copy(self._backend.submit(batch), look_s=_LOOK_S)
        return Took(cpu_seconds=_work_of_others() - began_work, seconds=time.perf_counter() - began)

    def shared_copy(self, direction: Direction, adjacency: Adjacency) -> Shared:
        """The same, while this thread asks the event without a pause."""
        batch = self._batches.draw(direction, adjacency)
        began = time.perf_counter()
        event = self._backend.submit(batch)
        queries = _query_until_done(event)
        seconds = time.perf_counter() - began
        return Shared(seconds=seconds, python_share=queries / seconds / self._alone)

    def count_wrong(self, direction: Direction, adjacency: Adjacency) -> int:
        """Blocks that are not what their source was, after one transfer into spoilt targets."""
        batch = self._batches.draw(direction, adjacency)
        pairs = list(zip(batch.source_blocks.tolist(), batch.target_blocks.tolist(), strict=True))
        if direction is Direction.STORE:
            for _, target in pairs:
                self._backend.cpu_slot(target)[:] = _POISON[direction]
        else:
            self._gpu[batch.target_blocks] = _POISON[direction]
        wait_for_copy(self._backend.submit(batch), look_s=_LOOK_S)
        if direction is Direction.STORE:
            return sum(not np.array_equal(self._gpu[here], self._backend.cpu_slot(there)) for here, there in pairs)
        return sum(not np.array_equal(self._backend.cpu_slot(here), self._gpu[there]) for here, there in pairs)


@contextmanager
def opened_world(*, block_bytes: int, round_bytes: int) -> Iterator[CopyWorld]:
    """A world, whose memory has been touched; freed at the end."""
    slots = ROOM * (round_bytes // block_bytes) + 1
    gpu = np.random.default_rng(1).integers(0, 256, (slots, block_bytes), np.uint8)
    stall = Stall()
    backend = HostBackend(faults=HostFaults(stall={0: stall}))
    backend.open(Layout(geometry=GEOMETRY, gpu_blocks=slots, cpu_blocks=slots, arenas={GROUP: [gpu]}))
    try:
        alone = _queries_per_s(backend, stall)
        for slot in range(slots):
            backend.cpu_slot(slot)[:] = gpu[slots - 1 - slot]
        yield CopyWorld(backend, gpu=gpu, round_bytes=round_bytes, queries_per_s=alone)
    finally:
        backend.close(deadline_s=_CLOSE_S)


def _queries_per_s(backend: HostBackend, stall: Stall) -> float:
    """How often a thread asks while nothing is copied: the first transfer stands still."""
    one = np.ones(1, np.int64)
    event = backend.submit(CopyBatch(direction=Direction.STORE, group=GROUP, source_blocks=one, target_blocks=one))
    try:
        stall.reached.wait()
        began = time.perf_counter()
        _query_until_done(event, most=_ALONE_QUERIES)
        return _ALONE_QUERIES / (time.perf_counter() - began)
    finally:
        stall.release.set()
        wait_for_copy(event, look_s=_LOOK_S)


def _work_of_others() -> float:
    """CPU seconds of the process without this thread; beside it only the backend's thread does anything."""
    return time.process_time() - time.thread_time()


def _query_until_done(event: DeviceEvent, *, most: int = 1 << 62) -> int:
    for queries in range(most):
        if event.query() is not EventStatus.PENDING:
            return queries
    return most
