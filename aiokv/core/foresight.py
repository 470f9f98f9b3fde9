"""Finding out beforehand where a long prompt's blocks lie, in slices, so that its admission is short (law 8).

Duty: looking up thousands of blocks is long for one hold. Slices of it run before, and put down with the keys where
each block was. The lookup at admission looks there first: comparing a hash with that of one known slot takes a fraction
of a search. What is not there is searched for only if it may have come meanwhile (`arrivals.py`). A lookup in vain puts
down what it has found, too.

Rules: pure but for the keys' own notes. A slot is never believed, only verified; so is, by its last hash, that a search
was for these very tokens; what was found out for another cache is not seen.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np

from aiokv.core.lookup import Residency
from aiokv.core.masks import is_all
from aiokv.core.probing import GroupResidency, Guesses, Prober, Search
from aiokv.core.slices import Job
from aiokv.core.world import World
from aiokv.model.ids import IntArray, Tier
from aiokv.model.keys import BlockKeys

__all__ = ["LONG_BLOCKS", "Foresight", "find_guesses", "remember"]

LONG_BLOCKS: Final = 2048
"""Shorter prompts are looked up at once."""


def find_guesses(world: World, keys: BlockKeys) -> Guesses | None:
    """What was found out beforehand for this cache, if anything was."""
    guesses: Guesses | None = keys.notes.get(world.identity) if keys.notes else None
    if guesses is None or all(_is_for(world, keys, index=i, search=s) for i, s in guesses.searches.items()):
        return guesses
    return guesses._replace(searches={})


def remember(world: World, keys: BlockKeys, *, residency: Residency) -> None:
    """Who was looked up in vain asks again: put down with a long prompt's keys what was found."""
    if keys.num_blocks < LONG_BLOCKS:
        return
    notes = _Notes(world, keys)
    for index in world.geometry.full_groups:
        notes.add(residency.groups[index], index=index, start=0)
    notes.put_down()


@final
class Foresight:
    """Looks up what is about to be admitted."""

    __slots__ = ("_world",)

    def __init__(self, world: World) -> None:
        self._world = world

    def look(self, keys: BlockKeys) -> Job:
        """Look for the blocks of full groups, which are hashed already, a slice at a time, until one is in no tier.

        Nothing is looked for in a prompt of fewer than `LONG_BLOCKS` hash blocks.
        """
        if keys.num_blocks < LONG_BLOCKS:
            return
        notes = _Notes(self._world, keys)
        for index in self._world.geometry.full_groups:
            for start in range(0, _count_blocks(self._world, keys, index=index), self._world.slice_blocks):
                found = self._probe(keys, index, start)
                notes.add(found, index=index, start=start)
                if not is_all(found.present):
                    break
                yield
        notes.put_down()

    def _probe(self, keys: BlockKeys, index: int, start: int) -> GroupResidency:  # noqa: PLR0917  # of group i from here
        world = self._world
        gpu, cpu = world.gpu, world.usable_cpu
        prober = Prober(world.geometry, keys, gpu=gpu, cpu=cpu, without=(), guesses=None, joint=world)
        stop = min(start + world.slice_blocks, _count_blocks(world, keys, index=index))
        return prober.probe_slice(index, start, stop)


@final
class _Notes:
    """What is about to be put down with the keys of one prompt."""

    __slots__ = ("_keys", "_moment", "_searches", "_slots", "_world")

    def __init__(self, world: World, keys: BlockKeys) -> None:
        self._world = world
        self._keys = keys
        self._moment = world.gpu.begin_moment()
        self._searches: dict[int, Search] = {}
        self._slots: dict[tuple[Tier, int], IntArray] = {}
        """For each block of the full groups, in each tier: it may lie anywhere."""
        for index in world.geometry.full_groups:
            for tier in Tier:
                self._slots[tier, index] = np.zeros(_count_blocks(world, keys, index=index), np.int64)

    def add(self, found: GroupResidency, *, index: int, start: int) -> None:
        """The blocks of group `index` from `start` on were looked for, after all before them."""
        stop = start + len(found.present)
        np.copyto(self._slots[Tier.GPU, index][start:stop], found.gpu_slots, where=found.on_gpu)
        np.copyto(self._slots[Tier.CPU, index][start:stop], found.cpu_slots, where=found.on_cpu)
        if stop:
            last = _hash_at(self._world, self._keys, index=index, block=stop - 1)
            self._searches[index] = Search(blocks=stop, last=last, moment=self._moment)

    def put_down(self) -> None:
        """Let whoever asks for these keys know."""
        slots = {place: slots for place, slots in self._slots.items() if np.count_nonzero(slots)}
        self._keys.notes[self._world.identity] = Guesses(slots, searches=self._searches)


def _is_for(world: World, keys: BlockKeys, *, index: int, search: Search) -> bool:
    """Whether a search was for these keys, which may have other tokens by now, or fewer, or not be hashed so far."""
    is_hashed = search.blocks * world.geometry.hashes_per_block(index) <= keys.num_hashed
    return is_hashed and _hash_at(world, keys, index=index, block=search.blocks - 1) == search.last


def _hash_at(world: World, keys: BlockKeys, *, index: int, block: int) -> bytes:
    return keys.digests(world.geometry.hashes_per_block(index), block, block + 1).tobytes()


def _count_blocks(world: World, keys: BlockKeys, *, index: int) -> int:
    return keys.num_blocks // world.geometry.hashes_per_block(index)
