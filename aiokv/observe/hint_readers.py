"""What the metric families of residence hints read; the rules are those of `readers.py`. No label names a tenant."""

from __future__ import annotations

from collections.abc import Iterable

from aiokv.observe.readers import Reading, View

__all__ = [
    "read_hint_blocks",
    "read_hints",
    "read_hints_closed",
    "read_hints_declined",
    "read_hints_opened",
    "read_hints_revoked",
]


def read_hints(view: View) -> Iterable[Reading]:
    """Those that hold all of their prefix, and those that wait for some of it, or for room."""
    for extent, hints in view.core.hints.count_by_extent().items():
        yield Reading((extent.value,), hints)


def read_hint_blocks(view: View) -> Iterable[Reading]:
    """A part of what is resident."""
    for tier in view.capacities:
        yield Reading((tier.value,), view.core.hints.held_blocks(tier))


def read_hints_opened(view: View) -> Iterable[Reading]:
    """Granted."""
    yield Reading((), view.core.counters.hints_opened)


def read_hints_declined(view: View) -> Iterable[Reading]:
    """Not granted."""
    for reason, count in view.core.counters.hints_declined.items():
        yield Reading((reason.value,), count)


def read_hints_revoked(view: View) -> Iterable[Reading]:
    """Taken back."""
    for reason, count in view.core.counters.hints_revoked.items():
        yield Reading((reason.value,), count)


def read_hints_closed(view: View) -> Iterable[Reading]:
    """By the way they ended."""
    for how, count in view.core.counters.hints_closed.items():
        yield Reading((how.value,), count)
