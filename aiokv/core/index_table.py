"""The hash table beneath the indexes of both tiers: from (group, block hash) to *node*, kept in numpy arrays.

Duty: say which node holds which key, for whole batches of keys. A node is a slot of one of two tiers; those of the
second tier are numbered from `split` on.

Rules: never rehashes, grows or compacts; leaves no tombstones; a node holds one key; a key has one entry, and one node
in each tier at most. Every match is verified on all 32 bytes and the group, so colliding keys, chosen ones too, cost
time and never a wrong answer. Memory that was never used is never touched. `find` changes nothing.

State: a bucket has four ways; it is one `uint64` of four 16-bit tags (0 = empty), with four nodes beside it. A key has
four buckets, one from the low bits of each word of its digest, in all groups but 0 mixed with a constant; its tag in
the j-th of them is the top of word j. So sixteen ways are probed with whole `[n, 4]` passes, and a new key goes to the
bucket with most room. Per node: its digest, its owner (group + 1; 0 = no key), its entry (where its tag lies), so that
removal is one scatter, and its twin (1 + the node of the other tier that holds the same key; 0 = none). Of twins the
one of the first tier stands in the table: the other one comes and goes without touching it. A key that finds its four
buckets full goes to the *stash*.

Transitions of a node: without key -> with key by `insert` or `attach`, back by `remove`.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from aiokv.core.index_marks import Marks, marks_of
from aiokv.core.index_places import AT_ONCE, EMPTY_TAG, LOG_WAYS, WAY_MASK, WAYS, choose_places
from aiokv.core.index_stash import Stash
from aiokv.core.masks import FOUR_TRUE, has_any, is_all
from aiokv.core.pool_values import GroupArray
from aiokv.core.slot_memory import zeros
from aiokv.errors import UsageError
from aiokv.model.ids import DIGEST_BYTES, DIGEST_WORDS, BoolArray, DigestArray, IntArray, SlotArray, TableArray
from aiokv.model.plan import Found

__all__ = ["SlotTable"]

# At 0.6 one key in ten million is stashed under random churn, at 0.7 one in two thousand.
_MAX_LOAD: Final = 0.6
_PAGE: Final = 4096
_MAX_CAPACITY: Final = 1 << 28
_STASHED: Final = -1
_DIGEST: Final = np.dtype((np.void, DIGEST_BYTES))

# Zero-dimensional arrays: numpy would convert a Python number anew at each call, which costs as much as a short pass.
_TAG_SHIFT: Final = np.array(48, np.uint64)
_IN_EACH_WAY: Final = np.array(0x0001_0001_0001_0001, np.uint64)
_LOG_PROBES: Final = np.array(4)

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

    def select(self, which: BoolArray) -> _Probe:
        """Some of them."""
        return _Probe(self.keys[which], self.owner, self.buckets[which], self.tags[which], self.held[which])


@final
class SlotTable:
    """Maps (group, digest) to nodes in `[0, capacity)`. What its arrays say may be read by the indexes over it."""

    __slots__ = (
        "_beside", "_buckets", "_marks", "_mask", "_rows", "_stash", "_tags", "_warm", "digests", "entry", "owner",
        "split", "twin",
    )  # fmt: skip

    def __init__(self, capacity: int, *, split: int | None = None) -> None:
        """`capacity` is one more than the largest node; UsageError beyond 2**28. Without `split` there is one tier."""
        if not 0 < capacity <= _MAX_CAPACITY:
            raise UsageError(f"an index holds between 1 and {_MAX_CAPACITY} slots, not {capacity}")
        buckets = 1 << int(capacity / (WAYS * _MAX_LOAD)).bit_length()
        self.split = capacity if split is None else split
        self._buckets: NDArray[np.uint64] = np.zeros(buckets, np.uint64)
        self._tags: NDArray[np.uint16] = self._buckets.view(np.uint16)
        self._beside: TableArray = np.zeros(buckets * WAYS, np.int32)
        self._mask: NDArray[np.uint64] = np.array(buckets - 1, np.uint64)
        self.digests: DigestArray = zeros(capacity * DIGEST_WORDS, np.uint64).reshape(capacity, DIGEST_WORDS)
        self._rows = self.digests.view(_DIGEST)[:, 0]  # one 32-byte item a row: numpy scatters rows of words slowly
        self.owner: GroupArray = zeros(capacity, np.int16)
        self.entry: NDArray[np.int32] = zeros(capacity, np.int32)
        self.twin: NDArray[np.int32] = zeros(capacity, np.int32)
        self._marks: dict[int, Marks] = {}
        self._stash = Stash()
        self._warm = 0

    @property
    def has_tiers(self) -> bool:
        """Whether nodes may have twins."""
        return self.split < len(self.owner)

    @property
    def num_buckets(self) -> int:
        """Buckets of the table."""
        return len(self._buckets)

    @property
    def stash_size(self) -> int:
        """Keys that found all their buckets full."""
        return len(self._stash.nodes)

    def owner_of(self, group: int) -> NDArray[np.int16]:
        """What `owner` says of a node with a key of this group, without dimension; UsageError for an impossible one."""
        return self._marks_of(group).owner

    def find(self, keys: DigestArray, group: int) -> Found:
        """The nodes that hold `keys` (shape `[n, 4]`) of `group`, of twins that of the first tier; the caller's."""
        if len(keys) <= AT_ONCE:
            probe = self._probe(keys, group)
            matches = _match_tags(probe)
            if len(matches) or self._stash.nodes:
                return self._verify(probe, matches)
            return Found(np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.int64))
        parts = [self.find(keys[i : i + AT_ONCE], group) for i in range(0, len(keys), AT_ONCE)]
        return Found(np.concatenate([part.present for part in parts]), np.concatenate([part.slots for part in parts]))

    def insert(self, nodes: IntArray, keys: DigestArray, *, group: int) -> BoolArray:
        """Give `nodes[i]`, all of one tier and without key, the key `keys[i]`, at most `AT_ONCE` of them.

        False where that tier has a node with this key, or where it comes earlier in this batch.
        """
        probe = self._probe(keys, group)
        matches = _match_tags(probe)
        if len(matches) or self._stash.nodes:
            found = self._verify(probe, matches)
            if has_any(found.present):  # else a tag is that of another key
                return self._insert_some(nodes, probe, found=found)
        return self._insert_new(nodes, probe)

    def attach(self, nodes: IntArray, keys: DigestArray, *, to: IntArray, owner: NDArray[np.int16]) -> None:
        """Give `nodes`, all of one tier and without key, `keys`, which the nodes `to` of the other tier hold alone.

        Both are distinct.
        """
        self.twin[to] = nodes + 1
        self.twin[nodes] = to + 1
        self._rows[nodes] = keys.view(_DIGEST)[:, 0]
        self.owner[nodes] = owner
        entries = self.entry.take(to)
        self.entry[nodes] = entries
        if len(nodes) and nodes.item(0) < self.split:
            self._show(nodes, entries)

    def remove(self, nodes: IntArray) -> None:
        """Take the keys off `nodes` (distinct, all of one tier, with keys); their twins keep them."""
        twins = self.twin.take(nodes)
        alone, paired = nodes, twins.nonzero()[0]
        if len(paired):
            self._part(nodes[paired], twins[paired].astype(np.int64) - 1)
            alone = nodes[twins == 0]
        if len(alone):
            entries = self.entry.take(alone).astype(np.int64)
            if self._stash.nodes:
                stashed = entries == _STASHED
                self._stash.remove(self._stash_keys(alone[stashed]))
                entries = entries[~stashed]
            self._tags[entries] = 0
        self.owner[nodes] = 0

    def warm(self, limit: int) -> int:
        """Touch the pages of the next `limit` buckets, so that no later call pays for them; returns how many are left.

        Keys are spread over all buckets: without this the first batches of a large index fault most of its pages in.
        """
        start, self._warm = self._warm, min(self._warm + limit, len(self._buckets))
        self._buckets[start : self._warm : _PAGE // 8] |= np.uint64(0)
        self._beside[WAYS * start : WAYS * self._warm : _PAGE // 4] |= np.int32(0)
        return len(self._buckets) - self._warm

    def count_stray_entries(self, start: int, stop: int) -> int:
        """Entries in buckets `[start, stop)` that belong to no node."""
        entries = np.flatnonzero(self._tags[WAYS * start : WAYS * stop]) + WAYS * start
        nodes = self._beside.take(entries)
        return int(np.count_nonzero((self.owner.take(nodes) == 0) | (self.entry.take(nodes) != entries)))

    def _marks_of(self, group: int) -> Marks:
        marks = self._marks.get(group)
        return self._marks.setdefault(group, marks_of(group)) if marks is None else marks

    def _probe(self, keys: DigestArray, group: int) -> _Probe:
        marks = self._marks.get(group) or self._marks_of(group)
        mixed = keys ^ marks.constant if group else keys
        buckets = (mixed & self._mask).view(np.int64)
        tags = mixed >> _TAG_SHIFT
        tags *= _IN_EACH_WAY
        tags |= _IN_EACH_WAY
        return _Probe(keys, marks.owner, buckets, tags, self._buckets[buckets])

    def _verify(self, probe: _Probe, matches: IntArray) -> Found:
        """Which keys are present, given where their tags are found."""
        n = len(probe.keys)
        entries = probe.buckets.ravel()[matches >> LOG_WAYS]
        entries <<= LOG_WAYS
        entries |= matches & WAY_MASK
        nodes = self._beside[entries].astype(np.int64)
        if len(nodes) == n:
            present = self.owner[nodes] == probe.owner
            # Comparing bytes is numpy's shortest way on short batches.
            if is_all(present) and self.digests.take(nodes, axis=0).tobytes() == probe.keys.tobytes():
                return Found(present, nodes)
        asked = matches >> _LOG_PROBES
        held, wanted = self.digests.take(nodes, axis=0), probe.keys.take(asked, axis=0)
        verified = self.owner[nodes] == probe.owner
        if not is_all(verified) or held.tobytes() != wanted.tobytes():  # a tag is that of another key
            verified &= np.equal(held, wanted).view(np.uint32)[:, 0] == FOUR_TRUE
            asked, nodes = asked[verified], nodes[verified]
        answer = Found(np.zeros(n, np.bool_), np.zeros(n, np.int64))
        answer.present[asked], answer.slots[asked] = True, nodes
        if self._stash.nodes:
            self._find_stashed(probe, answer)
        return answer

    def _find_stashed(self, probe: _Probe, answer: Found) -> None:
        missing = np.logical_not(answer.present).nonzero()[0]
        owner = probe.owner.tobytes()
        for row in missing[self._stash.find_candidates(probe.keys[missing, 0])].tolist():
            node = self._stash.nodes.get(probe.keys[row].tobytes() + owner, _STASHED)
            if node != _STASHED:
                answer.present[row] = True
                answer.slots[row] = node

    def _insert_some(self, nodes: IntArray, probe: _Probe, *, found: Found) -> BoolArray:
        """Insert what is not there; what the other tier alone has is attached to that."""
        is_new = np.logical_not(found.present)
        is_inserted = is_new.copy()
        if self.has_tiers:
            is_other = (found.slots < self.split) == (nodes.item(0) >= self.split)
            places = (found.present & is_other & (self.twin.take(found.slots) == 0)).nonzero()[0]
            to, firsts = np.unique(found.slots[places], return_index=True)
            places = places[firsts]
            self.attach(nodes[places], probe.keys[places], to=to, owner=probe.owner)
            is_inserted[places] = True
        if has_any(is_new):
            is_inserted[is_new] = self._insert_new(nodes[is_new], probe.select(is_new))
        return is_inserted

    def _insert_new(self, nodes: IntArray, probe: _Probe) -> BoolArray:
        self._rows[nodes] = probe.keys.view(_DIGEST)[:, 0]
        self.owner[nodes] = probe.owner
        repeated = self._place(nodes, probe)
        new = _ALL_NEW[: len(nodes)]
        if repeated:
            new = ~np.isin(nodes, repeated)
            self.owner[repeated] = 0
        return new

    def _place(self, nodes: IntArray, probe: _Probe) -> list[int]:
        """Give each key a place; those that lose it to a key before them try again. Returns the nodes of repeated keys.

        Each round fills at least one way of every bucket that is asked for, or stashes the keys whose buckets are full.
        Equal keys choose the same place for as long as none of them has got one: one that loses to its like is told.
        """
        _, _, buckets, tags, held = probe
        repeated: list[int] = []
        while len(nodes):
            entries, tag, empty = choose_places(buckets, tags, held=held)
            if np.count_nonzero(empty) < len(empty):
                has_room = empty != 0
                repeated += self._stash_all(nodes[~has_room])
                nodes, buckets, tags = nodes[has_room], buckets[has_room], tags[has_room]
                entries, tag = entries[has_room], tag[has_room]
            backwards = entries[::-1]  # of those that choose one place the first gets it
            self._beside[backwards] = nodes[::-1]
            self._tags[backwards] = tag[::-1]
            self.entry[nodes] = entries
            winners = self._beside[entries]
            lost = winners != nodes
            if not has_any(lost):
                break
            losers = lost.nonzero()[0]
            nodes, buckets, tags = nodes[losers], buckets[losers], tags[losers]
            is_repeat = self._rows[nodes] == self._rows[winners[losers]]
            if has_any(is_repeat):
                repeated += nodes[is_repeat].tolist()
                nodes, buckets, tags = nodes[~is_repeat], buckets[~is_repeat], tags[~is_repeat]
            held = self._buckets.take(buckets)
        return repeated

    def _part(self, nodes: IntArray, twins: IntArray) -> None:
        """These nodes leave, their twins stay and stand in the table."""
        self.twin[nodes] = 0
        self.twin[twins] = 0
        if nodes.item(0) < self.split:
            self._show(twins, self.entry.take(nodes))

    def _show(self, nodes: IntArray, entries: NDArray[np.int32]) -> None:
        """Of the keys with these entries, these are the nodes that stand in the table."""
        if self._stash.nodes:
            stashed = entries == _STASHED
            for key, node in zip(self._stash_keys(nodes[stashed]), nodes[stashed].tolist(), strict=True):
                self._stash.move(key, node=node)
            nodes, entries = nodes[~stashed], entries[~stashed]
        self._beside[entries] = nodes

    def _stash_all(self, nodes: IntArray) -> list[int]:
        """Stash the keys of these nodes. Returns the nodes of those that are stashed already."""
        self.entry[nodes] = _STASHED
        return self._stash.put(self._stash_keys(nodes), nodes.tolist())

    def _stash_keys(self, nodes: SlotArray) -> list[bytes]:
        return [self.digests[node].tobytes() + self.owner[node].tobytes() for node in nodes.tolist()]


def _match_tags(probe: _Probe) -> IntArray:
    """Where buckets hold the tag of a key: flat places of `[n, 4 buckets, 4 ways]`, ascending."""
    matches: IntArray = ((probe.held ^ probe.tags).view(np.uint16) == EMPTY_TAG).ravel().nonzero()[0]
    return matches
