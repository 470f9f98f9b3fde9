"""Sizes for people."""

from __future__ import annotations

__all__ = ["format_bytes"]


def format_bytes(size: int) -> str:
    """In powers of 1024, four digits."""
    for unit, factor in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} B"
