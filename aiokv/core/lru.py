"""The order in which unpinned slots are evicted: a flat ring of slots, in the order of their pushes.

Duty: say which slots were released longest ago, for whole batches of slots.

Rules: eviction order is the order of pushes, exactly, whatever was dropped or compacted meanwhile; a slot that was
lifted out may return to its place, or to the cold end once a trim or a compaction has passed that place. No call does
more than O(its own batch + a constant) work, save `pop`, `peek` and `trim`, which have a scan limit. Nothing grows.

State: positions are absolute and start far above 0, as the cold end may grow downwards; position p lies at
`ring[p % R]`, `R = 3 C` for C slots. `seat[slot]` is the position of a slot, 0 if it is not queued, `-p` if it was
lifted from p. **The entry at p is live iff `seat[ring[p % R]] == p`.** Dropping or lifting a slot only changes its
seat: the dead entry stays until `pop`, a trim or a compaction passes it.

    head        packed        reader          tail
      |  packed  |  gap, dead   |  not yet read |        (without a pass: packed = reader = head)

A compaction pass moves live entries forward, order kept, into the gap that dead ones leave; when the reader meets the
tail, the tail falls back to `packed`. A dead entry cannot come alive: a seat only ever takes a position at the moment
when that position is written, and each slot has one seat.

**The ring cannot overflow.** A push of m entries runs at least 4m steps of the pass before it appends, and starts a
pass if `used + m > 2C` (`used = tail - head`). Claim: without a pass `used <= 2C`, and in a pass at most `2C - 3s`
entries are unread, s being the entries pushed since it began. (1) A pass begins with at most 2C unread; each push of m
adds m and reads 4m. (2) While it is unfinished s < 2C/3, so `used <= 2C + s < 3C`. (3) When it ends inside a push, at
most `C + s` entries remain: one for each slot at its beginning, and those pushed since. If `C + s + m <= 2C` the claim
holds again. If not, m > C - s and another pass begins, with the `4m - (2C - 3s)` steps that are left: for s <= C/2
these are at least C + s, so it ends at once and leaves live entries only (these and the m new ones are at most C); for
s > C/2 its unread entries are, after the push, at most `C + s + m - 4m + 2C - 3s < 2C - 3m`, as claimed. (4) Pops and
trims only move the head on, and where no entry is dead `used + m <= C`. (5) Slots
that return are counted like a push of m, which lays those whose place has gone before the head. The others take no new
entry; the head falls back for them only without a pass and only to `tail - 2C + m`, so `used <= 2C` holds. Between an
old place and the head all entries are dead, as their slots sit elsewhere, and their ring cells were not reused.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np

from aiokv.core.masks import is_all
from aiokv.core.slot_memory import zeros
from aiokv.errors import UsageError
from aiokv.model.ids import BoolArray, IntArray, SlotArray, TableArray

__all__ = ["EvictionQueue"]

_FIRST: Final = 1 << 48
_STEPS_PER_ENTRY: Final = 4
_SPARE_STEPS: Final = 64
_NOT_QUEUED: Final = np.array(0, np.int64)
_MIN_SCAN: Final = 64
"""Entries of the first scan for a few slots; each other is twice as long, so that many dead ones take few scans."""


@final
class EvictionQueue:
    """Slots in `[0, capacity)`, coldest first."""

    __slots__ = ("_capacity", "_head", "_packed", "_passing", "_reader", "_ring", "_seat", "_size", "_tail", "count")

    def __init__(self, capacity: int) -> None:
        """`capacity` is one more than the largest slot."""
        if capacity <= 0:
            raise UsageError(f"an eviction queue needs at least one slot, not {capacity}")
        self._capacity = capacity
        self._size = 3 * capacity
        self._ring: TableArray = zeros(self._size, np.int32)
        self._seat: IntArray = zeros(capacity, np.int64)
        self._head = _FIRST
        self._tail = _FIRST
        self.count = 0
        """How many slots are queued: read it, never write."""
        self._passing = False
        self._packed = _FIRST
        self._reader = _FIRST

    def __len__(self) -> int:
        """How many slots are queued."""
        return self.count

    @property
    def used(self) -> int:
        """Entries of the ring in use, dead ones included; never more than 3 x capacity."""
        return self._tail - self._head

    def is_queued(self, slots: SlotArray) -> BoolArray:
        """Which of `slots` are queued."""
        return np.greater(self._seat.take(slots), 0)

    def push(self, slots: SlotArray) -> None:
        """Queue `slots` (distinct, none queued) at the recent end; the first of them is evicted first."""
        m = len(slots)
        self._make_room(m)
        self._write(self._tail, slots)
        self._tail += m
        self.count += m

    def try_lift(self, slots: SlotArray) -> bool:
        """Take `slots` (distinct) out and remember where they were, until they are queued again.

        False, and nothing changed, if one of them is not queued.
        """
        seats = self._seat[slots]
        if not is_all(seats > 0):
            return False
        self._seat[slots] = -seats
        self.count -= len(slots)
        return True

    def restore(self, slots: SlotArray) -> None:
        """Queue `slots` (distinct, none queued) where they were lifted from, or before all others if that has gone."""
        at = slots.astype(np.int64)
        self._make_room(len(at))
        places = -self._seat.take(at)
        lowest = self._head if self._passing else self._tail - 2 * self._capacity + len(at)
        stands = (places > 0) & (places >= lowest) & (places < self._tail)
        stands &= self._ring.take(places % self._size) == at
        if self._passing:
            stands &= (places < self._packed) | (places >= self._reader)
        back = at[stands]
        if len(back):
            self._seat[back] = places[stands]
            self.count += len(back)
            self._head = min(self._head, int(places[stands].min()))
        self._push_coldest(at[~stands])

    def trim(self, scan_limit: int) -> None:
        """Pass up to `scan_limit` dead entries at the cold end: the order stays, `peek` need not look at them."""
        if self.count == 0:
            self._head = self._packed = self._reader = self._tail
            self._passing = False
            return
        while scan_limit > 0:
            self._skip_gap()
            if self._is_head_live():
                return
            start, size = self._next_scan(scan_limit, scan_limit)
            live = self._live_between(start, size)
            first = int(live.argmax())
            if live[first]:
                self._head = start + first
                return
            self._head = start + size
            scan_limit -= size

    def renew(self, slots: SlotArray) -> None:
        """Move `slots` (distinct, all queued) to the recent end, in this order."""
        self.drop(slots)
        self.push(slots)

    def drop(self, slots: SlotArray) -> None:
        """Take `slots` (distinct, all queued) out of the queue."""
        self._seat[slots] = _NOT_QUEUED
        self.count -= len(slots)

    def pop(self, n: int, scan_limit: int) -> IntArray:
        """Take up to `n` slots off the cold end, looking at `scan_limit` entries at most.

        Fewer if the limit was hit or the queue is empty; the next call goes on where this one stopped.
        """
        if n == 1 and scan_limit > 0 and self.count and self._is_head_live():
            return self._pop_head()
        taken: list[IntArray] = []
        length = max(n, _MIN_SCAN)
        while n > 0 and scan_limit > 0 and self.count:
            start, size = self._next_scan(length, scan_limit)
            length *= 2
            if not size:
                break  # the count is wrong, which an audit reports: never a loop without end
            entries = self._entries(start, size).astype(np.int64)
            live = self._seat[entries] == np.arange(start, start + size)
            slots = entries[live]
            self._head = start + size
            if len(slots) > n:
                self._head = start + int(live.nonzero()[0][n])
                slots = slots[:n]
            self._seat[slots] = _NOT_QUEUED
            self.count -= len(slots)
            n -= len(slots)
            scan_limit -= size
            taken.append(slots)
        if len(taken) == 1:
            return taken[0]
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def peek(self, n: int, scan_limit: int) -> IntArray:
        """What `pop` would take; changes nothing."""
        taken: list[IntArray] = []
        position, length = self._head, max(n, _MIN_SCAN)
        while n > 0 and scan_limit > 0 and position < self._tail:
            if self._passing and self._packed <= position < self._reader:
                position = self._reader
                continue
            stop = self._packed if self._passing and position < self._packed else self._tail
            size = min(length, scan_limit, stop - position, self._size - position % self._size)
            slots = self._entries(position, size)[self._live_between(position, size)][:n].astype(np.int64)
            n -= len(slots)
            scan_limit -= size
            position += size
            length *= 2
            taken.append(slots)
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def is_misplaced(self, slots: SlotArray) -> BoolArray:
        """Which of `slots` are queued and have no live entry: `pop` would never come to them."""
        seats = self._seat.take(slots)
        lies = (seats >= self._head) & (seats < self._tail) & (self._ring.take(seats % self._size) == slots)
        if self._passing:
            lies &= (seats < self._packed) | (seats >= self._reader)
        misplaced: BoolArray = (seats > 0) & ~lies
        return misplaced

    def check_invariants(self) -> list[str]:
        """Violations found by a full recount; O(capacity)."""
        found = []
        queued = int((self._seat > 0).sum())
        if queued != self.count:
            found.append(f"{queued} slots are queued, counted {self.count}")
        if len(self.peek(self._capacity + 1, 2 * self._size)) != queued:
            found.append("not every queued slot has exactly one live entry")
        if not self._head <= self._tail <= self._head + self._size:
            found.append(f"the ring of {self._size} holds {self.used} entries")
        return found

    def _is_head_live(self) -> bool:
        """Whether the first entry is that of a queued slot; within the gap of a pass none is."""
        return self._seat.item(self._ring.item(self._head % self._size)) == self._head

    def _pop_head(self) -> IntArray:
        """Take the one slot that the first entry, a live one, stands for: without arrays, as a request needs it that
        goes on by one block."""
        slot = self._ring.item(self._head % self._size)
        self._seat[slot] = 0
        self._head += 1
        self.count -= 1
        return np.array((slot,))

    def _push_coldest(self, slots: IntArray) -> None:
        """Queue `slots` at the cold end, for which there is room; the first of them is evicted first of all."""
        self._head -= len(slots)
        self._write(self._head, slots)
        self.count += len(slots)

    def _make_room(self, m: int) -> None:
        """Before `m` entries are pushed: pass and compact dead ones."""
        if self.count == self.used:
            self._passing = False  # no dead entry, so no gap either
            return
        if self._passing or not self._is_head_live():
            self.trim(m + _SPARE_STEPS)
        if self._passing or self.used + m > 2 * self._capacity:
            self._compact(m)

    def _write(self, position: int, slots: SlotArray) -> None:
        """Seat `slots` at `position` and behind it."""
        m = len(slots)
        at = position % self._size
        first = self._size - at
        if m <= first:
            self._ring[at : at + m] = slots
        else:
            self._ring[at:] = slots[:first]
            self._ring[: m - first] = slots[first:]
        self._seat[slots.astype(np.int64, copy=False)] = np.arange(position, position + m)

    def _entries(self, start: int, size: int) -> TableArray:
        """The entries of `[start, start + size)`, a view; the range does not wrap."""
        at = start % self._size
        return self._ring[at : at + size]

    def _live_between(self, start: int, size: int) -> BoolArray:
        """Which entries of `[start, start + size)` are live; the range does not wrap."""
        return np.equal(self._seat.take(self._entries(start, size)), np.arange(start, start + size))

    def _next_scan(self, wanted: int, limit: int) -> tuple[int, int]:
        """The next entries from the cold end: where they start and how many; at least one, as a live one exists."""
        self._skip_gap()
        start = self._head
        stop = self._packed if self._passing and start < self._packed else self._tail
        return start, min(wanted, limit, stop - start, self._size - start % self._size)

    def _skip_gap(self) -> None:
        """Once all packed entries are passed, the cold end is where the pass reads."""
        if self._passing and self._head >= self._packed:
            self._head = self._packed = self._reader = max(self._head, self._reader)

    def _compact(self, m: int) -> None:
        """Run the pass before `m` entries are appended; see the module's docstring for why this is enough."""
        steps = _STEPS_PER_ENTRY * m + _SPARE_STEPS
        self._skip_gap()
        while steps > 0:
            if not self._passing:
                if self.used + m <= 2 * self._capacity or self.count == self.used:
                    return
                self._passing = True
                self._packed = self._reader = self._head
            size = min(steps, self._tail - self._reader, self._size - self._reader % self._size)
            self._pack(size)
            steps -= size
            if self._reader == self._tail:
                self._tail = self._packed
                self._passing = False

    def _pack(self, size: int) -> None:
        """Move the live ones of the next `size` entries behind those that are packed."""
        slots = self._entries(self._reader, size)[self._live_between(self._reader, size)]
        k = len(slots)
        self._write(self._packed, slots)
        self._packed += k
        self._reader += size
