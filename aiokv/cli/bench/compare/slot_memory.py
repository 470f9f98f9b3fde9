"""What a slot costs on both sides, empty and resident: how much a fresh process grows, first ours, then the peer's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from aiokv.cli.bench.compare.process import SlotCosts
from aiokv.cli.bench.compare.settings import CompareSettings, pinnable_core
from aiokv.cli.bench.compare.sides import our_worker, peer_memory_worker
from aiokv.cli.bench.compare.worker import MEASURED_POOL
from aiokv.cli.bench.footprint.runner import complaints_about_pool
from aiokv.errors import ConfigError

__all__ = ["MEMORY_FLOOR", "SlotMemory", "check_memory", "measure_memory"]

MEMORY_FLOOR: Final = 2.0
"""How many times as many bytes a resident slot of the peer must take."""

_PEER_SLOT_BYTES: Final = 600
"""About so much a resident slot of the peer takes at most."""
_MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMemory:
    """Both sides, with as many slots."""

    ours: SlotCosts
    peer: SlotCosts

    @property
    def ratio(self) -> float:
        """How many times as many bytes a resident slot of the peer takes. A process that has not grown counts as one
        byte per slot: so few slots tell nothing."""
        return self.peer.bytes_per_resident_slot / max(self.ours.bytes_per_resident_slot, 1.0)

    @property
    def figures(self) -> Mapping[str, object]:
        """As they are reported."""
        return {
            "slots": self.ours.slots,
            "ours_bytes_per_empty_slot": self.ours.bytes_per_empty_slot,
            "ours_bytes_per_resident_slot": self.ours.bytes_per_resident_slot,
            "peer_bytes_per_empty_slot": self.peer.bytes_per_empty_slot,
            "peer_bytes_per_resident_slot": self.peer.bytes_per_resident_slot,
            "ratio": round(self.ratio, 3),
            "floor": MEMORY_FLOOR,
        }

    @property
    def complaints(self) -> tuple[str, ...]:
        """Our budgets per slot that were not kept, and the floor if it was missed."""
        missed = f"memory: a resident slot of the peer takes {self.ratio:.2f}x the bytes of ours, not {MEMORY_FLOOR:g}x"
        return (
            *(f"memory: {complaint}" for complaint in complaints_about_pool(MEASURED_POOL, asdict(self.ours))),
            *((missed,) if self.ratio < MEMORY_FLOOR else ()),
        )


def check_memory(slots: int, *, available: int) -> None:
    """`ConfigError` if the peer's pool will not fit: better than being killed half way through."""
    needed = slots * _PEER_SLOT_BYTES
    if needed > available:
        raise ConfigError(
            f"the peer's pool of {slots:,} slots takes about {needed / _MIB:,.0f} MiB, "
            f"{available / _MIB:,.0f} are available"
        )


async def measure_memory(settings: CompareSettings) -> SlotMemory:
    """Each side in a process that has done nothing else, one after the other."""
    core = pinnable_core()
    async with our_worker(settings, core=core) as worker:
        ours = await worker.memory(settings.memory_slots)
    async with peer_memory_worker(settings, core=core) as worker:
        peer = await worker.memory(settings.memory_slots)
    return SlotMemory(ours=ours, peer=peer)
