"""Backends of benchmarks: they count or prepare what is copied, and pass everything on to the host backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Protocol, final

import numpy as np

from aiokv.backends.arena import ByteRows
from aiokv.backends.base import Backend, BackendLayout, DeviceEvent
from aiokv.backends.host import HostBackend
from aiokv.cli.bench.hold import HoldMeter
from aiokv.cli.bench.kv_bytes import KvBytes
from aiokv.model.ids import Direction, IntArray
from aiokv.model.plan import CopyBatch
from aiokv.testing.passing_backend import PassingBackend

__all__ = ["CopyingBackend", "PoisoningBackend", "TallyingBackend"]

_POISON: Final = 0x5A


class CopyingBackend(Backend, Protocol):
    """A backend whose CPU memory can be looked at."""

    def cpu_slot(self, slot: int) -> ByteRows:
        """The bytes of one CPU slot."""


@final
class PoisoningBackend(PassingBackend):
    """Spoils the targets before each copy: a block that was never copied cannot look right.

    The targets are the transfer's own: nobody else may read or write them now. The time that this takes is no part of a
    step of aiokv.
    """

    __slots__ = ("_copier", "_memory", "_meter", "_stream")

    def __init__(self, copier: CopyingBackend, *, memory: KvBytes, meter: HoldMeter, stream: object = None) -> None:
        """`stream` is the engine's, on which `memory` is written; None where the host writes it."""
        super().__init__(copier)
        self._copier = copier
        self._stream = stream
        self._memory = memory
        self._meter = meter

    def submit(self, batch: CopyBatch) -> DeviceEvent:
        """See `Backend`."""
        self._meter.exclude(self._poison, batch)
        if self._stream is not None and batch.direction is Direction.LOAD:
            fences = batch.after if isinstance(batch.after, tuple) else (batch.after,)
            batch = replace(batch, after=(*fences, self._copier.fence(self._stream)))
        return super().submit(batch)

    def _poison(self, batch: CopyBatch) -> None:
        if batch.direction is Direction.LOAD:
            self._memory.poison_slots(batch.group, batch.target_blocks)
        else:
            for slot in batch.target_blocks.tolist():
                self._copier.cpu_slot(slot)[:] = _POISON


@final
class TallyingBackend(PassingBackend):
    """Counts what it is asked to copy, independently of what the runtime counts itself."""

    __slots__ = ("batches", "loads", "submitted")

    def __init__(self, inner: HostBackend) -> None:
        super().__init__(inner)
        self.submitted = 0
        """Batches of both directions since the beginning: the number that the next one gets."""
        self.batches = 0
        """Batches of loads since `start`."""
        self.loads: IntArray = np.zeros(0, np.int64)
        """Per CPU slot, how often it was to be loaded since `start`."""

    def open(self, layout: BackendLayout) -> None:
        """See `Backend`."""
        super().open(layout)
        self.loads = np.zeros(layout.cpu_blocks, np.int64)

    def start(self) -> None:
        """Begin to count again."""
        self.batches = 0
        self.loads[:] = 0

    def submit(self, batch: CopyBatch) -> DeviceEvent:
        """See `Backend`."""
        self.submitted += 1
        if batch.direction is Direction.LOAD:
            self.batches += 1
            self.loads[batch.source_blocks] += 1
        return super().submit(batch)
