"""Finding out beforehand where a long prompt's blocks lie, in slices, so that its admission is short (law 8).

Duty: looking up thousands of blocks is long for one hold. Slices of it run before, and put down with the keys where
each block was. The lookup at admission looks there first: comparing a hash with that of one known slot takes a fourth
of a search, and only what has moved or is missing is searched for.

Rules: pure but for the keys' own notes. A guess is never believed, only verified; that of another cache is not seen.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np

from aiokv.core.probing import GroupResidency, Guesses, Prober, is_all
from aiokv.core.slices import Job
from aiokv.core.world import World
from aiokv.model.ids import IntArray, Tier
from aiokv.model.keys import BlockKeys

__all__ = ["LONG_BLOCKS", "Foresight", "find_guesses"]

LONG_BLOCKS: Final = 2048
"""Shorter prompts are looked up at once."""


def find_guesses(world: World, keys: BlockKeys) -> Guesses | None:
    """What was found out beforehand for this cache, if anything was."""
    return keys.notes.get(world.identity) if keys.notes else None


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
        geometry = self._world.geometry
        guesses: dict[tuple[Tier, int], IntArray] = {}
        for index in geometry.full_groups:
            blocks = keys.num_blocks // geometry.hashes_per_block(index)
            guesses |= {(tier, index): np.zeros(blocks, np.int64) for tier in Tier}
            for start in range(0, blocks, self._world.slice_blocks):
                found = self._probe(keys, index, start)
                stop = start + len(found.present)
                guesses[Tier.GPU, index][start:stop][found.on_gpu] = found.gpu_slots[found.on_gpu]
                guesses[Tier.CPU, index][start:stop][found.on_cpu] = found.cpu_slots[found.on_cpu]
                if not is_all(found.present):
                    break
                yield
        useful = {place: slots for place, slots in guesses.items() if np.count_nonzero(slots)}
        keys.notes = {**keys.notes, self._world.identity: useful}

    def _probe(self, keys: BlockKeys, index: int, start: int) -> GroupResidency:  # noqa: PLR0917  # of group i from here
        world = self._world
        prober = Prober(world.geometry, keys, gpu=world.gpu, cpu=world.usable_cpu, without=(), guesses=None)
        blocks = keys.num_blocks // world.geometry.hashes_per_block(index)
        return prober.probe_slice(index, start, min(start + world.slice_blocks, blocks))
