"""Residence hints: each tenant keeps beginnings of its conversations, loses them to whoever needs the room, and checks.

What is checked: while a hint is held, a longer request of the same beginning hits as many tokens as it says.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final, final

from aiokv import BlockKeys, Declined, Deferred, HintState, ResidenceHint, Tier
from aiokv.cli.bench.soak.world import Tenant, World

__all__ = ["Keeper"]

_PAUSE_S: Final = 0.1
_LAST_TOKEN: Final = 50_001
"""In no text."""


@final
class Keeper:
    """Keeps one hint at a time, until the world is over."""

    __slots__ = ("_name", "_random", "_tenant", "_world")

    def __init__(self, world: World, *, tenant: Tenant, seed: int) -> None:
        self._world = world
        self._tenant = tenant
        self._name = f"tenant {tenant.number}"
        self._random = random.Random(f"{seed}/keeper {tenant.number}")

    async def run(self) -> None:
        """One hint after the other."""
        while not self._world.is_over:
            await self._keep(self._random.choice((Tier.GPU, Tier.GPU, Tier.CPU)))

    async def _keep(self, tier: Tier) -> None:
        keys = await self._prepared()
        align = self._random.choice((1, 1, 64))
        hint = self._world.call(self._world.kv.keep, keys, tenant=self._name, tier=tier, align=align)
        if isinstance(hint, Declined):
            self._world.seen["hints_declined"] += 1
            await asyncio.sleep(self._random.random() * _PAUSE_S)
            return
        self._world.seen["hints_kept"] += 1
        try:
            for _ in range(self._random.randrange(2, 12)):
                await asyncio.sleep(self._random.random() * _PAUSE_S)
                self._check(hint, keys, align=align)
                keys = await self._look_after(hint, keys)
        finally:
            self._world.call(hint.release)

    def _check(self, hint: ResidenceHint, keys: BlockKeys, *, align: int) -> None:
        """Ask for one token more than is kept: the hint is looked at and the request let in without a turn between."""
        longer = keys.copy()
        longer.append([_LAST_TOKEN])
        held = hint.held_tokens if hint.state is HintState.HELD else 0
        lease = self._world.call(self._world.kv.try_acquire, f"{self._name} looks", longer, align=align)
        if isinstance(lease, Deferred):
            return
        try:
            found = lease.hit.gpu_tokens + lease.hit.cpu_tokens
            self._world.seen["hints_checked"] += held > 0
            if found < held:
                self._world.note_violations([f"{hint!r} held {held} tokens, and a request hit {found}"])
        finally:
            self._world.call(lease.release)

    async def _look_after(self, hint: ResidenceHint, keys: BlockKeys) -> BlockKeys:
        """What an owner does now and then; returns the keys of what the hint is for afterwards."""
        if hint.state is HintState.REVOKED:
            self._world.seen["hints_revoked"] += 1
            self._world.call(hint.refresh)
        drawn = self._random.random()
        if drawn < 0.2:
            other = await self._prepared()
            return keys if isinstance(self._world.call(hint.update, other), Declined) else other
        if drawn < 0.25:
            self._world.call(hint.revoke)
        elif drawn < 0.28:
            self._world.call(self._world.kv.revoke_hints, tenant=self._name)
        return keys

    async def _prepared(self) -> BlockKeys:
        opening = self._random.choice(self._tenant.openings)
        return await self._world.wait(self._world.kv.prepare_keys(opening, **self._tenant.identity))
