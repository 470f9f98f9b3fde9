"""The audit of one pool in slices: who holds each slot, what each slot is, and whether the counts agree.

Duty: visit every slot once, and again those that have changed, and judge each as it is at that moment.

State: per slot its pins as the holders have them, how often it lies on the free stack, and its facts as of its last
visit; slots counted by their facts; how far the stack and the buckets of the index were read. A slot that changed since
its visit is due in the watch: the pool notes it, and so does whatever changes a number here.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from aiokv.core.pool import Pool
from aiokv.core.slot_facts import (
    ARRIVING,
    MISCOUNTED,
    PATTERNS,
    STALE,
    count_patterns,
    count_slots,
    find_broken_rules,
    find_wrong_counts,
)  # fmt: skip
from aiokv.core.slot_memory import zeros
from aiokv.core.watching import SlotWatch, StackWatch
from aiokv.model.ids import NULL_SLOT, IntArray, SlotArray, Tier

__all__ = ["CHANGES_PER_COST", "VISIT_COST", "PoolAudit"]

VISIT_COST: Final = 256
"""What it costs to visit a holder, beside the slots it holds: as much as looking at so many slots."""
CHANGES_PER_COST: Final = 12
"""So many slots that a holder has no longer, or has now, cost as much as looking at one slot."""

_NAMED_AT_MOST: Final = 32
"""Slots with wrong pins that are told one by one."""
_ONE: Final = np.int32(1)
"""Of the arrays' own type, with which `add.at` is thirty times faster."""


class _Change(NamedTuple):
    """Slots that a holder has no longer, and those that it has now."""

    gone: IntArray
    come: IntArray


@final
class PoolAudit:
    """What an audit knows of one pool. `close` it, or the pool goes on telling it of changes."""

    __slots__ = (
        "_arriving", "_books", "_epoch", "_facts", "_held", "_knows_stack", "_nowhere", "_pool", "_read_buckets",
        "_read_stack", "_stack_copy", "_stack_watch", "_stacked", "_strays", "_suspects", "_tally", "_watch",
    )  # fmt: skip

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._books = pool.books
        size = len(self._books)
        self._held: NDArray[np.int32] = zeros(size, np.int32)
        self._arriving: NDArray[np.int32] = zeros(size, np.int32)
        self._stacked: NDArray[np.int8] = zeros(size, np.int8)
        self._facts: NDArray[np.uint16] = zeros(size, np.uint16)
        self._tally: IntArray = np.zeros(PATTERNS, np.int64)
        self._tally[0] = size
        self._stack_copy: SlotArray = np.empty(size, np.int32)
        self._read_stack = 0
        self._knows_stack = False
        self._read_buckets = 0
        self._strays = 0
        self._nowhere = 0
        self._suspects: dict[int, str] = {}
        self._epoch = pool.epoch
        self._watch = SlotWatch(size)
        self._stack_watch = StackWatch()
        pool.watchers.append(self._watch)
        self._books.free.watchers.append(self._stack_watch)

    def close(self) -> None:
        """Be told of no more changes. Idempotent."""
        if self._watch in self._pool.watchers:
            self._pool.watchers.remove(self._watch)
            self._books.free.watchers.remove(self._stack_watch)

    @property
    def is_first_pass(self) -> bool:
        """Whether something has never been looked at."""
        return not self._knows_stack or self._watch.is_first_pass or self._read_buckets < self._books.index.num_buckets

    @property
    def is_behind(self) -> bool:
        """Whether the free stack is not known as it is now: then no slot may be visited."""
        return self._knows_stack and self._stack_is_due

    @property
    def changed_count(self) -> int:
        """How many slots have changed since their visit."""
        return self._watch.changed_count

    def settle(self) -> None:
        """Have the books tell of every lease that has left."""
        self._pool.settle()

    # What holders have.

    def exchange(self, before: SlotArray, after: SlotArray) -> int:
        """A holder has other slots at its positions than before, of which the null block is none.

        Returns how many differ.
        """
        change = self._compare(before, after)
        np.add.at(self._held, change.gone, -_ONE)
        np.add.at(self._held, change.come, _ONE)
        return len(change.gone) + len(change.come)

    def exchange_targets(self, before: SlotArray, after: SlotArray) -> int:
        """Like `exchange`, for slots into which copies run."""
        change = self._compare(before, after)
        for count in (self._held, self._arriving):
            np.add.at(count, change.gone, -_ONE)
            np.add.at(count, change.come, _ONE)
        return len(change.gone) + len(change.come)

    # Slices.

    def read_stack(self, limit: int) -> int:
        """Follow the free stack, about `limit` entries; returns how many were looked at."""
        free = self._books.free
        kept = min(self._read_stack, self._stack_watch.low)
        start = max(kept, self._read_stack - limit)
        gone = self._stack_copy[start : self._read_stack]
        self._stack(gone, times=-1)
        done = len(gone)
        self._read_stack = start
        if start == kept:
            come = free.returned_between(start, start + limit)
            self._stack_copy[start : start + len(come)] = come
            self._stack(come, times=1)
            done += len(come)
            self._read_stack = self._stack_watch.low = start + len(come)
        return done

    def look_again(self, limit: int) -> int:
        """Visit up to `limit` slots that changed since their last visit; returns how many."""
        slots = self._watch.take_changed(limit)
        return self._visit(slots) if len(slots) else 0

    def look_on(self, limit: int) -> int:
        """Read on in what was never looked at: `limit` entries of the stack, slots, or buckets; returns how many."""
        if not self._knows_stack:
            done = self.read_stack(limit)
            self._knows_stack = not self._stack_is_due
            return done
        if self._watch.is_first_pass:
            return self._visit(self._watch.take_next(limit))
        start = self._read_buckets
        self._read_buckets = min(start + limit, self._books.index.num_buckets)
        self._strays += self._books.index.count_stray_entries(start, self._read_buckets)
        return self._read_buckets - start

    def find_violations(self) -> list[str]:
        """What is wrong, in words; O(1). Meaningful after the first pass.

        Counts are compared as of now, as well as they can be while some slots are due.
        """
        tier = self._pool.tier.value
        doubtful = self._watch.changed_count
        slots = count_patterns(self._tally)
        found = find_broken_rules(slots)
        found += find_wrong_counts(slots, self._pool.counts(), doubtful=doubtful)
        stale = count_slots(slots, STALE)
        if self._epoch == self._pool.epoch and abs(stale - self._pool.stale_count) > doubtful:
            found.append(f"{stale} slots are stale, counted {self._pool.stale_count}")
        if self._strays:
            found.append(f"the index has {self._strays} entries without a slot")
        if self._nowhere:
            found.append(f"{self._nowhere} slots are held that do not exist")
        return [f"{tier}: {text}" for text in found] + self._name_miscounted(count_slots(slots, MISCOUNTED))

    @property
    def _stack_is_due(self) -> bool:
        return self._stack_watch.low < self._read_stack or self._read_stack < self._books.free.returned_count

    def _compare(self, before: SlotArray, after: SlotArray) -> _Change:
        """What differs, which is due from now on; slots that do not exist are counted apart."""
        common = min(len(before), len(after))
        differ = before[:common] != after[:common]
        gone = np.concatenate((before[:common][differ], before[common:]))
        come = np.concatenate((after[:common][differ], after[common:]))
        if self._pool.tier is Tier.GPU:
            gone, come = gone[gone != NULL_SLOT], come[come != NULL_SLOT]
        change = _Change(self._existing(gone), self._existing(come))
        self._nowhere += len(come) - len(change.come) - len(gone) + len(change.gone)
        return change

    def _existing(self, slots: SlotArray) -> IntArray:
        known = slots[(slots >= self._books.first) & (slots < len(self._books))].astype(np.int64)
        self._watch.note(known)
        return known

    def _stack(self, slots: SlotArray, *, times: int) -> None:
        np.add.at(self._stacked, slots, np.int8(times))
        self._watch.note(slots)

    def _visit(self, slots: IntArray) -> int:
        """Judge `slots` (distinct). What the holders have and the free stack must be known as they are now."""
        facts = self._books.find_facts(slots, stacked=self._stacked.take(slots))
        held = self._held.take(slots)
        wrong = self._books.pins.take(slots) != held
        facts |= wrong * np.uint16(MISCOUNTED)
        facts |= (self._arriving.take(slots) > 0) * np.uint16(ARRIVING)
        now, before = np.bincount(facts), np.bincount(self._facts.take(slots))
        self._tally[: len(now)] += now
        self._tally[: len(before)] -= before
        self._facts[slots] = facts
        if self._suspects:
            for slot in slots[np.isin(slots, list(self._suspects))].tolist():
                del self._suspects[slot]
        if np.count_nonzero(wrong):
            self._suspect(slots[wrong])
        return len(slots)

    def _suspect(self, slots: IntArray) -> None:
        """Remember in words what was wrong with a few slots, so that they can be named at the end."""
        tier = self._pool.tier.value
        for slot in slots[: _NAMED_AT_MOST - len(self._suspects)].tolist():
            pins, held = self._books.pins[slot], self._held[slot]
            self._suspects[slot] = f"{tier} slot {slot} has {pins} pins, {held} holders"

    def _name_miscounted(self, count: int) -> list[str]:
        """Invariant 2: a slot has as many pins as live leases, transfers and hints hold it."""
        found = [self._suspects[slot] for slot in sorted(self._suspects)]
        if count > len(found):
            found.append(f"{count - len(found)} more {self._pool.tier.value} slots have wrong pins")
        return found
