"""Life cycles as tables: which state follows from which, and what is said about a step that there is not.

Rules: a value; whoever has the state changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from aiokv.errors import InvalidTransition

__all__ = ["LifeCycle", "Subject"]

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Subject(Protocol):
    """Whose life it is."""

    @property
    def name(self) -> str:
        """What errors call it."""
        ...


@dataclass(frozen=True, slots=True)
class LifeCycle(Generic[S, E]):
    """The states that follow, by the state before and what happens; there are no other steps."""

    steps: Mapping[tuple[S, E], S]

    def find_next(self, state: S, event: E, *, subject: Subject) -> S:
        """The state after `event`; `InvalidTransition`, which names the subject, if there is none."""
        try:
            return self.steps[state, event]
        except KeyError:
            raise InvalidTransition(subject.name, state=state.value, event=event.value) from None
