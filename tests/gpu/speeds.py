"""GB/s by the size of what is copied at once, one direction and both, beside one plain large copy of as many bytes."""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np

from aiokv.backends.cuda import CudaBackend
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch
from tests.gpu.bench import KIB, Bench, Found, Slots, batch, opened, spin

_ROOM: Final = 2
"""Slots are so many times as many as copies: neighbours would be one copy."""


def measure_speeds(bench: Bench) -> Found:
    """A row for each size."""
    return Found(figures={"rows": [_measure_size(bench, num_bytes) for num_bytes in bench.sizes.speed_sizes]})


def _measure_size(bench: Bench, num_bytes: int) -> dict[str, Any]:
    sizes = bench.sizes
    copies = min(sizes.most_copies, sizes.speed_bytes // num_bytes)
    blocks = 1 + _ROOM * copies
    rows = bench.engine.rows(blocks, num_bytes)
    random = np.random.default_rng(0)
    spread = {way: _spread(random, blocks=blocks, copies=copies) for way in Direction}
    adjacent = {Direction.LOAD: np.arange(1, copies + 1), Direction.STORE: np.arange(copies + 1, 2 * copies + 1)}
    with opened([rows.tensor], gpu_blocks=blocks, cpu_blocks=blocks) as backend:
        cases = {
            f"{name}_{way.value}": [batch(way, gpu=chosen[way], cpu=chosen[way])]
            for name, chosen in (("copies", spread), ("plain", adjacent))
            for way in Direction
        }
        halves = (np.arange(1, copies + 1), np.arange(copies + 1, 2 * copies + 1))
        shuffled = {way: random.permutation(half) for way, half in zip(Direction, halves, strict=True)}
        cases["copies_both"] = [batch(way, gpu=shuffled[way], cpu=shuffled[way]) for way in Direction]
        cases["plain_both"] = [batch(way, gpu=adjacent[way], cpu=adjacent[way]) for way in Direction]
        taken = {
            name: _gigabytes(backend, batches, repeats=sizes.repeats, num_bytes=num_bytes)
            for name, batches in cases.items()
        }
    return {"kib": num_bytes // KIB, "copies": copies} | taken


def _spread(random: np.random.Generator, *, blocks: int, copies: int) -> Slots:
    """Anywhere in the pool, so that few are neighbours; none is one copy with the next in both pools."""
    return 1 + random.permutation(blocks - 1)[:copies]


def _gigabytes(backend: CudaBackend, batches: list[CopyBatch], *, repeats: int, num_bytes: int) -> float:
    """Per second, the best of some; from the submission until all is seen to have ended."""
    seconds = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        spin(*[backend.submit(one) for one in batches])
        seconds.append(time.perf_counter() - began)
    return round(sum(len(one) for one in batches) * num_bytes / min(seconds) / 1e9, 3)
