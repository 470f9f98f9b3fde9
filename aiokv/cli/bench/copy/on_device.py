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
from aiokv.backends.cuda import CudaBackend
from aiokv.cli.bench.copy.batches import GEOMETRY, GROUP, ROOM, Batches
from aiokv.cli.bench.copy.settings import Adjacency, CopySettings
from aiokv.cli.bench.device import BenchDevice, DeviceRows
from aiokv.cli.bench.summary import Spread
from aiokv.cli.bench.waiting import wait_for_copy
from aiokv.model.ids import Direction
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
                plain = world.rate(world.batch(way, Adjacency.ADJACENT))
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
        self._random = np.random.default_rng(0)
        self._batches = Batches(blocks=(len(content) - 1) // ROOM, slots=len(content), random=self._random)

    def batch(self, direction: Direction, adjacency: Adjacency) -> CopyBatch:
        """One transfer whose slots lie so; adjacent ones on both sides are one plain copy."""
        return self._batches.draw(direction, adjacency)

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
        wait_for_copy(self._backend.submit(batch), look_s=_LOOK_S)

    def _read(self) -> NDArray[np.uint8]:
        return self._device.read(self._rows, like=self._content)


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
