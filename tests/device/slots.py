"""Use after free, a slot at a time: what a copy on the device touches, the core must still hold (law 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiokv import KVRuntime, Tier
from aiokv.backends.cuda import CudaBackend
from tests.backends.cuda.rig import Tensor
from tests.fakecuda import FakeDriver

__all__ = ["find_unheld", "require_idle"]


def find_unheld(kv: KVRuntime, backend: CudaBackend, *, fake: FakeDriver, arrays: Mapping[str, Tensor]) -> list[str]:
    """Slots that a copy may still touch although no transfer of the core holds them."""
    if not fake.inflight():
        return []
    held = {tier: {slot for move in kv.core.transfers() for slot in move.slots(tier).tolist()} for tier in Tier}
    found = [
        f"GPU slot {slot} of {group!r}"
        for group, array in arrays.items()
        for slot in range(array.shape[0])
        if slot not in held[Tier.GPU] and _in_flight(fake, array, slot)
    ]
    for slot in range(kv.config.cpu_blocks or 0):
        row = backend.cpu_slot(slot)
        if slot not in held[Tier.CPU] and fake.inflight_range(row.ctypes.data, row.nbytes):
            found.append(f"CPU slot {slot}")
    return found


def require_idle(fake: FakeDriver, array: Tensor, slots: Sequence[int]) -> None:
    """What compute is about to write, no copy may touch: the host must have seen its end."""
    busy = [slot for slot in slots if _in_flight(fake, array, slot)]
    assert not busy, f"slots {busy} were given to compute while a copy may still touch them"


def _in_flight(fake: FakeDriver, array: Tensor, slot: int) -> int:
    stride = array.strides[0]
    return fake.inflight_range(array.pointer + slot * stride, stride)
