"""What a new lease gets, in the words of a plan: `AcquirePlan` and `GroupPlan` have all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiokv.model.ids import BoolArray
from aiokv.model.plan import Hit

__all__ = ["GroupShare", "Share"]


class GroupShare(Protocol):
    """What the lease gets of one group."""

    @property
    def claim_stop(self) -> int:
        """Table position before which the claims for compute end."""
        ...

    @property
    def state_claims(self) -> int:
        """Slots for states of a recurrent group; 0 in others."""
        ...

    @property
    def capacity_tokens(self) -> int:
        """Tokens that it has room for."""
        ...

    @property
    def is_loaded(self) -> BoolArray:
        """Over the blocks of the prefix: taken from the CPU tier."""
        ...


class Share(Protocol):
    """What the lease gets in all."""

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
        ...

    @property
    def hit(self) -> Hit:
        """Where the tokens of the prompt come from."""
        ...

    @property
    def groups(self) -> Sequence[GroupShare]:
        """One for each group."""
        ...
