"""Cache events followed from the beginning: each must be a dense run of a stream and say what has really changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from aiokv.model.events import BlockRemoved, BlockStored, TierCleared
from aiokv.model.ids import Tier
from aiokv.testing.streams import Streams, stream_tokens
from aiokv.testing.verdict import BrokenInvariant, require

__all__ = ["EventReplay"]


@final
class EventReplay:
    """The indexes as a reader of the events would rebuild them (law 9, invariant 11)."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._published: set[tuple[Tier, int, bytes]] = set()

    def is_published(self, tier: Tier, *, group: int, digest: bytes) -> bool:
        """Whether a reader takes this block for resident."""
        return (tier, group, digest) in self._published

    def follow(self, events: Iterable[object]) -> None:
        """Apply some more of them; `BrokenInvariant` for one that is no run or says nothing new."""
        for event in events:
            match event:
                case TierCleared(tier=tier):
                    self._published = {entry for entry in self._published if entry[0] is not tier}
                case BlockRemoved(tier=tier, group=name, block_hashes=hashes):
                    gone = {(tier, self._streams.geometry.group_index(name), one) for one in hashes}
                    require(gone <= self._published, "a block is removed though it was not there", event)
                    self._published -= gone
                case BlockStored():
                    self._follow_run(event)
                case _:
                    raise BrokenInvariant(f"an event that no reader can follow: {event}")

    def _follow_run(self, event: BlockStored) -> None:
        group = self._streams.geometry.group_index(event.group)
        block = self._streams.sizes[group]
        stream, last = self._streams.place_of(group, event.block_hashes[-1])
        first = last - len(event.block_hashes) + 1
        hashes = tuple(self._streams.digests(stream, group)[first : last + 1])
        require(event.block_hashes == hashes, "an event is no dense run", event)
        parent = self._streams.digest(stream, group, first - 1) if first else None
        require(event.parent_hash == parent, "an event has another parent than its run", event)
        tokens = stream_tokens(stream, first * block, (last + 1) * block)
        require(list(event.token_ids) == tokens, "an event has other tokens than its blocks", event)
        new = {(event.tier, group, one) for one in event.block_hashes}
        require(not new & self._published, "a block is stored though it was there", event)
        self._published |= new
