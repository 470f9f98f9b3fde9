"""The recurrent groups of one lease: a working state that moves on, and captures of it that others may hit.

As section 5 of the contract says: a hit is only read and copied whole into the working slot before it is advanced; a
captured state is a copy in a slot of its own, confirmed under its exact length.
"""

from __future__ import annotations

import random
from typing import Final, final

from aiokv import Lease
from aiokv.cli.bench.kv_bytes import Codes
from aiokv.cli.bench.soak.world import World
from aiokv.model.ids import NULL_SLOT

__all__ = ["States"]

_CAPTURED: Final = 0.9
"""Of the passes that go past the end of a block."""


@final
class States:
    """Nothing to do where the model has no recurrent group."""

    __slots__ = ("_block", "_groups", "_random", "_world")

    def __init__(self, world: World, *, source: random.Random) -> None:
        self._world = world
        self._random = source
        self._groups = tuple(group.name for group in world.memory.recurrent)
        self._block = max((group.block_size for group in world.memory.recurrent), default=1)

    def take_up(self, lease: Lease, *, codes: Codes) -> None:
        """Go on from the state at the end of what is confirmed; from none before the first token."""
        length = lease.confirmed_tokens
        for group in self._groups:
            working, _ = self._world.call(lease.state_slots, group)
            if not length:
                self._world.memory.begin_state(group, working)
                continue
            table = self._world.call(lease.block_ids, group)
            hit = int(table[length // self._block - 1]) if not length % self._block else NULL_SLOT
            self._world.note_corrupt(hit == NULL_SLOT, where=f"{lease!r}, group {group}: no state of {length} tokens")
            self._world.memory.copy_state(group, source=hit, target=working)

    def compare(self, lease: Lease, *, codes: Codes) -> None:
        """The working state, and whatever states are in the tables."""
        for group in self._groups:
            table = self._world.call(lease.block_ids, group).tolist()
            working, _ = self._world.call(lease.state_slots, group)
            held = [((place + 1) * self._block, slot) for place, slot in enumerate(table) if slot != NULL_SLOT]
            for length, slot in (*held, (lease.confirmed_tokens, working)):
                is_right = self._world.memory.is_state(group, slot, codes=codes, length=length)
                self._world.seen["compared_states"] += 1
                self._world.note_corrupt(not is_right, where=f"{lease!r}, group {group}, the state of {length} tokens")

    def advance(self, lease: Lease, *, codes: Codes, stop: int) -> tuple[int, ...]:
        """Compute up to `stop`; the lengths at which states were captured on the way, as `confirm` wants them."""
        start = lease.confirmed_tokens
        length = self._choose_capture(lease, start=start, stop=stop)
        for group in self._groups:
            working, capture = self._world.call(lease.state_slots, group)
            self._world.memory.advance_state(group, working, codes=codes, start=start, stop=length)
            if length > start:
                self._world.memory.copy_state(group, source=working, target=capture)
            self._world.memory.advance_state(group, working, codes=codes, start=length, stop=stop)
        self._world.seen["captured"] += length > start
        return (length,) if length > start else ()

    def held_lengths(self, lease: Lease, *, least: int) -> list[int]:
        """The lengths, from `least` on, to which a lease can be cut."""
        tables = [self._world.call(lease.block_ids, group).tolist() for group in self._groups]
        places = [{place for place, slot in enumerate(table) if slot != NULL_SLOT} for table in tables]
        common = set.intersection(*places) if places else set()
        return sorted(length for place in common if (length := (place + 1) * self._block) >= least)

    def ask_for_captures(self, lease: Lease) -> None:
        """The pool was too full for another capture: there may be a slot now."""
        if any(NULL_SLOT in self._world.call(lease.state_slots, group) for group in self._groups):
            self._world.seen["captures_asked_for"] += 1
            self._world.call(lease.try_extend, 0)

    def _choose_capture(self, lease: Lease, *, start: int, stop: int) -> int:
        """The last end of a block on the way, if there is one, and a slot in every group; else `start`."""
        length = stop - stop % self._block
        if not self._groups or length <= start or self._random.random() > _CAPTURED:
            return start
        slots = [self._world.call(lease.state_slots, group)[1] for group in self._groups]
        return start if NULL_SLOT in slots else length
