"""A forward pass without arithmetic: it follows which tokens' KV each GPU slot holds.

It refuses what a kernel would not notice: reading what was never computed or loaded, writing what is somebody else's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from aiokv.core.cache import CacheState
from aiokv.core.lease_table import LeaseRecord
from aiokv.model.ids import NULL_SLOT, Tier
from aiokv.testing.checks import Checks
from aiokv.testing.contents import Content, Contents, Part
from aiokv.testing.streams import Streams, is_covered, stream_tokens
from aiokv.testing.verdict import require

__all__ = ["ForwardPass", "Row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request's share of a step: compute tokens `[start, stop)` of `token_ids`, reading and writing these blocks.

    `tables` has per group the GPU slots by block position, as a kernel gets them.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    stop: int
    tables: Mapping[str, Sequence[int]]


@final
class ForwardPass:
    """Computes rows into the slots of one cache."""

    def __init__(self, cache: CacheState, *, streams: Streams, contents: Contents, checks: Checks) -> None:
        self._cache = cache
        self._streams = streams
        self._contents = contents
        self._checks = checks

    def compute(self, row: Row, *, leases: Mapping[int, LeaseRecord], is_fresh: bool) -> int:
        """Write the KV of a row; returns the token that follows, that of the row's stream."""
        require(0 <= row.start < row.stop <= len(row.token_ids), f"{row.request_id} computes no tokens", row)
        owners = {lease_id for lease_id, record in leases.items() if record.request.request_id == row.request_id}
        require(owners, f"{row.request_id} computes without a lease")
        self._check_shape(row)
        for group, block in enumerate(self._streams.sizes):
            self._check_reads(row, group=group, block=block)
        written = self._written_slots(row)
        for slot in written:
            self._checks.writable(slot, leases=leases.values(), readers=owners)
        self._checks.not_findable(written)
        for group, block in enumerate(self._streams.sizes):
            self._write(row, group=group, block=block, owners={i: leases[i] for i in owners}, is_fresh=is_fresh)
        stream = self._streams.stream_of(row.token_ids)
        return stream_tokens(stream, row.stop, row.stop + 1)[0]

    def _check_shape(self, row: Row) -> None:
        """The tokens are those of a request, and every group has a table that is long enough for them."""
        tokens = list(row.token_ids)
        require(self._streams.is_prompt(tokens), f"{row.request_id} computes tokens that no request has", tokens)
        for spec, block in zip(self._streams.geometry.groups, self._streams.sizes, strict=True):
            require(spec.name in row.tables, f"{row.request_id} has no table of {spec.name}")
            blocks, needed = len(row.tables[spec.name]), -(-row.stop // block)
            require(blocks >= needed, f"{row.request_id} has {blocks} blocks of {spec.name}, of the {needed} it needs")

    def _check_reads(self, row: Row, *, group: int, block: int) -> None:
        """Whatever the query at `start` reads is there, whole blocks and the beginning of the one that goes on."""
        spec = self._streams.geometry.groups[group]
        stream = self._streams.stream_of(row.token_ids)
        for position in range(-(-row.start // block)):
            if not is_covered(spec, block, length=row.start, position=position):
                continue
            slot = row.tables[spec.name][position]
            stop = min((position + 1) * block, row.start)
            digest = self._streams.digest(stream, group, position)
            is_there = self._contents.holds(Tier.GPU, slot, group=group, digest=digest)
            is_there = is_there or self._begins(slot, group=group, tokens=tuple(row.token_ids[:stop]))
            require(
                is_there, f"{row.request_id} reads block {position} of {spec.name}, which slot {slot} does not hold"
            )

    def _begins(self, slot: int, *, group: int, tokens: tuple[int, ...]) -> bool:
        """Whether the block in a slot begins with the last of these tokens, computed after all the others."""
        part = self._contents.find_part(slot)
        if part is not None:
            return part.group == group and part.tokens[: len(tokens)] == tokens
        held = self._contents.find(Tier.GPU, slot)
        if held is None or held.group != group:
            return False
        stream, position = self._streams.place_of(group, held.digest)
        whole = (position + 1) * self._streams.sizes[group]
        return (
            whole >= len(tokens) > whole - self._streams.sizes[group]
            and tuple(stream_tokens(stream, 0, len(tokens))) == tokens
        )

    def _write(self, row: Row, *, group: int, block: int, owners: Mapping[int, LeaseRecord], is_fresh: bool) -> None:
        stream = self._streams.stream_of(row.token_ids)
        name = self._streams.geometry.groups[group].name
        for position in range(row.start // block, -(-row.stop // block)):
            slot = row.tables[name][position]
            require(slot != NULL_SLOT, f"{row.request_id} writes the null block of {name}")
            own = any(slot in record.tables[group].view().tolist() for record in owners.values())
            require(own, f"{row.request_id} writes GPU slot {slot} of {name}, which is not its own")
            stop = min((position + 1) * block, row.stop)
            if stop < (position + 1) * block:
                self._contents.write_part(slot, part=Part(group, tuple(row.token_ids[:stop])))
            else:
                digest = self._streams.digest(stream, group, position)
                self._contents.write(Tier.GPU, [slot], content=Content(group, digest, fresh=is_fresh))

    def _written_slots(self, row: Row) -> list[int]:
        sizes = zip(self._streams.geometry.groups, self._streams.sizes, strict=True)
        return [
            row.tables[spec.name][position]
            for spec, block in sizes
            for position in range(row.start // block, -(-row.stop // block))
        ]
