"""What `aiokv bench scale` is asked for, and the cases that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from aiokv.cli.bench.cases import Case, Layout, Model, Operation
from aiokv.errors import ConfigError

__all__ = ["MEASURED", "ScaleSettings", "Sweep"]

MEASURED: Final = (
    (Operation.LOOKUP, Layout.GPU),
    (Operation.LOOKUP, Layout.CPU),
    (Operation.LOOKUP, Layout.INTERLEAVED),
    (Operation.RESERVE, Layout.MISS),
    (Operation.RELEASE, Layout.GPU),
    (Operation.STORE, Layout.MISS),
    (Operation.LOAD, Layout.CPU),
)
"""What must not depend on the size of the pools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One operation: the case in the smallest pools, and those that are compared with it."""

    base: Case
    others: tuple[Case, ...]

    @property
    def cases(self) -> tuple[Case, ...]:
        """All of them, by size."""
        return self.base, *self.others


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSettings:
    """One run. `ConfigError` for what cannot be compared, or does not fit into the smallest pools."""

    pool_slots: tuple[int, ...] = (20_000, 1_000_000, 10_000_000)
    """Repeated sizes count once."""
    blocks: int = 8_192
    model: Model = Model.FULL
    repeats: int = 15

    def __post_init__(self) -> None:
        if len(self.sizes) < 2:
            raise ConfigError(f"pools of at least two sizes are compared, not of {self.sizes[0]:,} slots alone")
        if self.repeats < 1:
            raise ConfigError(f"a case is measured at least once, not {self.repeats} times")
        self.sweeps()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The smallest first."""
        return tuple(sorted(set(self.pool_slots)))

    def sweeps(self) -> tuple[Sweep, ...]:
        """One per operation and layout."""
        return tuple(self._sweep_of(operation, layout) for operation, layout in MEASURED)

    def _sweep_of(self, operation: Operation, layout: Layout) -> Sweep:
        """In every size with as many prompts in turn as the smallest pools allow: those that come back are as warm in
        the processor's caches in all. And with as many as larger pools allow themselves: those are not."""
        smallest, *larger = (
            Case(operation=operation, layout=layout, model=self.model, blocks=self.blocks, pool_slots=slots)
            for slots in self.sizes
        )
        like = [replace(case, most_prompts=smallest.rounds_in_turn) for case in larger]
        if layout is Layout.MISS:
            return Sweep(base=smallest, others=tuple(like))
        more = [case for case in larger if case.rounds_in_turn > smallest.rounds_in_turn]
        return Sweep(base=smallest, others=(*like, *more))
