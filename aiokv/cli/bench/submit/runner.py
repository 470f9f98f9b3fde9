"""All submissions and their figures."""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aiokv.backends.arena import Layout
from aiokv.backends.base import Backend, EventStatus
from aiokv.backends.host import HostBackend
from aiokv.cli.bench.garbage import collections_off
from aiokv.cli.bench.memory import require_memory
from aiokv.cli.bench.movers import CopyBackend, find_device
from aiokv.cli.bench.report import BenchReport
from aiokv.cli.bench.submit.settings import SCHEMA_VERSION, SubmitSettings
from aiokv.cli.bench.submit.to_device import submit_to_device
from aiokv.cli.bench.summary import Spread, describe_interpreter
from aiokv.cli.bench.waiting import wait_until
from aiokv.cli.output import new_progress
from aiokv.model.ids import Direction, KeyEnum, SlotArray, Tier
from aiokv.model.plan import CopyBatch
from aiokv.model.spec import CacheGeometry, FullAttention

__all__ = ["submit"]

GROUP: Final = "full"
_GEOMETRY: Final = CacheGeometry(groups=(FullAttention(GROUP, block_size=16),), hash_block_size=16)
_BLOCK_BYTES: Final = 1024  # what is timed does not depend on it; the copies are to be over soon
_COPY_BYTES: Final = 100
"""Of the arrays and queues that a copy stands in."""
_CLOSE_S: Final = 30.0


class _Adjacency(KeyEnum):
    ADJACENT = "adjacent"
    SCATTERED = "scattered"


def submit(settings: SubmitSettings) -> BenchReport:
    """Run it on what the settings name, with a progress bar on stderr."""
    driver = find_device(settings.backend)
    return _submit_to_host(settings) if driver is None else submit_to_device(settings, driver=driver)


def _submit_to_host(settings: SubmitSettings) -> BenchReport:
    slots = 2 * max(settings.copies) + 1
    require_memory(slots * (2 * _BLOCK_BYTES + _COPY_BYTES), what=f"batches of {max(settings.copies):,} copies")
    random = np.random.default_rng(0)
    gpu = random.integers(0, 256, (slots, _BLOCK_BYTES), np.uint8)
    backend = HostBackend()
    backend.open(Layout(geometry=_GEOMETRY, gpu_blocks=slots, cpu_blocks=slots, arenas={GROUP: [gpu]}))
    cases = {
        f"{direction.value}_{adjacency.value}_{copies}": (direction, adjacency, copies)
        for direction in Direction
        for adjacency in _Adjacency
        for copies in settings.copies
    }
    taken: dict[str, list[int]] = {name: [] for name in cases}
    complaints = []
    try:
        with new_progress() as progress, collections_off():
            for _ in progress.track(range(settings.repeats), description="submit"):
                for name, (direction, adjacency, copies) in cases.items():
                    batch = _batch(direction, adjacency, copies=copies, slots=slots, random=random)
                    taken[name].append(_timed(backend, batch))
                    if not _is_copied(batch, gpu=gpu, backend=backend):
                        complaints.append(f"{name}: copies are missing")
    finally:
        backend.close(deadline_s=_CLOSE_S)
    return BenchReport(
        benchmark="submit",
        schema_version=SCHEMA_VERSION,
        figures={
            "driver": CopyBackend.HOST.value,
            "gc": "off",
            "repeats": settings.repeats,
            **describe_interpreter(),
        },
        complaints=tuple(dict.fromkeys(complaints)),
        cases=tuple(
            {"direction": direction.value, "slots": adjacency.value} | _figures(taken[name], copies=copies)
            for name, (direction, adjacency, copies) in cases.items()
        ),
    )


def _timed(backend: Backend, batch: CopyBatch) -> int:
    """Nanoseconds of CPU time of this thread, which is what the loop loses; back when the copies have been made."""
    began = time.thread_time_ns()
    event = backend.submit(batch)
    taken = time.thread_time_ns() - began
    wait_until(lambda: event.query() is not EventStatus.PENDING)
    return taken


def _batch(
    direction: Direction, adjacency: _Adjacency, *, copies: int, slots: int, random: np.random.Generator
) -> CopyBatch:
    """A new one in new arrays, as the core makes them."""
    source, target = (_slots(adjacency, copies=copies, slots=slots, random=random) for _ in range(2))
    return CopyBatch(direction=direction, group=GROUP, source_blocks=source, target_blocks=target)


def _slots(adjacency: _Adjacency, *, copies: int, slots: int, random: np.random.Generator) -> SlotArray:
    if adjacency is _Adjacency.SCATTERED:
        return (1 + random.permutation(slots - 1)[:copies]).astype(np.int64)
    first = int(random.integers(1, slots - copies + 1))
    return np.arange(first, first + copies, dtype=np.int64)


def _is_copied(batch: CopyBatch, *, gpu: NDArray[np.uint8], backend: HostBackend) -> bool:
    """Whether the first and the last block of the batch are what their sources are."""
    engine, cpu = batch.slots(Tier.GPU), batch.slots(Tier.CPU)
    return all(np.array_equal(gpu[engine[place]], backend.cpu_slot(int(cpu[place]))) for place in (0, -1))


def _figures(taken: list[int], *, copies: int) -> dict[str, Any]:
    spread = Spread.of([nanoseconds / 1e3 for nanoseconds in taken])
    return {"copies": copies, "us": spread.figures(), "us_per_block": round(spread.median / copies, 5)}
