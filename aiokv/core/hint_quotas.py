"""How many slots the residence hints of each tenant hold in a tier: what their quota is compared with.

Rules
- A slot counts once for a tenant, however many of its hints hold it.
- What many hints give back in one step is subtracted in later slices, a batch at a time, or when it is asked for.

State: per tenant and tier how many of its hints hold each slot; what is still to be subtracted from that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final, final

from aiokv.core.slot_counts import SlotCounts, count_repeats
from aiokv.model.ids import SlotArray, Tier

__all__ = ["HintQuotas", "QuotaKey"]

QuotaKey = tuple[str, Tier]
"""A tenant, and the tier that its hints hold slots of."""

_AT_ONCE: Final = 2048
"""Slots subtracted in one slice, a batch aside."""
_TENANT_COST: Final = 64
_BATCH_COST: Final = 4
"""Each tenant, and each batch, takes as long as so many slots beside its own."""


@final
class HintQuotas:
    """The slots of all tenants."""

    __slots__ = ("_used", "given")

    def __init__(self) -> None:
        self._used: dict[QuotaKey, SlotCounts] = {}
        self.given: dict[QuotaKey, deque[SlotArray]] = {}
        """What is still to be subtracted: read it, never write."""

    def keys(self) -> tuple[QuotaKey, ...]:
        """Those that hold something."""
        while self.given:
            self.settle_some()
        return tuple(self._used)

    def used_by(self, key: QuotaKey) -> SlotCounts:
        """The slots of one tenant in a tier, as they are now."""
        while key in self.given:
            self._settle(key)
        return self._used.get(key) or SlotCounts()

    def take(self, key: QuotaKey, slots: SlotArray) -> None:
        """A hint holds these slots as well."""
        self._used.setdefault(key, SlotCounts()).add(slots)

    def give(self, batches: Mapping[QuotaKey, Sequence[SlotArray]]) -> None:
        """Hints do not hold these slots any more, a batch each; if they are many, that is written down later."""
        for key, slots in batches.items():
            self.given.setdefault(key, deque()).extend(slots)
        costs = map(_cost, chain.from_iterable(batches.values()))
        if sum(costs) + _TENANT_COST * len(batches) <= _AT_ONCE:
            self.settle_some()

    def settle_some(self) -> None:
        """Subtract what was given back, some of it if it is much."""
        left = _AT_ONCE
        while self.given and left > 0:
            left -= self._settle(next(iter(self.given)))

    def clear(self, tier: Tier) -> None:
        """Nobody's slots of this tier count any more."""
        for table in (self._used, self.given):
            for key in [key for key in table if key[1] is tier]:
                del table[key]

    def _settle(self, key: QuotaKey) -> int:
        """Subtract the oldest batches of one tenant, all of them at once where it holds nothing else; what it costs."""
        given, used = self.given[key], self._used[key]
        if sum(map(len, given)) == used.num_holders:
            del self._used[key], self.given[key]
            return _TENANT_COST
        some: list[SlotArray] = []
        cost = _TENANT_COST
        while given and cost < _AT_ONCE:
            cost += _cost(given[0])
            some.append(given.popleft())
        used.remove(*count_repeats(some))
        if not given:
            del self.given[key]
        if not len(used):
            del self._used[key]
        return cost


def _cost(batch: SlotArray) -> int:
    """What subtracting a batch takes, in slots."""
    return len(batch) + _BATCH_COST
