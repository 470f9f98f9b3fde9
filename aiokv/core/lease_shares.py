"""What a new lease gets, in the words of a plan: `AcquirePlan` and `GroupPlan` have all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiokv.model.ids import BoolArray
from aiokv.model.plan import Hit

__all__ = ["GroupShare", "Share"]


class GroupShare(Protocol):
    """One group's part."""

    @property
    def claim_stop(self) -> int:
        """Where its claims for compute end, in table positions."""
        ...

    @property
    def state_claims(self) -> int:
        """States of a recurrent group."""
        ...

    @property
    def capacity_tokens(self) -> int:
        """Room in tokens."""
        ...

    @property
    def is_loaded(self) -> BoolArray:
        """Over the blocks of the prefix: taken from the CPU tier."""
        ...


class Share(Protocol):
    """All of it."""

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
        ...

    @property
    def hit(self) -> Hit:
        """Where the tokens come from."""
        ...

    @property
    def groups(self) -> Sequence[GroupShare]:
        """One for each group."""
        ...
