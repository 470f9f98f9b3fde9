"""The index of one tier: from (group, block hash) to slot, for whole batches of keys.

Duty: which slot of a tier holds which key. It lies over a `SlotTable`, its own or one that it shares with the index of
the other tier: then a key that both tiers hold has one entry, which is found once, and a copy of a block from one tier
to the other is registered without a search.

Rules: a slot holds one key and a key has one slot; what the other tier does changes no answer. `find`, `find_copies`,
`holds`, `find_indexed`, `key_of`, `group_of` and `is_indexed` change nothing.

State: how many slots are indexed; the rest is the table's, where slot s is the node `base + s`.

Transitions of a slot: not indexed -> indexed by `insert`, back by `remove`.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

import numpy as np

from aiokv.core.index_places import AT_ONCE
from aiokv.core.index_table import SlotTable
from aiokv.core.masks import FOUR_TRUE, has_any
from aiokv.core.pool_values import GroupArray
from aiokv.errors import UsageError
from aiokv.model.ids import BoolArray, DigestArray, IntArray, SlotArray
from aiokv.model.plan import Found

__all__ = ["FoundInBoth", "SlotIndex"]

# Zero-dimensional arrays: numpy would convert a Python number anew at each call, which costs as much as a short pass.
_NOBODY: Final = np.array(0, np.int16)
_GROUP_TO_OWNER: Final = np.array(1, np.int16)


class FoundInBoth(NamedTuple):
    """What the first tier has of some keys, and the second of those that the first has not."""

    first: Found
    second: Found | None
    """None where it has none of them."""


@final
class SlotIndex:
    """Maps (group, digest) to a slot in `[0, capacity)`; at most one entry per slot."""

    __slots__ = ("_base", "_count", "_digests", "_owner", "_split", "_table", "_twin")

    def __init__(self, capacity: int, *, table: SlotTable | None = None, base: int = 0) -> None:
        """`capacity` is one more than the largest slot. The slots are nodes from `base` on: 0 or the table's split."""
        self._table = SlotTable(capacity) if table is None else table
        self._base = base
        self._split = np.array(self._table.split)
        mine = slice(base, base + capacity)
        self._digests: DigestArray = self._table.digests[mine]
        self._owner: GroupArray = self._table.owner[mine]
        self._twin = self._table.twin[mine]
        self._count = 0

    def __len__(self) -> int:
        """How many slots are indexed."""
        return self._count

    @property
    def stash_size(self) -> int:
        """Keys, of either tier, that found all their buckets full."""
        return self._table.stash_size

    @property
    def num_buckets(self) -> int:
        """Buckets of the table."""
        return self._table.num_buckets

    def find(self, keys: DigestArray, group: int) -> Found:
        """Which slots hold `keys` (shape `[n, 4]`) of `group`; the arrays are the caller's."""
        found = self._table.find(keys, group)
        return self._mine(found) if self._table.has_tiers else found

    def find_in_both(self, keys: DigestArray, group: int) -> FoundInBoth:
        """Which slots of the first tier, whose index this is, hold `keys`, and which of the second what it lacks."""
        found = self._table.find(keys, group)
        present, nodes = found
        is_second = np.greater_equal(nodes, self._split)
        if not has_any(is_second):
            return FoundInBoth(found, None)
        seconds = nodes - self._table.split
        seconds *= is_second
        present = np.greater(present, is_second)
        nodes *= present
        return FoundInBoth(Found(present, nodes), Found(is_second, seconds))

    def find_copies(self, slots: SlotArray) -> Found:
        """Which of these indexed slots have a slot of the other tier with the same key, and which."""
        nodes = self._twin.take(slots).astype(np.int64)
        nodes -= 1
        present = nodes >= 0
        if self._base == 0:
            nodes -= self._table.split
        nodes *= present
        return Found(present, nodes)

    def is_indexed(self, slots: SlotArray) -> BoolArray:
        """Which of `slots` hold a key."""
        return np.not_equal(self._owner[slots], _NOBODY)

    def find_indexed(self, slots: SlotArray) -> IntArray:
        """Where among `slots` those stand that hold a key."""
        return self._owner[slots].nonzero()[0]

    def find_keyless(self, slots: SlotArray) -> IntArray:
        """Where among `slots` the others stand."""
        return np.equal(self._owner[slots], _NOBODY).nonzero()[0]

    def indexed_between(self, start: int, stop: int) -> BoolArray:
        """Which slots of `[start, stop)` hold a key."""
        return np.not_equal(self._owner[start:stop], 0)

    def key_of(self, slots: SlotArray) -> DigestArray:
        """The digests of `slots`, a copy; rows of slots that are not indexed have no meaning."""
        return self._digests.take(slots, axis=0)

    def group_of(self, slots: SlotArray) -> GroupArray:
        """The groups of `slots`; -1 where not indexed."""
        return self._owner.take(slots) - _GROUP_TO_OWNER

    def holds(self, slots: SlotArray, keys: DigestArray, *, group: int) -> BoolArray:
        """Which of `slots` hold `keys[i]` of `group`: a fraction of the price of `find`, where the slots are known."""
        same = np.equal(self._digests.take(slots, axis=0), keys)
        is_held: BoolArray = same.view(np.uint32)[:, 0] == FOUR_TRUE
        is_held &= np.equal(self._owner.take(slots), group + 1)
        return is_held

    def insert(self, slots: SlotArray, keys: DigestArray, *, group: int) -> BoolArray:
        """Index `slots[i]` under `keys[i]`; False where that key is present, or comes earlier in this batch.

        Slots are distinct and not indexed (else UsageError, nothing changed).
        """
        nodes = self._nodes_to_insert(slots, keys)
        if len(keys) <= AT_ONCE:
            is_new = self._table.insert(nodes, keys, group=group)
        else:
            starts = range(0, len(keys), AT_ONCE)
            parts = [self._table.insert(nodes[i : i + AT_ONCE], keys[i : i + AT_ONCE], group=group) for i in starts]
            is_new = np.concatenate(parts)
        self._count += int(np.count_nonzero(is_new))
        return is_new

    def insert_copies(self, slots: SlotArray, keys: DigestArray, *, group: int, of: SlotArray) -> BoolArray:
        """The same, where slots `of` of the other tier (distinct) should hold the keys.

        If all of them do, and no slot of this tier does, nothing is searched.
        """
        table = self._table
        others = of.astype(np.int64) + (table.split - self._base)
        if not table.has_tiers or not self._are_alone(others, keys, group=group):
            return self.insert(slots, keys, group=group)
        table.attach(self._nodes_to_insert(slots, keys), keys, to=others, owner=table.owner_of(group))
        self._count += len(slots)
        return np.ones(len(slots), np.bool_)

    def remove(self, slots: SlotArray) -> GroupArray:
        """Take `slots` (distinct) out of the index; their groups. UsageError if one is not indexed, nothing changed."""
        owners = self._owner[slots]
        if np.count_nonzero(owners) < len(slots):
            raise UsageError("a slot that is not indexed cannot be removed")
        self._table.remove(self._nodes(slots))
        self._count -= len(slots)
        owners -= _GROUP_TO_OWNER
        return owners

    def warm(self, limit: int) -> int:
        """Touch the pages of the next `limit` buckets of the table; returns how many are left."""
        return self._table.warm(limit)

    def check_invariants(self) -> list[str]:
        """Violations found by a full recount; O(capacity)."""
        found = []
        indexed = self._owner.nonzero()[0]
        if len(indexed) != self._count:
            found.append(f"{len(indexed)} slots are indexed, counted {self._count}")
        if self.count_stray_entries(0, self.num_buckets):
            found.append("there are entries without a slot")
        if self.is_astray(indexed).any():
            found.append("not every slot is found under its key")
        return found + self._find_odd_twins()

    def is_astray(self, slots: SlotArray) -> BoolArray:
        """Which of `slots` hold a key and are not found under it."""
        owners = self._owner.take(slots)
        astray = np.zeros(len(slots), np.bool_)
        for owner in np.flatnonzero(np.bincount(owners, minlength=1)[1:]).tolist():
            mine = np.flatnonzero(owners == owner + 1)
            answer = self.find(self.key_of(slots[mine]), owner)
            astray[mine] = ~answer.present | (answer.slots != slots[mine])
        return astray

    def count_stray_entries(self, start: int, stop: int) -> int:
        """Entries in buckets `[start, stop)` of the table that belong to no slot of either tier."""
        return self._table.count_stray_entries(start, stop)

    def _nodes(self, slots: SlotArray) -> IntArray:
        nodes = slots.astype(np.int64, copy=False)
        return nodes + self._base if self._base else nodes

    def _nodes_to_insert(self, slots: SlotArray, keys: DigestArray) -> IntArray:
        if len(slots) != len(keys):
            raise UsageError(f"{len(slots)} slots but {len(keys)} keys")
        if np.count_nonzero(self._owner.take(slots)):
            raise UsageError("a slot holds one key at a time")
        return self._nodes(slots)

    def _are_alone(self, nodes: IntArray, keys: DigestArray, *, group: int) -> bool:
        """Whether nodes of the other tier hold these very keys, and no slot of this one does."""
        table = self._table
        if np.count_nonzero(table.twin.take(nodes)) or len(nodes) != len(keys):
            return False
        if np.count_nonzero(table.owner.take(nodes) == table.owner_of(group)) < len(nodes):
            return False
        return table.digests.take(nodes, axis=0).tobytes() == keys.tobytes()

    def _mine(self, found: Found) -> Found:
        """What the table has found, as slots of this tier."""
        present, nodes = found
        if self._base == 0:
            present &= nodes < self._table.split
        else:
            elsewhere = (nodes < self._base).nonzero()[0]
            nodes[elsewhere] = self._table.twin.take(nodes[elsewhere]) - 1
            nodes -= self._base
            present &= nodes >= 0
        nodes *= present
        return found

    def _find_odd_twins(self) -> list[str]:
        paired = self._twin.nonzero()[0]
        twins = self._twin[paired].astype(np.int64) - 1
        table, nodes = self._table, paired + self._base
        is_mutual = (table.twin[twins] - 1 == nodes) & (table.owner[twins] == table.owner[nodes])
        is_alike = is_mutual & (self._owner[paired] != 0) & (table.digests[twins] == table.digests[nodes]).all(axis=1)
        return [] if is_alike.all() else ["a slot and its copy do not name each other"]
