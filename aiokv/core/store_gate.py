"""Nothing is stored before the CPU tier's memory can be copied to: until then it is empty, and nothing is loaded."""

from __future__ import annotations

from typing import final

from aiokv.core.world import World

__all__ = ["StoreGate"]


@final
class StoreGate:
    """Open from the start; what is offered to the CPU tier while it is shut is not copied, nor kept for later."""

    __slots__ = ("_world",)

    def __init__(self, world: World) -> None:
        self._world = world

    def shut(self) -> None:
        """Plan no store from now on; those that are planned already go on."""
        self._world.is_storing_shut = True

    def open(self) -> None:
        """What is confirmed, hit or about to be evicted from now on may be stored."""
        self._world.is_storing_shut = False
