"""How `aiokv top` writes numbers, and what others have written: never wider than a few columns, never alive.

What a server or its clients choose (ids of requests, messages) is shown without a character that a terminal obeys:
control characters, escape sequences, marks that change the direction of the text.
"""

from __future__ import annotations

from typing import Final

from aiokv.model.sizes import format_bytes

__all__ = [
    "MISSING",
    "format_byte_rate",
    "format_count",
    "format_duration",
    "format_rate",
    "format_share",
    "make_inert",
]

MISSING: Final = "-"
"""Stands where a number is not known yet."""
_MOST_EXACT: Final = 99_999
_STRANGE: Final = "?"
_MINUTE: Final = 60
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR


def make_inert(text: str) -> str:
    """The text with `?` for every character that cannot be seen."""
    return "".join(char if char.isprintable() else _STRANGE for char in text)


def format_count(count: float) -> str:
    """At most six columns: "99,999", "100k", "1.23M"."""
    if count <= _MOST_EXACT:
        return f"{int(count):,}"
    for unit, factor in (("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15)):
        shown = f"{count / factor:.3g}"
        if "e" not in shown:
            return shown + unit
    return f"{count:.0e}"


def format_rate(rate: float | None) -> str:
    """Per second; small rates with a digit behind the point."""
    if rate is None:
        return MISSING
    return f"{rate:.1f}" if 0 < rate < 10 else format_count(round(rate))


def format_byte_rate(rate: float | None) -> str:
    """Bytes per second."""
    return MISSING if rate is None else f"{format_bytes(round(rate))}/s"


def format_share(part: int, *, whole: int) -> str:
    """A part of the whole in per cent; nothing is known of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else MISSING


def format_duration(seconds: float) -> str:
    """In the two units that matter."""
    whole = int(seconds)
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    if seconds < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    if seconds < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02d} min"
    return f"{format_count(whole // _DAY)} d {whole % _DAY // _HOUR:02d} h"
