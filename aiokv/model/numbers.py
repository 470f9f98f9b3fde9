"""What counts as a number among the arguments of callers.

Truth values are integers in Python and no numbers here: `block_size=True` is a mistake that must not become 1.
"""

from __future__ import annotations

from typing import TypeGuard

__all__ = ["is_number", "is_whole"]


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an integer, of either sign."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is an integer or a float, infinite and undefined ones included."""
    return isinstance(value, int | float) and not isinstance(value, bool)
