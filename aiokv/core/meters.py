"""What a host tells the core, and asks it, for the sake of its metrics alone: nothing here changes what is cached."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, final

from aiokv.core.block_ages import TICKS_PER_SECOND, BlockAges
from aiokv.core.world import World
from aiokv.model.ids import Direction, Tier

__all__ = ["Meters"]

_LAST_TICK: Final = (1 << 31) - 1


@final
class Meters:
    """Reads one cache; what it answers with numbers may be asked from any thread."""

    __slots__ = ("_world",)

    def __init__(self, world: World) -> None:
        self._world = world

    def note_time(self, now: float) -> None:
        """It is `now`, in seconds of the host's clock, which never goes back; to be told before requests come and go.

        Blocks that fall idle are stamped with it. A host that never tells has no ages,
        and does not pay for them.
        """
        tick = int(now * TICKS_PER_SECOND) & _LAST_TICK
        if tick != self._world.tick:
            self._world.note_tick(tick)

    @property
    def pins_wait(self) -> bool:
        """Whether pins that leases have let go of still count as held for whoever looks from another thread."""
        return self._world.gpu.has_late

    def drop_pins(self) -> None:
        """Drop them now, not when something depends on them."""
        self._world.gpu.settle()

    def ages(self, tier: Tier) -> BlockAges | None:
        """How long the blocks of a tier lie idle; None where there is no such tier."""
        pool = self._world.pool(tier)
        return None if pool is None else pool.ages

    def orphan_blocks(self, tier: Tier) -> int:
        """Blocks of a tier that copies still write although all who wanted them have left."""
        orphans = self._world.inflight.orphan_blocks
        return sum(orphans[direction] for direction in Direction if direction.target_tier is tier)

    def watch(self, transfer_ids: Collection[int]) -> list[int]:
        """Have those of these transfers in `take_returned` that are unfinished, once they are not; which they are."""
        inflight = self._world.inflight
        running = [transfer_id for transfer_id in transfer_ids if transfer_id in inflight]
        for transfer_id in running:
            inflight.find(transfer_id).is_watched = True
        return running

    @property
    def have_returned(self) -> bool:
        """Whether `take_returned` has any."""
        return len(self._world.inflight.returned) > 0

    def take_returned(self) -> list[int]:
        """Watched transfers that have given all their pins back; each is taken once."""
        inflight = self._world.inflight
        taken, inflight.returned = inflight.returned, []
        return taken
