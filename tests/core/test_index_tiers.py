"""Two indexes over one table against two dicts: what one tier does changes no answer of the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv.core.index import SlotIndex
from aiokv.core.index_table import SlotTable
from aiokv.errors import UsageError
from aiokv.model.ids import DigestArray, IntArray, Tier
from aiokv.model.plan import Found

FIRST, SECOND = 24, 40
"""Slots of the tiers; a table for both has 32 buckets."""


def random_keys(n: int, seed: int = 0) -> DigestArray:
    return np.random.default_rng(seed).integers(0, 2**64, (n, 4), dtype=np.uint64)


def colliding_keys(n: int) -> DigestArray:
    """Keys with the same four buckets and the same tags: all but sixteen of them are stashed."""
    keys = np.empty((n, 4), dtype=np.uint64)
    keys[:] = np.array((1, 2, 3, 4), dtype=np.uint64)
    keys += (np.arange(n, dtype=np.uint64) << np.uint64(8))[:, None]
    return keys


@dataclass
class Tiers:
    """Both indexes, and what each should hold: slot by place of the key in `keys`."""

    keys: DigestArray
    first: SlotIndex
    second: SlotIndex
    held: dict[Tier, dict[int, int]] = field(default_factory=lambda: {Tier.GPU: {}, Tier.CPU: {}})

    @classmethod
    def over(cls, keys: DigestArray) -> Tiers:
        table = SlotTable(FIRST + SECOND, split=FIRST)
        return cls(keys, SlotIndex(FIRST, table=table), SlotIndex(SECOND, table=table, base=FIRST))

    def index(self, tier: Tier) -> SlotIndex:
        return self.first if tier is Tier.GPU else self.second

    def free_slots(self, tier: Tier, count: int) -> IntArray:
        slots = FIRST if tier is Tier.GPU else SECOND
        return np.array(sorted(set(range(slots)) - set(self.held[tier].values()))[:count], np.int64)

    def insert(self, tier: Tier, places: list[int]) -> None:
        """New are those that the tier does not hold, each where it comes first."""
        slots = self.free_slots(tier, len(places))
        places = places[: len(slots)]
        is_new = self.index(tier).insert(slots, self.keys[places], group=0)
        self._note(tier, places, slots=slots, is_new=is_new.tolist())

    def copy(self, tier: Tier, places: list[int]) -> None:
        """The same for distinct keys, told where the other tier holds them; where it does not, told something wrong."""
        other = Tier.CPU if tier is Tier.GPU else Tier.GPU
        slots = self.free_slots(tier, len(places))
        places = places[: len(slots)]
        unused = iter(self.free_slots(other, len(places)).tolist())
        named = [self.held[other].get(place, -1) for place in places]
        sources = np.array([slot if slot >= 0 else next(unused, -1) for slot in named], np.int64)
        if (sources >= 0).all():
            is_new = self.index(tier).insert_copies(slots, self.keys[places], group=0, of=sources)
            self._note(tier, places, slots=slots, is_new=is_new.tolist())

    def remove(self, tier: Tier, places: list[int]) -> None:
        gone = [place for place in places if place in self.held[tier]]
        self.index(tier).remove(np.array([self.held[tier].pop(place) for place in gone], np.int64))

    def _note(self, tier: Tier, places: list[int], *, slots: IntArray, is_new: list[bool]) -> None:
        for place, slot, new in zip(places, slots.tolist(), is_new, strict=True):
            assert new == (place not in self.held[tier])
            self.held[tier].setdefault(place, slot)

    def check(self) -> None:
        both = self.first.find_in_both(self.keys, 0)
        nothing = Found(np.zeros(len(self.keys), np.bool_), np.zeros(len(self.keys), np.int64))
        for tier, joint in ((Tier.GPU, both.first), (Tier.CPU, both.second or nothing)):
            index, held = self.index(tier), self.held[tier]
            lacking = {p: s for p, s in held.items() if tier is Tier.GPU or p not in self.held[Tier.GPU]}
            for found, expected in ((joint, lacking), (index.find(self.keys, 0), held)):
                told = [s if p else None for s, p in zip(found.slots.tolist(), found.present, strict=True)]
                assert told == [expected.get(place) for place in range(len(self.keys))]
            assert not index.find(self.keys, 1).present.any()
            assert len(index) == len(held)
            assert index.check_invariants() == []
            self._check_copies(tier)

    def _check_copies(self, tier: Tier) -> None:
        """Every slot knows its copy in the other tier."""
        other = self.held[Tier.CPU if tier is Tier.GPU else Tier.GPU]
        copies = self.index(tier).find_copies(np.array(list(self.held[tier].values()), np.int64))
        told = [s if p else None for s, p in zip(copies.slots.tolist(), copies.present, strict=True)]
        assert told == [other.get(place) for place in self.held[tier]]


@settings(max_examples=200, deadline=None)
@given(st.data())
@pytest.mark.parametrize("make_keys", [random_keys, colliding_keys])
def test_any_sequence_of_calls_answers_like_two_dicts(make_keys: type, data: st.DataObject) -> None:
    tiers = Tiers.over(make_keys(30))
    place = st.integers(0, 29)
    for _ in range(data.draw(st.integers(1, 12))):
        tier = data.draw(st.sampled_from(Tier))
        match data.draw(st.sampled_from(("insert", "copy", "remove"))):
            case "insert":
                tiers.insert(tier, data.draw(st.lists(place, max_size=20)))
            case "copy":
                tiers.copy(tier, data.draw(st.lists(place, max_size=20, unique=True)))
            case _:
                tiers.remove(tier, data.draw(st.lists(place, max_size=20, unique=True)))
        tiers.check()


def test_a_copy_is_known_to_the_slot_it_was_made_of() -> None:
    tiers = Tiers.over(random_keys(5))
    tiers.insert(Tier.GPU, [0, 1, 2])
    tiers.copy(Tier.CPU, [0, 1, 2])
    assert tiers.first.find_copies(np.array([0, 1, 2])).present.all()
    tiers.remove(Tier.CPU, [1])
    assert tiers.first.find_copies(np.array([0, 1, 2])).present.tolist() == [True, False, True]
    tiers.check()


def test_a_key_stays_with_the_tier_that_is_left() -> None:
    for leaving in Tier:
        tiers = Tiers.over(random_keys(8))
        tiers.insert(Tier.GPU, list(range(8)))
        tiers.copy(Tier.CPU, list(range(8)))
        tiers.remove(leaving, list(range(8)))
        tiers.check()


def test_stashed_keys_have_copies_too() -> None:
    tiers = Tiers.over(colliding_keys(20))
    tiers.insert(Tier.GPU, list(range(20)))
    assert tiers.first.stash_size == 4
    tiers.copy(Tier.CPU, list(range(20)))
    tiers.remove(Tier.GPU, list(range(10, 20)))
    tiers.check()
    tiers.remove(Tier.CPU, list(range(20)))
    tiers.check()
    assert tiers.second.stash_size == 0


def test_copies_of_a_slot_with_another_key_are_searched_for() -> None:
    tiers = Tiers.over(random_keys(4))
    tiers.insert(Tier.GPU, [0, 1])
    is_new = tiers.second.insert_copies(np.array([5, 6]), tiers.keys[[1, 3]], group=0, of=np.array([0, 1]))
    assert is_new.all()
    tiers.held[Tier.CPU] = {1: 5, 3: 6}
    tiers.check()


def test_refused_copies_change_nothing() -> None:
    tiers = Tiers.over(random_keys(4))
    tiers.insert(Tier.GPU, [0, 1])
    tiers.copy(Tier.CPU, [0])
    with pytest.raises(UsageError):
        tiers.second.insert_copies(np.array([0]), tiers.keys[[1]], group=0, of=np.array([1]))
    tiers.check()
