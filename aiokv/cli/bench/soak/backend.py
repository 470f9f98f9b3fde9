"""A backend whose targets are poisoned before each copy: a block that was never copied cannot look right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

from aiokv.backends.base import BackendLayout
from aiokv.backends.host import HostBackend, HostEvent
from aiokv.cli.bench.hold import HoldMeter
from aiokv.cli.bench.kv_bytes import KvBytes
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch

__all__ = ["PoisoningBackend"]

_POISON: Final = 0x5A


@final
class PoisoningBackend:
    """The host backend over the arenas of `memory`. The time that poisoning takes is no part of a step of aiokv."""

    __slots__ = ("_inner", "_memory", "_meter", "name", "wake_mode")

    def __init__(self, inner: HostBackend, *, memory: KvBytes, meter: HoldMeter) -> None:
        self.name = inner.name
        self.wake_mode = inner.wake_mode
        self._inner = inner
        self._memory = memory
        self._meter = meter

    def open(self, layout: BackendLayout) -> None:
        """See `Backend`."""
        self._inner.open(layout)

    def attach_doorbell(self, ring: Callable[[], None]) -> None:
        """See `Backend`."""
        self._inner.attach_doorbell(ring)

    def submit(self, batch: CopyBatch) -> HostEvent:
        """See `Backend`. The targets are the transfer's own: nobody else may read or write them now."""
        self._meter.exclude(self._poison, batch)
        return self._inner.submit(batch)

    def block_bytes(self, group: str) -> int:
        """See `Backend`."""
        return self._inner.block_bytes(group)

    def eta_seconds(self, direction: Direction, num_bytes: int) -> float:
        """See `Backend`."""
        return self._inner.eta_seconds(direction, num_bytes)

    def close(self, *, deadline_s: float) -> bool:
        """See `Backend`."""
        return self._inner.close(deadline_s=deadline_s)

    def _poison(self, batch: CopyBatch) -> None:
        if batch.direction is Direction.LOAD:
            self._memory.poison_slots(batch.group, batch.target_blocks)
        else:
            for slot in batch.target_blocks.tolist():
                self._inner.cpu_slot(slot)[:] = _POISON
