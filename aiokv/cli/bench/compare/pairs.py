"""What is compared with what, and by how much ours must be faster."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from aiokv.cli.bench.cases import GEOMETRIES, Case, Layout, Model, Operation
from aiokv.model.ids import KeyEnum

__all__ = ["FLOORS", "Extent", "Pair", "all_pairs", "floor_of", "requests_of"]

_LONG_BLOCKS: Final = 8_192
"""From so many blocks on the floors are `FLOORS`."""
_SHORT_BLOCKS: Final = 64
"""From so many blocks on ours is not slower."""
_BLOCKS_IN_A_STEP: Final = 512
"""Of prompts up to this size a scheduler's step lets several in."""
_REQUESTS_IN_A_STEP: Final = 8

FLOORS: Final[Mapping[Operation, float]] = {
    Operation.HASH: 2.5,
    Operation.LOOKUP: 6.0,
    Operation.RESERVE: 7.0,
    Operation.RELEASE: 4.0,
    Operation.STORE: 5.0,
    Operation.LOAD: 3.0,
}
"""How many times as long the peer must take for a prompt of 128k tokens."""


class Extent(KeyEnum):
    """How much of our round is compared."""

    OPERATION = "operation"
    """What makes up the operation."""
    WHOLE = "whole"
    """That, and what our benchmark of it does beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Our case, and what the peer does meanwhile: its operation and layout, in words of its worker."""

    case: Case
    peer_operation: str
    peer_layout: Layout
    extent: Extent
    note: str
    """How the two sides differ, for people; empty if they do not."""

    @property
    def floor(self) -> float | None:
        """See `floor_of`; none where the peer's operation is not the one that the floor is meant for."""
        is_like_for_like = self.peer_operation == self.case.operation.value
        return floor_of(self.case.operation, blocks=self.case.blocks) if is_like_for_like else None

    @property
    def peer_case(self) -> dict[str, object]:
        """What the peer's worker is asked to open."""
        return {**self._sizes, "operation": self.peer_operation, "layout": self.peer_layout.value}

    @property
    def own_case(self) -> dict[str, object]:
        """What our worker is asked to open."""
        case = self.case
        return {
            "operation": case.operation.value,
            "layout": case.layout.value,
            **self._sizes,
            "extent": self.extent.value,
        }

    @property
    def _sizes(self) -> dict[str, object]:
        case = self.case
        return {
            "model": case.model.value,
            "blocks": case.blocks,
            "requests": case.requests,
            "pool_slots": case.pool_slots,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matching:
    operation: Operation
    layout: Layout
    peer_operation: str
    peer_layout: Layout
    note: str = ""
    extent: Extent = Extent.OPERATION


def _alike(operation: Operation, layout: Layout, *, note: str = "") -> _Matching:
    return _Matching(operation=operation, layout=layout, peer_operation=operation.value, peer_layout=layout, note=note)


_MATCHINGS: Final = (
    _alike(Operation.HASH, Layout.MISS),
    _alike(Operation.LOOKUP, Layout.GPU),
    _alike(Operation.LOOKUP, Layout.CPU),
    _Matching(
        operation=Operation.LOOKUP,
        layout=Layout.INTERLEAVED,
        peer_operation=Operation.LOOKUP.value,
        peer_layout=Layout.CPU,
        note="the peer cannot use a prefix that interleaves tiers; its prompt lies in CPU memory alone",
    ),
    _alike(Operation.RESERVE, Layout.MISS, note="the peer registers new blocks at once, ours when they are confirmed"),
    _Matching(
        operation=Operation.RESERVE,
        layout=Layout.MISS,
        peer_operation="reserve-unregistered",
        peer_layout=Layout.MISS,
        note="the peer's without registering new blocks; no floor",
    ),
    _alike(Operation.RELEASE, Layout.GPU),
    _alike(Operation.STORE, Layout.MISS),
    _alike(
        Operation.LOAD,
        Layout.CPU,
        note="until the loaded blocks can be found; ours plans loads in its lookup, the peer's plan is in both rows",
    ),
    _Matching(
        operation=Operation.LOAD,
        layout=Layout.CPU,
        peer_operation="load-unregistered",
        peer_layout=Layout.CPU,
        note="the peer's without registering the loaded blocks; no floor",
    ),
    _Matching(
        operation=Operation.LOAD,
        layout=Layout.CPU,
        peer_operation="load-whole",
        peer_layout=Layout.CPU,
        note="both from the lookup to the registration of the loaded blocks, each step once; no floor",
        extent=Extent.WHOLE,
    ),
)


def all_pairs(
    *, operations: Collection[Operation], models: Collection[Model], blocks: Collection[int], pool_slots: int
) -> list[Pair]:
    """Every comparison of these operations. Hashes do not depend on the model: they are compared once."""
    return [
        Pair(
            case=Case(
                operation=matching.operation,
                layout=matching.layout,
                model=model,
                blocks=size,
                pool_slots=pool_slots,
                requests=requests_of(model, blocks=size, pool_slots=pool_slots),
            ),
            peer_operation=matching.peer_operation,
            peer_layout=matching.peer_layout,
            extent=matching.extent,
            note=matching.note,
        )
        for size in blocks
        for matching in _MATCHINGS
        if matching.operation in operations
        for model in models
        if matching.operation is not Operation.HASH or model is next(iter(models))
    ]


def requests_of(model: Model, *, blocks: int, pool_slots: int) -> int:
    """How many requests go through an operation in a round: several short ones, as far as half a pool holds them and
    the one that leads in."""
    if blocks > _BLOCKS_IN_A_STEP:
        return 1
    groups = len(GEOMETRIES[model].groups)
    held = pool_slots // (2 * groups * (blocks + 1))
    return min(_REQUESTS_IN_A_STEP, max(1, held - 1))


def floor_of(operation: Operation, *, blocks: int) -> float | None:
    """How many times as long the peer must take; none for prompts that nothing is promised for."""
    if blocks >= _LONG_BLOCKS:
        return FLOORS[operation]
    return 1.0 if blocks >= _SHORT_BLOCKS else None
