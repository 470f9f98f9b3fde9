"""What every slot of both tiers really holds, followed write by write.

The model knows nothing of the core's reasoning. It follows the bytes: a slot holds what compute or a copy last wrote
there, and garbage while a copy into it runs or after one that failed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import final

from aiokv.core.inflight import Transfer
from aiokv.model.ids import Direction, Tier
from aiokv.model.plan import Outcome
from aiokv.testing.streams import Streams
from aiokv.testing.verdict import require

__all__ = ["Content", "Contents", "Part", "names_of", "tiers_of"]


@dataclass(frozen=True, slots=True)
class Content:
    """What a slot holds: the KV, or the state, of one block. `fresh`: from the current epoch, so it may be found."""

    group: int
    digest: bytes
    fresh: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """The beginning of a block: the KV of the last of these tokens, up to the block's start."""

    group: int
    tokens: tuple[int, ...]


def names_of(transfer: Transfer, streams: Streams) -> list[bytes]:
    """The hashes of the blocks that a transfer brings, as taken down when it was planned."""
    rows = transfer.names.digests(streams.geometry.hashes_per_block(transfer.group))
    return [row.tobytes() for row in rows]


def tiers_of(transfer: Transfer) -> tuple[Tier, Tier]:
    """Where it reads and where it writes."""
    return transfer.direction.source_tier, transfer.direction.target_tier


@final
class Contents:
    """The slots of both tiers by what they hold; a slot that is not named holds garbage."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._held: dict[Tier, dict[int, Content]] = {Tier.GPU: {}, Tier.CPU: {}}
        self._resets = {Tier.GPU: 0, Tier.CPU: 0}
        self._lost: set[tuple[Tier, int]] = set()
        self._parts: dict[int, Part] = {}

    @property
    def resets(self) -> tuple[int, int]:
        """How often the GPU tier and the CPU tier were reset."""
        return (self._resets[Tier.GPU], self._resets[Tier.CPU])

    def find(self, tier: Tier, slot: int) -> Content | None:
        """What a slot holds; None for garbage."""
        return self._held[tier].get(slot)

    def holds(self, tier: Tier, slot: int, *, group: int, digest: bytes) -> bool:
        """Whether it is this block, of any epoch."""
        held = self.find(tier, slot)
        return held is not None and (held.group, held.digest) == (group, digest)

    def write(self, tier: Tier, slots: Iterable[int], *, content: Content | None) -> None:
        """From now on the slots hold this; None for garbage."""
        for slot in slots:
            if tier is Tier.GPU:
                self._parts.pop(slot, None)
            require((tier, slot) not in self._lost, f"{tier.value} slot {slot} is lost and written")
            if content is None:
                self._held[tier].pop(slot, None)
            else:
                self._held[tier][slot] = content

    def write_part(self, slot: int, *, part: Part) -> None:
        """The first tokens of a GPU block have been written."""
        self.write(Tier.GPU, [slot], content=None)
        self._parts[slot] = part

    def find_part(self, slot: int) -> Part | None:
        """The block that a GPU slot holds the beginning of."""
        return self._parts.get(slot)

    def forget(self, tier: Tier) -> None:
        """The tier was reset: its bytes stay where they are, but none of them may be found any more."""
        self._resets[tier] += 1
        self._held[tier] = {slot: replace(held, fresh=False) for slot, held in self._held[tier].items()}

    def begin_copy(self, transfer: Transfer) -> None:
        """A copy has been started: it reads the right bytes, and its targets hold garbage until it has ended."""
        source, target = tiers_of(transfer)
        self.check_sources(transfer)
        for slot in transfer.sources.tolist():
            require((source, slot) not in self._lost, f"{source.value} slot {slot} is lost and read")
        self.write(target, transfer.bound_targets.tolist(), content=None)

    def end_copy(self, transfer: Transfer, outcome: Outcome, *, fresh: bool) -> None:
        """A copy has ended: its targets hold what its sources do, or garbage, or belong to nobody any more."""
        source, target = tiers_of(transfer)
        targets = transfer.bound_targets.tolist() if transfer.targets is not None else []
        if outcome is Outcome.OK:
            self.check_sources(transfer)
            for name, slot in zip(names_of(transfer, self._streams), targets, strict=True):
                self.write(target, [slot], content=Content(transfer.group, name, fresh=fresh))
        if outcome is Outcome.LOST:
            self._lost |= {(target, slot) for slot in targets}
            if transfer.direction is Direction.LOAD:
                self._lost |= {(source, slot) for slot in transfer.sources.tolist()}

    def rot(self, transfer: Transfer, copies: Collection[int]) -> None:
        """The sources of these copies of a load turn out to be garbage: from now on they must not be found."""
        source, _ = tiers_of(transfer)
        for copy in copies:
            self._held[source].pop(int(transfer.sources[copy]), None)

    def check_sources(self, transfer: Transfer) -> None:
        """Everything it reads is there."""
        source, _ = tiers_of(transfer)
        for name, slot in zip(names_of(transfer, self._streams), transfer.sources.tolist(), strict=True):
            if not self.holds(source, slot, group=transfer.group, digest=name):
                held = self.find(source, slot)
                require(held is not None, f"a {transfer.direction.value} reads garbage in {source.value} slot {slot}")
                require(held is None, f"a {transfer.direction.value} reads another block in {source.value} slot {slot}")
