"""What budgets are measured against: a cache in plain Python that handles its blocks one by one, with as little as a
correct one can do per block. Dictionaries, a list of pins, an `OrderedDict` for the order of eviction; no classes per
block, no metrics, no events.

Its keys are new `bytes` objects in each round, as they are after hashing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import final

__all__ = ["PlainPool", "chain_hashes"]


@final
class PlainPool:
    """The slots of one tier, all in use."""

    def __init__(self, slots: int, keys: Sequence[bytes]) -> None:
        """Each of `keys`, one per slot, is resident, the first is the next to be evicted."""
        self.slot_of = dict(zip(keys, range(slots), strict=True))
        self.key_of = list(keys)
        self.pins = [0] * slots
        self.order = OrderedDict.fromkeys(range(slots))

    def hit(self, keys: Iterable[bytes]) -> list[int]:
        """Pin the slots of the leading keys that are resident."""
        slot_of, pins, order = self.slot_of, self.pins, self.order
        slots = []
        for key in keys:
            slot = slot_of.get(key)
            if slot is None:
                break
            if not pins[slot]:
                del order[slot]
            pins[slot] += 1
            slots.append(slot)
        return slots

    def reserve(self, count: int) -> list[int]:
        """Evict the coldest blocks and pin their slots."""
        slot_of, key_of, pins, order = self.slot_of, self.key_of, self.pins, self.order
        slots = []
        for _ in range(count):
            slot, _ = order.popitem(last=False)
            del slot_of[key_of[slot]]
            pins[slot] = 1
            slots.append(slot)
        return slots

    def register(self, slots: Iterable[int], keys: Iterable[bytes]) -> None:
        """Make reserved slots findable."""
        slot_of, key_of = self.slot_of, self.key_of
        for slot, key in zip(slots, keys, strict=True):
            slot_of[key] = slot
            key_of[slot] = key

    def pin(self, slots: Iterable[int]) -> None:
        """Hold slots once more that are held already."""
        pins = self.pins
        for slot in slots:
            pins[slot] += 1

    def release(self, slots: Sequence[int]) -> None:
        """Drop one pin each; the tail becomes evictable first."""
        pins, order = self.pins, self.order
        for slot in reversed(slots):
            pins[slot] -= 1
            if not pins[slot]:
                order[slot] = None


def chain_hashes(chunks: Iterable[bytes]) -> list[bytes]:
    """One SHA-256 per block, over the hash before it and the block's tokens."""
    sha256 = hashlib.sha256
    digest = bytes(32)
    digests = []
    for chunk in chunks:
        digest = sha256(digest + chunk).digest()
        digests.append(digest)
    return digests
