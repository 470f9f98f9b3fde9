"""A fixed-size hash index from (group, block hash) to slot, kept in numpy arrays and probed in bulk.

Duty: answer which slot holds which block, for whole batches of keys.

Rules: never rehashes, grows or compacts; leaves no tombstones; a slot holds one key and a key has one slot; every match
is verified on all 32 bytes and the group, so colliding keys, chosen ones too, cost time and never a wrong answer.
Memory that was never used is never touched. `find`, `holds`, `find_indexed`, `key_of`, `group_of` and `is_indexed`
change nothing.

State: a bucket has four ways; it is one `uint64` of four 16-bit tags (0 = empty), with four slots beside it. A key has
four buckets, one from the low bits of each word of its digest, after mixing in a constant of the group; its tag in the
j-th of them is the top of word j. So sixteen ways are probed with whole `[n, 4]` passes, and a new key goes to the
bucket with most room. Per slot: its digest, its owner (group + 1; 0 = not indexed) and its entry (where its tag lies),
so that removal is one scatter. A key that finds its four buckets full goes to the *stash*, a dict (with the sorted
first words of its keys, to pass misses by) that stays all but empty unless keys are chosen to collide.

Transitions of a slot: not indexed -> indexed by `insert`, back by `remove`.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from aiokv.core.index_marks import Marks, marks_of
from aiokv.core.index_places import AT_ONCE, EMPTY_TAG, LOG_WAYS, WAY_MASK, WAYS, choose_places
from aiokv.core.masks import has_any, is_all
from aiokv.core.pool_values import GroupArray
from aiokv.core.slot_memory import zeros
from aiokv.errors import UsageError
from aiokv.model.ids import DIGEST_BYTES, DIGEST_WORDS, BoolArray, DigestArray, IntArray, SlotArray, TableArray
from aiokv.model.plan import Found

__all__ = ["SlotIndex"]

# At 0.6 one key in ten million is stashed under random churn, at 0.7 one in two thousand.
_MAX_LOAD: Final = 0.6
_PAGE: Final = 4096
_MAX_CAPACITY: Final = 1 << 28
_STASHED: Final = -1
_DIGEST: Final = np.dtype((np.void, DIGEST_BYTES))

# Zero-dimensional arrays: numpy would convert a Python number anew at each call, which costs as much as a short pass.
_TAG_SHIFT: Final = np.array(48, np.uint64)
_IN_EACH_WAY: Final = np.array(0x0001_0001_0001_0001, np.uint64)
_NOBODY: Final = np.array(0, np.int16)
_GROUP_TO_OWNER: Final = np.array(1, np.int16)
_LOG_PROBES: Final = np.array(4)
_BYTE_SUM: Final = np.array(0x01010101, np.uint32)

_ALL_NEW: Final = np.ones(AT_ONCE, np.bool_)
_ALL_NEW.flags.writeable = False


class _Probe(NamedTuple):
    """A batch of keys and where each may lie."""

    keys: DigestArray
    owner: NDArray[np.int16]
    """Group + 1, zero-dimensional."""
    buckets: IntArray
    """`[n, 4]`."""
    tags: NDArray[np.uint64]
    """`[n, 4]`: the tag in each bucket, four times over; odd, so never empty."""
    held: NDArray[np.uint64]
    """`[n, 4]`: the tags in the buckets."""


@final
class SlotIndex:
    """Maps (group, digest) to a slot in `[0, capacity)`; at most one entry per slot."""

    __slots__ = (
        "_beside", "_buckets", "_count", "_digests", "_entry", "_marks", "_mask", "_owner", "_rows", "_stash",
        "_stash_words", "_tags", "_warm",
    )  # fmt: skip

    def __init__(self, capacity: int) -> None:
        """`capacity` is one more than the largest slot; UsageError beyond 2**28."""
        if not 0 < capacity <= _MAX_CAPACITY:
            raise UsageError(f"an index holds between 1 and {_MAX_CAPACITY} slots, not {capacity}")
        buckets = 1 << int(capacity / (WAYS * _MAX_LOAD)).bit_length()
        self._buckets: NDArray[np.uint64] = np.zeros(buckets, np.uint64)
        self._tags: NDArray[np.uint16] = self._buckets.view(np.uint16)
        self._beside: TableArray = np.zeros(buckets * WAYS, np.int32)
        self._mask: NDArray[np.uint64] = np.array(buckets - 1, np.uint64)
        self._digests: DigestArray = zeros(capacity * DIGEST_WORDS, np.uint64).reshape(capacity, DIGEST_WORDS)
        self._rows = self._digests.view(_DIGEST)[:, 0]  # one 32-byte item a row: numpy scatters rows of words slowly
        self._owner: GroupArray = zeros(capacity, np.int16)
        self._entry: NDArray[np.int32] = zeros(capacity, np.int32)
        self._marks: dict[int, Marks] = {}
        self._stash: dict[bytes, int] = {}
        self._stash_words: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._count = 0
        self._warm = 0

    def __len__(self) -> int:
        """How many slots are indexed."""
        return self._count

    @property
    def stash_size(self) -> int:
        """Keys that found all their buckets full."""
        return len(self._stash)

    def find(self, keys: DigestArray, group: int) -> Found:
        """Which slots hold `keys` (shape `[n, 4]`) of `group`; the arrays are the caller's."""
        if len(keys) <= AT_ONCE:
            probe = self._probe(keys, group)
            matches = _match_tags(probe)
            if len(matches) or self._stash:
                return self._verify(probe, matches)
            return Found(np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.int64))
        parts = [self.find(keys[i : i + AT_ONCE], group) for i in range(0, len(keys), AT_ONCE)]
        return Found(np.concatenate([part.present for part in parts]), np.concatenate([part.slots for part in parts]))

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
        is_held: BoolArray = same.view(np.uint32)[:, 0] == _BYTE_SUM
        is_held &= np.equal(self._owner.take(slots), group + 1)
        return is_held

    def insert(self, slots: SlotArray, keys: DigestArray, *, group: int) -> BoolArray:
        """Index `slots[i]` under `keys[i]`; False where that key is present, or comes earlier in this batch.

        Slots are distinct and not indexed (else UsageError, nothing changed).
        """
        if len(slots) != len(keys):
            raise UsageError(f"{len(slots)} slots but {len(keys)} keys")
        if np.count_nonzero(self._owner.take(slots)):
            raise UsageError("a slot holds one key at a time")
        if len(keys) <= AT_ONCE:
            return self._insert(slots, keys, group=group)
        starts = range(0, len(keys), AT_ONCE)
        parts = [self._insert(slots[i : i + AT_ONCE], keys[i : i + AT_ONCE], group=group) for i in starts]
        return np.concatenate(parts)

    def remove(self, slots: SlotArray) -> GroupArray:
        """Take `slots` (distinct) out of the index; their groups. UsageError if one is not indexed, nothing changed."""
        slots = slots.astype(np.int64, copy=False)
        owners = self._owner[slots]
        if np.count_nonzero(owners) < len(slots):
            raise UsageError("a slot that is not indexed cannot be removed")
        entries = self._entry[slots].astype(np.int64)
        if self._stash:
            stashed = entries == _STASHED
            self._unstash(slots[stashed])
            entries = entries[~stashed]
        self._tags[entries] = EMPTY_TAG
        self._owner[slots] = _NOBODY
        self._count -= len(slots)
        owners -= _GROUP_TO_OWNER
        return owners

    def warm(self, limit: int) -> int:
        """Touch the pages of the next `limit` buckets, so that no later call pays for them; returns how many are left.

        Keys are spread over all buckets: without this the first batches of a large index fault most of its pages in.
        """
        start, self._warm = self._warm, min(self._warm + limit, len(self._buckets))
        self._buckets[start : self._warm : _PAGE // 8] |= np.uint64(0)
        self._beside[WAYS * start : WAYS * self._warm : _PAGE // 4] |= np.int32(0)
        return len(self._buckets) - self._warm

    def check_invariants(self) -> list[str]:
        """Violations found by a full recount; O(capacity)."""
        found = []
        indexed = self._owner.nonzero()[0]
        if len(indexed) != self._count:
            found.append(f"{len(indexed)} slots are indexed, counted {self._count}")
        if self.count_stray_entries(0, len(self._buckets)):
            found.append("there are entries without a slot")
        if self.is_astray(indexed).any():
            found.append("not every slot is found under its key")
        return found

    @property
    def num_buckets(self) -> int:
        """Buckets of the table."""
        return len(self._buckets)

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
        """Entries in buckets `[start, stop)` that belong to no slot."""
        entries = np.flatnonzero(self._tags[WAYS * start : WAYS * stop]) + WAYS * start
        slots = self._beside.take(entries)
        return int(np.count_nonzero((self._owner.take(slots) == 0) | (self._entry.take(slots) != entries)))

    def _probe(self, keys: DigestArray, group: int) -> _Probe:
        marks = self._marks.get(group)
        if marks is None:
            marks = self._marks.setdefault(group, marks_of(group))
        mixed = keys ^ marks.salt
        buckets = (mixed & self._mask).view(np.int64)
        mixed >>= _TAG_SHIFT
        mixed *= _IN_EACH_WAY
        mixed |= _IN_EACH_WAY
        return _Probe(keys, marks.owner, buckets, mixed, self._buckets[buckets])

    def _verify(self, probe: _Probe, matches: IntArray) -> Found:
        """Which keys are present, given where their tags are found."""
        n = len(probe.keys)
        entries = probe.buckets.ravel()[matches >> LOG_WAYS]
        entries <<= LOG_WAYS
        entries |= matches & WAY_MASK
        slots = self._beside[entries].astype(np.int64)
        if len(slots) == n:
            present = self._owner[slots] == probe.owner
            # Comparing bytes is numpy's shortest way on short batches.
            if is_all(present) and self._digests.take(slots, axis=0).tobytes() == probe.keys.tobytes():
                return Found(present, slots)
        asked = matches >> _LOG_PROBES
        held, wanted = self._digests.take(slots, axis=0), probe.keys.take(asked, axis=0)
        verified = self._owner[slots] == probe.owner
        if not is_all(verified) or held.tobytes() != wanted.tobytes():  # a tag is that of another key
            verified &= np.equal(held, wanted).view(np.uint32)[:, 0] == _BYTE_SUM
            asked, slots = asked[verified], slots[verified]
        answer = Found(np.zeros(n, np.bool_), np.zeros(n, np.int64))
        answer.present[asked], answer.slots[asked] = True, slots
        if self._stash:
            self._find_stashed(probe, answer)
        return answer

    def _find_stashed(self, probe: _Probe, answer: Found) -> None:
        missing = np.logical_not(answer.present).nonzero()[0]
        words = probe.keys[missing, 0]
        nearest = self._stash_words.take(self._stash_words.searchsorted(words), mode="clip")
        owner = probe.owner.tobytes()
        for row in missing[nearest == words].tolist():
            slot = self._stash.get(probe.keys[row].tobytes() + owner, _STASHED)
            if slot != _STASHED:
                answer.present[row] = True
                answer.slots[row] = slot

    def _insert(self, slots: SlotArray, keys: DigestArray, *, group: int) -> BoolArray:
        probe = self._probe(keys, group)
        new = _ALL_NEW[: len(keys)]
        matches = _match_tags(probe)
        if len(matches) or self._stash:
            present = self._verify(probe, matches).present
            if has_any(present):  # else a tag is that of another key
                new = np.logical_not(present)
                slots = slots[new]
                probe = _Probe(keys[new], probe.owner, probe.buckets[new], probe.tags[new], probe.held[new])
        slots = slots.astype(np.int64, copy=False)
        self._rows[slots] = probe.keys.view(_DIGEST)[:, 0]
        self._owner[slots] = probe.owner
        self._count += len(slots)
        repeated = self._place(slots, probe)
        if repeated:
            new = new.copy()
            new[new.nonzero()[0][np.isin(slots, repeated)]] = False
            self._owner[repeated] = 0
            self._count -= len(repeated)
        return new

    def _place(self, slots: IntArray, probe: _Probe) -> list[int]:
        """Give each key a place; those that lose it to a key before them try again. Returns the slots of repeated keys.

        Each round fills at least one way of every bucket that is asked for, or stashes the keys whose buckets are full.
        Equal keys choose the same place for as long as none of them has got one: one that loses to its like is told.
        """
        _, _, buckets, tags, held = probe
        repeated: list[int] = []
        while len(slots):
            entries, tag, empty = choose_places(buckets, tags, held=held)
            if np.count_nonzero(empty) < len(empty):
                has_room = empty != 0
                repeated += self._stash_all(slots[~has_room])
                slots, buckets, tags = slots[has_room], buckets[has_room], tags[has_room]
                entries, tag = entries[has_room], tag[has_room]
            backwards = entries[::-1]  # of those that choose one place the first gets it
            self._beside[backwards] = slots[::-1]
            self._tags[backwards] = tag[::-1]
            self._entry[slots] = entries
            winners = self._beside[entries]
            lost = winners != slots
            if not has_any(lost):
                break
            losers = lost.nonzero()[0]
            slots, buckets, tags = slots[losers], buckets[losers], tags[losers]
            is_repeat = self._rows[slots] == self._rows[winners[losers]]
            if has_any(is_repeat):
                repeated += slots[is_repeat].tolist()
                slots, buckets, tags = slots[~is_repeat], buckets[~is_repeat], tags[~is_repeat]
            held = self._buckets.take(buckets)
        return repeated

    def _stash_all(self, slots: IntArray) -> list[int]:
        """Stash the keys of these slots. Returns the slots of those that are stashed already."""
        repeated = [slot for slot in slots.tolist() if self._stash.setdefault(self._stash_key(slot), slot) != slot]
        self._entry[slots] = _STASHED
        self._sort_stash()
        return repeated

    def _unstash(self, slots: IntArray) -> None:
        for slot in slots.tolist():
            del self._stash[self._stash_key(slot)]
        self._sort_stash()

    def _stash_key(self, slot: int) -> bytes:
        digest: bytes = self._digests[slot].tobytes()
        owner: bytes = self._owner[slot].tobytes()
        return digest + owner

    def _sort_stash(self) -> None:
        stashed = np.fromiter(self._stash.values(), np.int64, len(self._stash))
        self._stash_words = np.sort(self._digests[stashed, 0])


def _match_tags(probe: _Probe) -> IntArray:
    """Where buckets hold the tag of a key: flat places of `[n, 4 buckets, 4 ways]`, ascending."""
    matches: IntArray = ((probe.held ^ probe.tags).view(np.uint16) == EMPTY_TAG).ravel().nonzero()[0]
    return matches
