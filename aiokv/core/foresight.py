"""Finding out beforehand where a long prompt's blocks lie, in slices, so that its admission is short (law 8).

Duty: looking up thousands of blocks is long for one hold. Slices of it run before, and put down with the keys where
each block was. The lookup at admission looks there first: comparing a hash with that of one known slot takes a fraction
of a search, and only what has moved or is missing is searched for. A lookup in vain puts down what it has found, too.

Rules: pure but for the keys' own notes. A guess is never believed, only verified; that of another cache is not seen.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np

from aiokv.core.lookup import Residency
from aiokv.core.probing import GroupResidency, Guesses, Prober, is_all
from aiokv.core.slices import Job
from aiokv.core.world import World
from aiokv.model.ids import Tier
from aiokv.model.keys import BlockKeys

__all__ = ["LONG_BLOCKS", "Foresight", "find_guesses", "remember"]

LONG_BLOCKS: Final = 2048
"""Shorter prompts are looked up at once."""


def find_guesses(world: World, keys: BlockKeys) -> Guesses | None:
    """What was found out beforehand for this cache, if anything was."""
    return keys.notes.get(world.identity) if keys.notes else None


def remember(world: World, keys: BlockKeys, *, residency: Residency) -> None:
    """Who was looked up in vain asks again: put down with a long prompt's keys what was found."""
    if keys.num_blocks < LONG_BLOCKS:
        return
    guesses = _new_guesses(world, keys)
    for index in world.geometry.full_groups:
        _fill(guesses, residency.groups[index], index=index, start=0)
    _put_down(world, keys, guesses=guesses)


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
        guesses = _new_guesses(self._world, keys)
        for index in self._world.geometry.full_groups:
            for start in range(0, len(guesses[Tier.GPU, index]), self._world.slice_blocks):
                found = self._probe(keys, index, start)
                _fill(guesses, found, index=index, start=start)
                if not is_all(found.present):
                    break
                yield
        _put_down(self._world, keys, guesses=guesses)

    def _probe(self, keys: BlockKeys, index: int, start: int) -> GroupResidency:  # noqa: PLR0917  # of group i from here
        world = self._world
        prober = Prober(
            world.geometry, keys, gpu=world.gpu, cpu=world.usable_cpu, without=(), guesses=None, joint=world
        )
        blocks = keys.num_blocks // world.geometry.hashes_per_block(index)
        return prober.probe_slice(index, start, min(start + world.slice_blocks, blocks))


def _new_guesses(world: World, keys: BlockKeys) -> Guesses:
    """For each block of the full groups, in each tier: it may lie anywhere."""
    geometry = world.geometry
    blocks = {index: keys.num_blocks // geometry.hashes_per_block(index) for index in geometry.full_groups}
    return {(tier, index): np.zeros(count, np.int64) for index, count in blocks.items() for tier in Tier}


def _fill(guesses: Guesses, found: GroupResidency, *, index: int, start: int) -> None:
    """Put down where the blocks of group `index` from `start` on are, as far as they were looked for and are there."""
    stop = start + len(found.present)
    np.copyto(guesses[Tier.GPU, index][start:stop], found.gpu_slots, where=found.on_gpu)
    np.copyto(guesses[Tier.CPU, index][start:stop], found.cpu_slots, where=found.on_cpu)


def _put_down(world: World, keys: BlockKeys, *, guesses: Guesses) -> None:
    keys.notes[world.identity] = {place: slots for place, slots in guesses.items() if np.count_nonzero(slots)}
