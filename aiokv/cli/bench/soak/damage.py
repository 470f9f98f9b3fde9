"""What befalls CPU memory: bytes of blocks at rest are changed behind the runtime's back, and must be found.

Only blocks that no transfer touches are changed: what a copy itself does wrong no checksum finds. A changed block that
is loaded must be reported as corrupt; one that nobody loads until a store overwrites it does no harm.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final, final

import numpy as np

from aiokv import KVRuntime, Tier
from aiokv.backends.base import Backend, DeviceEvent
from aiokv.cli.bench.backends import CopyingBackend
from aiokv.model.ids import Direction
from aiokv.model.plan import Checksum, CopyBatch
from aiokv.testing.passing_backend import PassingBackend

__all__ = ["DamagingBackend", "damage_now_and_then"]

_PAUSE_S: Final = 0.05
_FLIPPED_BIT: Final = 0x10


@final
class DamagingBackend(PassingBackend):
    """Changes what lies in CPU slots when told to, and counts the changed blocks that are asked for afterwards."""

    __slots__ = ("_changed", "_host", "_stored", "asked_for", "flipped")

    def __init__(self, inner: Backend, *, host: CopyingBackend) -> None:
        super().__init__(inner)
        self._host = host
        self._stored: dict[int, int] = {}
        """By CPU slot, the bytes of the block that was stored there last."""
        self._changed: set[int] = set()
        self.flipped = 0
        """Blocks that were changed."""
        self.asked_for = 0
        """Changed blocks that were then to be loaded."""

    def submit(self, batch: CopyBatch) -> DeviceEvent:
        """See `Backend`."""
        if batch.direction is Direction.STORE:
            self._stored.update(dict.fromkeys(batch.target_blocks.tolist(), self.block_bytes(batch.group)))
            self._changed.difference_update(batch.target_blocks.tolist())
        else:
            read = self._changed.intersection(batch.source_blocks.tolist())
            self.asked_for += len(read)
            self._changed -= read
        return super().submit(batch)

    def damage(self, source: random.Random, *, kv: KVRuntime, checksum: Checksum) -> None:
        """Change one block at rest, by as much as `checksum` promises to find: one bit, or all that was stored."""
        busy = {slot for transfer in kv.core.transfers() for slot in transfer.slots(Tier.CPU).tolist()}
        at_rest = sorted(self._stored.keys() - busy - self._changed)
        if not at_rest:
            return
        slot = source.choice(at_rest)
        block = self._host.cpu_slot(slot)[: self._stored[slot]]
        if checksum is Checksum.FULL:
            block[source.randrange(len(block))] ^= _FLIPPED_BIT
        else:
            np.bitwise_xor(block, _FLIPPED_BIT, out=block)
        self._changed.add(slot)
        self.flipped += 1


async def damage_now_and_then(backend: DamagingBackend, kv: KVRuntime, *, checksum: Checksum, seed: int) -> None:
    """Until it is cancelled."""
    source = random.Random(f"{seed}/damage")
    while True:
        await asyncio.sleep(source.random() * 2 * _PAUSE_S)
        backend.damage(source, kv=kv, checksum=checksum)
