"""All submissions and their figures."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final, NamedTuple, final

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
    cases = [_Case(*case) for case in product(Direction, _Adjacency, dict.fromkeys(settings.copies))]
    with _opened(slots) as pools, new_progress() as progress, collections_off():
        found = _measure(pools, cases, rounds=progress.track(range(settings.repeats), description="submit"))
    return BenchReport(
        benchmark="submit",
        schema_version=SCHEMA_VERSION,
        figures={
            "driver": CopyBackend.HOST.value,
            "gc": "off",
            "repeats": settings.repeats,
            **describe_interpreter(),
        },
        complaints=tuple(dict.fromkeys(f"{case.name}: copies are missing" for case in found.missing)),
        cases=tuple(
            {"direction": case.direction.value, "slots": case.adjacency.value}
            | _figures(found.taken[case], copies=case.copies)
            for case in cases
        ),
    )


def _measure(pools: _Pools, cases: Sequence[_Case], *, rounds: Iterable[int]) -> _Found:
    """Every case once a round."""
    found = _Found(taken={case: [] for case in cases})
    for _ in rounds:
        for case in cases:
            batch = pools.draw(case)
            found.taken[case].append(_timed(pools.backend, batch))
            if not pools.is_copied(batch):
                found.missing.append(case)
    return found


@contextmanager
def _opened(slots: int) -> Iterator[_Pools]:
    """Two pools of so many slots, the engine's full of random bytes."""
    random = np.random.default_rng(0)
    gpu = random.integers(0, 256, (slots, _BLOCK_BYTES), np.uint8)
    backend = HostBackend()
    backend.open(Layout(geometry=_GEOMETRY, gpu_blocks=slots, cpu_blocks=slots, arenas={GROUP: [gpu]}))
    try:
        yield _Pools(backend, gpu=gpu, random=random)
    finally:
        backend.close(deadline_s=_CLOSE_S)


class _Case(NamedTuple):
    """What is handed over at once."""

    direction: Direction
    adjacency: _Adjacency
    copies: int

    @property
    def name(self) -> str:
        return f"{self.direction.value}_{self.adjacency.value}_{self.copies}"


@dataclass(slots=True, kw_only=True)
class _Found:
    """What each submission took, in nanoseconds, and the cases after which blocks were not where they belong."""

    taken: dict[_Case, list[int]]
    missing: list[_Case] = field(default_factory=list)


@final
class _Pools:
    """Both pools, and the batches between them."""

    __slots__ = ("_gpu", "_random", "backend")

    def __init__(self, backend: HostBackend, *, gpu: NDArray[np.uint8], random: np.random.Generator) -> None:
        self.backend = backend
        self._gpu = gpu
        self._random = random

    def draw(self, case: _Case) -> CopyBatch:
        """A new batch in new arrays, as the core makes them."""
        source, target = self._slots(case), self._slots(case)
        return CopyBatch(direction=case.direction, group=GROUP, source_blocks=source, target_blocks=target)

    def is_copied(self, batch: CopyBatch) -> bool:
        """Whether the first and the last block of the batch are what their sources are."""
        engine, cpu = batch.slots(Tier.GPU), batch.slots(Tier.CPU)
        ends = ((engine[place], int(cpu[place])) for place in (0, -1))
        return all(np.array_equal(self._gpu[on_gpu], self.backend.cpu_slot(on_cpu)) for on_gpu, on_cpu in ends)

    def _slots(self, case: _Case) -> SlotArray:
        slots = len(self._gpu)
        if case.adjacency is _Adjacency.SCATTERED:
            return (1 + self._random.permutation(slots - 1)[: case.copies]).astype(np.int64)
        first = int(self._random.integers(1, slots - case.copies + 1))
        return np.arange(first, first + case.copies, dtype=np.int64)


def _timed(backend: Backend, batch: CopyBatch) -> int:
    """Nanoseconds of CPU time of this thread, which is what the loop loses; back when the copies have been made."""
    began = time.thread_time_ns()
    event = backend.submit(batch)
    taken = time.thread_time_ns() - began
    wait_until(lambda: event.query() is not EventStatus.PENDING)
    return taken


def _figures(taken: list[int], *, copies: int) -> dict[str, Any]:
    spread = Spread.of([nanoseconds / 1e3 for nanoseconds in taken])
    return {"copies": copies, "us": spread.figures(), "us_per_block": round(spread.median / copies, 5)}
