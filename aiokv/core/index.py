"""A fixed-size hash index from (group, block hash) to slot, kept in numpy arrays and probed in bulk.

Duty: answer which slot holds which block, for whole batches of keys.

Rules: never rehashes, grows or compacts; leaves no tombstones; a slot holds one key and a key has one slot; every match
is verified on all 32 bytes and the group, so colliding keys, chosen ones too, cost time and never a wrong answer.
Memory that was never used is never touched. `find`, `key_of`, `group_of` and `is_indexed` change nothing.

State: a bucket is one row of 16 `int32`, a cache line: eight tags, then the eight slots they stand for; tag 0 is empty.
A key may lie in two buckets. Tag and buckets come from different words of its digest, mixed with a constant of the
group. Per slot: its digest, its owner (group + 1; 0 = not indexed) and where its tag lies, so that removal is one
scatter. Keys that find both buckets full go to the *stash*, a dict that stays empty unless keys are chosen to collide.

Transitions of a slot: not indexed -> indexed by `insert`, back by `remove`.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import UsageError
from aiokv.model.ids import DIGEST_WORDS, BoolArray, DigestArray, IntArray, SlotArray
from aiokv.model.plan import Found

__all__ = ["GroupArray", "SlotIndex"]

GroupArray = NDArray[np.int16]
"""Group indices, shape `[n]`."""

_WAYS: Final = 8
_ROW: Final = 2 * _WAYS
_MAX_LOAD: Final = 0.7
_STASHED: Final = -1
_FOUR_TRUE: Final = 0x01010101
_MAX_CAPACITY: Final = 1 << 28
_MAX_GROUP: Final = (1 << 15) - 2


class _Probe(NamedTuple):
    """Where a batch of keys may lie."""

    tags: NDArray[np.int32]
    """`[n]`, never 0."""
    buckets: IntArray
    """`[n, 2]`."""
    rows: NDArray[np.int32]
    """`[n, 2, 16]`: copies of both buckets."""


@final
class SlotIndex:
    """Maps (group, digest) to a slot in `[0, capacity)`; at most one entry per slot."""

    __slots__ = ("_buckets", "_count", "_digests", "_entry", "_flat", "_mask", "_owner", "_salts", "_stash")

    def __init__(self, capacity: int) -> None:
        """`capacity` is one more than the largest slot; UsageError beyond 2**28."""
        if not 0 < capacity <= _MAX_CAPACITY:
            raise UsageError(f"an index holds between 1 and {_MAX_CAPACITY} slots, not {capacity}")
        needed = int(capacity / (_WAYS * _MAX_LOAD)) + 1
        buckets = 1 << (needed - 1).bit_length()
        self._buckets: NDArray[np.int32] = np.zeros((buckets, _ROW), dtype=np.int32)
        self._flat: NDArray[np.int32] = self._buckets.reshape(-1)
        self._mask = np.uint64(buckets - 1)
        self._digests: DigestArray = np.empty((capacity, DIGEST_WORDS), dtype=np.uint64)
        self._owner: GroupArray = np.zeros(capacity, dtype=np.int16)
        self._entry: NDArray[np.int32] = np.empty(capacity, dtype=np.int32)
        self._salts: dict[int, np.uint64] = {}
        self._stash: dict[tuple[int, bytes], int] = {}
        self._count = 0

    def __len__(self) -> int:
        """How many slots are indexed."""
        return self._count

    @property
    def stash_size(self) -> int:
        """Keys that found both their buckets full; each slows `find` down a little."""
        return len(self._stash)

    def find(self, keys: DigestArray, group: int) -> Found:
        """Which slots hold `keys` (shape `[n, 4]`) of `group`; the arrays are the caller's."""
        if len(keys) == 0:
            return Found(np.empty(0, dtype=np.bool_), np.empty(0, dtype=np.int32))
        return self._find_probed(self._probe(keys, group), keys, group)

    def is_indexed(self, slots: SlotArray) -> BoolArray:
        """Which of `slots` hold a key."""
        return self._owner.take(slots) != 0

    def key_of(self, slots: SlotArray) -> DigestArray:
        """The digests of `slots`, a copy; rows of slots that are not indexed have no meaning."""
        return self._digests.take(slots, axis=0)

    def group_of(self, slots: SlotArray) -> GroupArray:
        """The groups of `slots`; -1 where not indexed."""
        return self._owner.take(slots) - np.int16(1)

    def indexed_between(self, start: int, stop: int) -> BoolArray:
        """Which slots of `[start, stop)` hold a key."""
        return self._owner[start:stop] != 0

    def insert(self, slots: SlotArray, keys: DigestArray, group: int) -> BoolArray:
        """Index `slots[i]` under `keys[i]`; False where that key is present, or comes earlier in this batch.

        Slots are distinct and not indexed (else UsageError, nothing changed). At most 16 rounds over the batch.
        """
        if len(slots) != len(keys):
            raise UsageError(f"{len(slots)} slots but {len(keys)} keys")
        if len(slots) == 0:
            return np.empty(0, dtype=np.bool_)
        if self._owner.take(slots).any():
            raise UsageError("a slot holds one key at a time")
        probe = self._probe(keys, group)
        new = ~self._find_probed(probe, keys, group).present
        _drop_repeats(keys, new)
        if not new.all():
            keys = keys[new]
            slots = slots[new]
            probe = _Probe(probe.tags[new], probe.buckets[new], probe.rows[new])
        self._digests[slots] = keys
        self._owner[slots] = group + 1
        self._count += len(slots)
        self._place(slots, probe)
        return new

    def remove(self, slots: SlotArray) -> None:
        """Take `slots` (distinct) out of the index; UsageError if one is not indexed, nothing changed."""
        if not self._owner.take(slots).all():
            raise UsageError("a slot that is not indexed cannot be removed")
        entries = self._entry.take(slots)
        if self._stash:
            stashed = entries == _STASHED
            for slot in slots[stashed].tolist():
                del self._stash[self._stash_key(slot)]
            entries = entries[~stashed]
        self._flat[entries] = 0
        self._owner[slots] = 0
        self._count -= len(slots)

    def check_invariants(self) -> list[str]:
        """Violations found by a full recount; O(capacity)."""
        found = []
        indexed = self._owner.nonzero()[0].astype(np.int32)
        if len(indexed) != self._count:
            found.append(f"{len(indexed)} slots are indexed, counted {self._count}")
        if int((self._buckets[:, :_WAYS] != 0).sum()) + len(self._stash) != len(indexed):
            found.append("there are entries without a slot, or slots without an entry")
        for group in np.unique(self.group_of(indexed)).tolist():
            mine = indexed[self.group_of(indexed) == group]
            answer = self.find(self.key_of(mine), group)
            if not (answer.present.all() and (answer.slots == mine).all()):
                found.append(f"not every slot of group {group} is found under its key")
        return found

    def _probe(self, keys: DigestArray, group: int) -> _Probe:
        salt = self._salts.get(group)
        if salt is None:
            salt = self._salts.setdefault(group, _salt_of(group))
        mixed = keys ^ salt
        tags = mixed.view(np.int32)[:, 0] | np.int32(1)
        buckets = (mixed[:, 1:3] & self._mask).view(np.int64)
        return _Probe(tags, buckets, self._buckets.take(buckets, axis=0))

    def _find_probed(self, probe: _Probe, keys: DigestArray, group: int) -> Found:
        n = len(keys)
        matches = (probe.rows[:, :, :_WAYS] == probe.tags[:, None, None]).reshape(-1).nonzero()[0]
        slots = probe.rows.reshape(-1)[_WAYS:].take(matches + (matches & -_WAYS))
        if len(slots) == n:
            verified = self._verify(slots, keys, group)
            if verified.all():
                return Found(verified, slots)
        asked = matches >> 4
        verified = self._verify(slots, keys.take(asked, axis=0), group)
        asked = asked[verified]
        answer = Found(np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.int32))
        answer.present[asked] = True
        answer.slots[asked] = slots[verified]
        if self._stash:
            self._find_stashed(keys, group, answer)
        return answer

    def _verify(self, slots: SlotArray, keys: DigestArray, group: int) -> BoolArray:
        same = (self._digests.take(slots, axis=0) == keys).view(np.uint32).reshape(-1) == _FOUR_TRUE
        same &= self._owner.take(slots) == group + 1
        return same

    def _find_stashed(self, keys: DigestArray, group: int, answer: Found) -> None:
        for row in (~answer.present).nonzero()[0].tolist():
            slot = self._stash.get((group, keys[row].tobytes()), _STASHED)
            if slot != _STASHED:
                answer.present[row] = True
                answer.slots[row] = slot

    def _place(self, slots: SlotArray, probe: _Probe) -> None:
        """Give each key the first empty way of its emptier bucket; those that lost a way to another key try again.

        Each round fills at least one way of every bucket that is asked for, or finds both buckets full.
        """
        tags, buckets, rows = probe
        while len(slots):
            empty = (rows[:, :, :_WAYS] == 0).view(np.uint64)[:, :, 0]
            room = np.bitwise_count(empty)
            second = room[:, 1] > room[:, 0]
            ways = np.where(second, empty[:, 1], empty[:, 0])
            at = np.where(second, buckets[:, 1], buckets[:, 0]) * _ROW
            # Byte w of `ways` is 1 where way w is empty: the bits below the lowest one that is set count 8 * w.
            at += np.bitwise_count(~ways & (ways - np.uint64(1))) >> 3
            if not ways.all():
                full = ways == 0
                self._stash_all(slots[full])
                keep = ~full
                slots, tags, buckets, at = slots[keep], tags[keep], buckets[keep], at[keep]
            beside = self._flat[_WAYS:]
            beside[at] = slots
            lost = beside.take(at) != slots
            if not lost.any():
                self._flat[at] = tags
                self._entry[slots] = at
                return
            won = ~lost
            self._flat[at[won]] = tags[won]
            self._entry[slots[won]] = at[won]
            slots, tags, buckets = slots[lost], tags[lost], buckets[lost]
            rows = self._buckets.take(buckets, axis=0)

    def _stash_all(self, slots: SlotArray) -> None:
        self._entry[slots] = _STASHED
        for slot in slots.tolist():
            self._stash[self._stash_key(slot)] = slot

    def _stash_key(self, slot: int) -> tuple[int, bytes]:
        return int(self._owner[slot]) - 1, self._digests[slot].tobytes()


def _salt_of(group: int) -> np.uint64:
    """An odd constant for each group (splitmix64), so that one digest lies elsewhere in each of them."""
    if not 0 <= group <= _MAX_GROUP:
        raise UsageError(f"group {group} is not in [0, {_MAX_GROUP}]")
    word = (group + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return np.uint64((word ^ word >> 31) | 1)


def _drop_repeats(keys: DigestArray, new: BoolArray) -> None:
    """Clear `new[i]` where row i repeats an earlier row that is new."""
    words = np.sort(keys[:, 0])
    if not (words[1:] == words[:-1]).any():
        return
    seen: set[bytes] = set()
    for row in new.nonzero()[0].tolist():
        key = keys[row].tobytes()
        new[row] = key not in seen
        seen.add(key)
