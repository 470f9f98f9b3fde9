"""What counters have shown: none is ever seen to fall.

A monitoring system takes a counter that falls for a restart, and a client library that is told to subtract raises.
Here the last value stands until the count has passed it, and the fall itself is counted.

Scrapes may overlap in several threads, without a lock: each compares with what was known when it began, and what it
reads after that cannot be older. The last one to end is remembered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, final

__all__ = ["Key", "Ledger", "Page"]

Key = tuple[str, tuple[str, ...], int]
"""A family, the values of its labels, and the number of the bucket in a histogram."""


class _Entry(NamedTuple):
    read: float
    shown: float


@final
class Page:
    """The counters of one scrape."""

    __slots__ = ("_before", "entries", "falls")

    def __init__(self, before: Mapping[Key, _Entry]) -> None:
        self._before = before
        self.entries = dict(before)
        """What was known before, overwritten by what this scrape has read."""
        self.falls = 0

    def hold(self, key: Key, value: float) -> float:
        """What to show: `value`, or the last value shown if that was more. A fall since the last scrape is counted."""
        last = self._before.get(key)
        shown = value
        if last is not None:
            self.falls += value < last.read
            shown = max(value, last.shown)
        self.entries[key] = _Entry(read=value, shown=shown)
        return shown


@final
class Ledger:
    """All counters as the last scrape has shown them."""

    __slots__ = ("_last", "falls")

    def __init__(self) -> None:
        self._last: Mapping[Key, _Entry] = {}
        self.falls = 0
        """How often a counter has fallen between two scrapes."""

    def open(self) -> Page:
        """Begin a scrape. Read the counters afterwards."""
        return Page(self._last)

    def close(self, page: Page) -> None:
        """End a scrape."""
        self._last = page.entries
        self.falls += page.falls
