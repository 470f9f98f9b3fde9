"""`TransferStream`: the transfers of remote ranks as an async iterator."""

from __future__ import annotations

from typing import Self, final

from aiokv.model.plan import RankTransfer
from aiokv.runtime.offload import Offloader

__all__ = ["TransferStream"]


@final
class TransferStream:
    """The transfers that remote ranks have to make, each handed out once: `async for transfer in kv.transfers()`.

    It ends when the runtime submits nothing any more, which is at the end of `aclose`. `take` is for engines that send
    with each of their steps what has come up since the last one.
    """

    __slots__ = ("_offloader", "_outlet")

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._outlet = offloader.outlet

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RankTransfer:
        self._offloader.enter()
        while not self._outlet:
            if self._outlet.has_ended:
                raise StopAsyncIteration
            await self._outlet.changed()
        return self._outlet.take()

    def take(self) -> list[RankTransfer]:
        """All that nobody has taken yet, oldest first; does not wait."""
        self._offloader.enter()
        return self._outlet.take_all()
