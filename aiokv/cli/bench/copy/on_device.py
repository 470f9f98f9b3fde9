"""Copies between a CUDA device and pinned memory, beside one plain copy of as many bytes in the same run.

On the fake driver of a checkout the bytes are real and the speed says nothing of a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from aiokv.backends.arena import Layout
from aiokv.backends.base import EventStatus
from aiokv.backends.cuda import CudaBackend
from aiokv.cli.bench.copy.settings import Adjacency, CopySettings
from aiokv.cli.bench.copy.world import GEOMETRY, GROUP, ROOM
from aiokv.cli.bench.device import BenchDevice, DeviceRows
from aiokv.cli.bench.summary import Spread
from aiokv.model.ids import Direction, SlotArray
from aiokv.model.plan import CopyBatch

__all__ = ["measure_on_device"]

_PATIENCE_S: Final = 60.0
_LOOK_S: Final = 50e-6


def measure_on_device(size: int, settings: CopySettings, *, step: Callable[[], None]) -> list[Mapping[str, Any]]:
    """The cases of blocks of one size; `step` is called once and after each repeat."""
    cases = [(direction, adjacency) for direction in Direction for adjacency in Adjacency]
    with _opened(size, settings.round_bytes) as world:
        wrong = {case: world.count_wrong(*case) for case in cases}
        step()
        rates: dict[Any, list[tuple[float, float]]] = {case: [] for case in cases}
        for _ in range(settings.repeats):
            for way, adjacency in cases:
                plain = world.rate(world.plain_batch(way))
                rates[way, adjacency].append((plain, world.rate(world.batch(way, adjacency))))
            step()
    return [
        {
            "direction": way.value,
            "slots": adjacency.value,
            "block_bytes": size,
            "gb_per_s": Spread.of([copied for _, copied in rates[way, adjacency]]).figures(),
            "plain_gb_per_s": Spread.of([plain for plain, _ in rates[way, adjacency]]).figures(),
            "ratio": Spread.of([copied / plain for plain, copied in rates[way, adjacency]]).figures(),
            "wrong_blocks": wrong[way, adjacency],
        }
        for way, adjacency in cases
    ]


@final
class _World:
    """Blocks of one size on both sides; `round_bytes` are copied at once."""

    def __init__(
        self, backend: CudaBackend, *, device: BenchDevice, rows: DeviceRows, content: NDArray[np.uint8]
    ) -> None:
        self._backend = backend
        self._device = device
        self._rows = rows
        self._content = content
        self._blocks = (len(content) - 1) // ROOM
        self._random = np.random.default_rng(0)

    def batch(self, direction: Direction, adjacency: Adjacency) -> CopyBatch:
        """One transfer whose slots lie so."""
        gpu = self._adjacent() if adjacency is Adjacency.ADJACENT else self._anywhere()
        cpu = self._anywhere() if adjacency is Adjacency.SCATTERED else self._adjacent()
        return _batch(direction, gpu=gpu, cpu=cpu)

    def plain_batch(self, direction: Direction) -> CopyBatch:
        """As many bytes in one copy."""
        return _batch(direction, gpu=self._adjacent(), cpu=self._adjacent())

    def rate(self, batch: CopyBatch) -> float:
        """GB/s of one transfer, from its submission until it is seen to have ended."""
        began = time.perf_counter()
        self._make(batch)
        return float(len(batch) * self._content[0].nbytes / (time.perf_counter() - began) / 1e9)

    def count_wrong(self, direction: Direction, adjacency: Adjacency) -> int:
        """Blocks that are not what their source was, after one transfer into targets that held something else."""
        batch = self.batch(direction, adjacency)
        fresh = self._random.integers(0, 256, (len(batch), self._content.shape[1]), np.uint8)
        pairs = list(zip(batch.source_blocks.tolist(), batch.target_blocks.tolist(), strict=True))
        if direction is Direction.LOAD:
            for block, (source, target) in zip(fresh, pairs, strict=True):
                self._backend.cpu_slot(source)[:] = block
                self._content[target] = block
            self._make(batch)
            return int((self._read() != self._content)[1:].any(axis=1).sum())
        for _, target in pairs:
            self._backend.cpu_slot(target)[:] = ~self._content[0]
        self._make(batch)
        return sum(not np.array_equal(self._backend.cpu_slot(there), self._content[here]) for here, there in pairs)

    def _make(self, batch: CopyBatch) -> None:
        event, pause, give_up = self._backend.submit(batch), threading.Event(), time.monotonic() + _PATIENCE_S
        while event.query() is EventStatus.PENDING and time.monotonic() < give_up:
            pause.wait(_LOOK_S)
        if event.query() is not EventStatus.DONE:
            raise RuntimeError(f"a copy has not been made: {event.query().value} {event.detail()}")

    def _read(self) -> NDArray[np.uint8]:
        return self._device.read(self._rows, like=self._content)

    def _adjacent(self) -> SlotArray:
        first = int(self._random.integers(1, len(self._content) - self._blocks + 1))
        return np.arange(first, first + self._blocks, dtype=np.int64)

    def _anywhere(self) -> SlotArray:
        return (1 + self._random.permutation(len(self._content) - 1)[: self._blocks]).astype(np.int64)


def _batch(direction: Direction, *, gpu: SlotArray, cpu: SlotArray) -> CopyBatch:
    source, target = (gpu, cpu) if direction is Direction.STORE else (cpu, gpu)
    return CopyBatch(direction=direction, group=GROUP, source_blocks=source, target_blocks=target)


@contextmanager
def _opened(block_bytes: int, round_bytes: int) -> Iterator[_World]:
    slots = ROOM * (round_bytes // block_bytes) + 1
    content = np.random.default_rng(1).integers(0, 256, (slots, block_bytes), np.uint8)
    device, backend = BenchDevice(), CudaBackend()
    rows = device.rows(content)
    backend.open(Layout(geometry=GEOMETRY, gpu_blocks=slots, cpu_blocks=slots, arenas={GROUP: [rows]}))
    try:
        settled = threading.Event()
        backend.pinning.when_settled(settled.set)
        settled.wait(_PATIENCE_S)
        yield _World(backend, device=device, rows=rows, content=content)
    finally:
        if backend.close(deadline_s=_PATIENCE_S):
            device.free([rows])
