"""How the checks of this package fail: loudly, whatever flags Python runs with."""

from __future__ import annotations

__all__ = ["BrokenInvariant", "require"]


class BrokenInvariant(AssertionError):
    """Something that must always hold does not: a fault of the cache or of the scheduler that drives it."""


def require(condition: object, message: str, *details: object) -> None:
    """`BrokenInvariant` unless the condition holds. Unlike `assert` it is there under `python -O` too."""
    if not condition:
        raise BrokenInvariant(": ".join([message, *map(str, details)]))
