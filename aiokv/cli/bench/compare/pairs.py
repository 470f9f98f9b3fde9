"""What is compared with what, and by how much ours must be faster."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from aiokv.cli.bench.cases import Case, Layout, Model, Operation

__all__ = ["FLOORS", "Pair", "all_pairs", "floor_of"]

LONG_BLOCKS: Final = 8_192
"""From so many blocks on the floors are `FLOORS`."""
_SHORT_BLOCKS: Final = 64
"""From so many blocks on ours is not slower."""

FLOORS: Final[Mapping[Operation, float]] = {
    Operation.HASH: 2.5,
    Operation.LOOKUP: 6.0,
    Operation.RESERVE: 7.0,
    Operation.RELEASE: 4.0,
    Operation.STORE: 5.0,
    Operation.LOAD: 3.0,
}
"""How many times as long the peer must take for a prompt of 128k tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Our case, and what the peer does meanwhile: its operation and layout, in words of its worker."""

    case: Case
    peer_operation: str
    peer_layout: Layout

    @property
    def floor(self) -> float | None:
        """See `floor_of`; none where the peer does more than the floor is meant for."""
        is_like_for_like = self.peer_operation == self.case.operation.value
        return floor_of(self.case.operation, blocks=self.case.blocks) if is_like_for_like else None

    @property
    def peer_case(self) -> dict[str, object]:
        """What the peer's worker is asked to open."""
        return {**self.own_case, "operation": self.peer_operation, "layout": self.peer_layout.value}

    @property
    def own_case(self) -> dict[str, object]:
        """What our worker is asked to open."""
        case = self.case
        return {
            "operation": case.operation.value,
            "layout": case.layout.value,
            "model": case.model.value,
            "blocks": case.blocks,
            "pool_slots": case.pool_slots,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matching:
    operation: Operation
    layout: Layout
    peer_operation: str
    peer_layout: Layout


def _alike(operation: Operation, layout: Layout) -> _Matching:
    return _Matching(operation=operation, layout=layout, peer_operation=operation.value, peer_layout=layout)


_MATCHINGS: Final = (
    _alike(Operation.HASH, Layout.MISS),
    _alike(Operation.LOOKUP, Layout.GPU),
    _alike(Operation.LOOKUP, Layout.CPU),
    # The peer cannot use a prefix that interleaves tiers: its side is one of the same length in the CPU tier.
    _Matching(
        operation=Operation.LOOKUP,
        layout=Layout.INTERLEAVED,
        peer_operation=Operation.LOOKUP.value,
        peer_layout=Layout.CPU,
    ),
    _alike(Operation.RESERVE, Layout.MISS),
    # The peer registers new blocks as it allocates them, ours when they are confirmed; beside that, without it.
    _Matching(
        operation=Operation.RESERVE,
        layout=Layout.MISS,
        peer_operation="reserve-unregistered",
        peer_layout=Layout.MISS,
    ),
    _alike(Operation.RELEASE, Layout.GPU),
    _alike(Operation.STORE, Layout.MISS),
    _alike(Operation.LOAD, Layout.CPU),
    # Ours registers loaded blocks as part of the completion, the peer's scheduler a step later; beside that, with it.
    _Matching(
        operation=Operation.LOAD, layout=Layout.CPU, peer_operation="load-registered", peer_layout=Layout.CPU
    ),
)


def all_pairs(
    *, operations: Collection[Operation], models: Collection[Model], blocks: Collection[int], pool_slots: int
) -> list[Pair]:
    """Every comparison of these operations. Hashes do not depend on the model: they are compared once."""
    return [
        Pair(
            case=Case(
                operation=matching.operation, layout=matching.layout, model=model, blocks=size, pool_slots=pool_slots
            ),
            peer_operation=matching.peer_operation,
            peer_layout=matching.peer_layout,
        )
        for size in blocks
        for matching in _MATCHINGS
        if matching.operation in operations
        for model in models
        if matching.operation is not Operation.HASH or model is next(iter(models))
    ]


def floor_of(operation: Operation, *, blocks: int) -> float | None:
    """How many times as long the peer must take; none for prompts that nothing is promised for."""
    if blocks >= LONG_BLOCKS:
        return FLOORS[operation]
    return 1.0 if blocks >= _SHORT_BLOCKS else None
