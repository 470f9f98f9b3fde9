"""Batches for a CUDA device, ours and the bindings' in turns: what either costs who submits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, final

import numpy as np

from aiokv.backends.arena import Layout
from aiokv.backends.base import EventStatus
from aiokv.backends.cuda import CudaBackend
from aiokv.backends.cuda_copies import CopyMaker, cut_copy_lanes
from aiokv.backends.mapping import address_of
from aiokv.cli.bench.device import BenchDevice, DriverKind
from aiokv.cli.bench.garbage import collections_off
from aiokv.cli.bench.report import BenchReport
from aiokv.cli.bench.submit.listed import ListedCopies
from aiokv.cli.bench.submit.settings import SCHEMA_VERSION, SubmitSettings
from aiokv.cli.bench.summary import Spread, describe_interpreter
from aiokv.cli.bench.waiting import wait_until
from aiokv.cli.output import new_progress
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch
from aiokv.model.spec import CacheGeometry, FullAttention

__all__ = ["submit_to_device"]

_GROUP: Final = "full"
_GEOMETRY: Final = CacheGeometry(groups=(FullAttention(_GROUP, block_size=16),), hash_block_size=16)
_MOST_LAYERS: Final = 32
_FRAGMENT_BYTES: Final = 64  # what is timed does not depend on it; the copies are to be over soon
_JUDGED_COPIES: Final = 8_192
_LEAST_RATIO: Final = 8.0
_PATIENCE_S: Final = 60.0


def submit_to_device(settings: SubmitSettings, *, driver: DriverKind) -> BenchReport:
    """Run it, with a progress bar on stderr."""
    cases, complaints = [], []
    device = BenchDevice()
    with new_progress() as progress, collections_off():
        for copies in progress.track(sorted(settings.copies), description="submit"):
            pair = _Pair(device, copies=copies)
            try:
                figures = pair.measure(repeats=settings.repeats)
                complaints += pair.complaints(figures)
            finally:
                pair.close()
            cases.append(figures)
    return BenchReport(
        benchmark="submit",
        schema_version=SCHEMA_VERSION,
        figures={
            "driver": driver.value,
            "driver_version": device.driver.version,
            "gc": "off",
            "repeats": settings.repeats,
            **{name: cases[-1][name] for name in ("copies", "ours_ms", "bindings_list_ms", "ratio")},
            **describe_interpreter(),
        },
        complaints=tuple(complaints),
        cases=tuple(cases),
    )


@final
class _Pair:
    """Stores of one size: some layers, and as many blocks as make up the copies, no two of them adjacent."""

    def __init__(self, device: BenchDevice, *, copies: int) -> None:
        self._copies = copies
        self._device = device
        layers = max(count for count in range(1, _MOST_LAYERS + 1) if copies % count == 0)
        blocks = copies // layers
        random = np.random.default_rng(0)
        self._content = random.integers(0, 256, (layers, 2 * blocks + 1, _FRAGMENT_BYTES), np.uint8)
        self._tensors = [device.rows(layer) for layer in self._content]
        layout = Layout(
            geometry=_GEOMETRY,
            gpu_blocks=2 * blocks + 1,
            cpu_blocks=2 * blocks,
            arenas={_GROUP: self._tensors},
        )
        self._backend = CudaBackend()
        self._backend.open(layout)
        self._listed = ListedCopies(device)
        arena = address_of(self._backend.cpu_slot(0))
        lanes = cut_copy_lanes(layout.fragments[_GROUP], cpu_address=arena, cpu_stride=layout.cpu_block_bytes)
        self._maker = CopyMaker(lanes)
        self._batch = CopyBatch(
            direction=Direction.STORE,
            group=_GROUP,
            source_blocks=(1 + random.permutation(2 * blocks)[:blocks]).astype(np.int64),
            target_blocks=random.permutation(2 * blocks)[:blocks].astype(np.int64),
        )
        wait_until(lambda: self._backend.pinning.status.is_settled)

    def measure(self, *, repeats: int) -> Mapping[str, Any]:
        """Both in turns; the first round of each, which warms up, does not count."""
        rounds = [(*self._submit_ours(), self._submit_listed()) for _ in range(repeats + 1)][1:]
        ours, handed_over, listed = (Spread.of([s * 1e3 for s in side]) for side in zip(*rounds, strict=True))
        return {
            "copies": self._copies,
            "ours_ms": round(ours.median, 4),
            "bindings_list_ms": round(listed.median, 4),
            "ratio": round(listed.median / ours.median, 2),
            "ours": ours.figures(),
            "handed_over": handed_over.figures(),
            "bindings_list": listed.figures(),
        }

    def complaints(self, figures: Mapping[str, Any]) -> list[str]:
        """What is not as promised: the bytes, and from so many copies on the ratio."""
        found = []
        for slot in self._batch.target_blocks.tolist():
            self._backend.cpu_slot(slot)[:] = 0  # the bindings have copied as well
        self._submit_ours()
        sources, targets = self._batch.source_blocks, self._batch.target_blocks
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            if not np.array_equal(self._backend.cpu_slot(target), self._content[:, source].ravel()):
                found.append(f"{self._copies} copies: block {source} has not arrived")
                break
        if self._copies >= _JUDGED_COPIES and figures["ratio"] < _LEAST_RATIO:
            found.append(f"{self._copies} copies: {figures['ratio']} times the bindings' lists, not {_LEAST_RATIO}")
        return found

    def close(self) -> None:
        """Give everything back."""
        self._listed.close()
        if self._backend.close(deadline_s=_PATIENCE_S):
            self._device.free(self._tensors)

    def _submit_ours(self) -> tuple[float, float]:
        """Seconds until the caller has its thread back, and until the driver has all copies."""
        began = time.perf_counter()
        event = self._backend.submit(self._batch)
        taken = time.perf_counter() - began
        if event.job.last is None:
            event.job.progress.wait(_PATIENCE_S)
        handed_over = time.perf_counter() - began
        wait_until(lambda: event.query() is not EventStatus.PENDING)
        return taken, handed_over

    def _submit_listed(self) -> float:
        """The same for the bindings, the addresses being made in the same way."""
        began = time.perf_counter()
        for copies in self._maker.describe(self._batch).pieces(most=self._copies):
            self._listed.submit(copies)
        taken = time.perf_counter() - began
        wait_until(self._listed.is_idle)
        return taken
