"""Which versions of the driver and of its bindings the CUDA backend works with, and how they are written."""

from __future__ import annotations

from itertools import takewhile
from typing import Final

__all__ = ["OLDEST_DRIVER", "are_bindings_supported", "as_text", "is_driver_supported"]

OLDEST_DRIVER: Final = "12.0"
"""The CUDA version that the driver must support."""

_OLDEST_BINDINGS: Final = (12, 9, 10)
"""Earlier ones were not tried; 12.8.0 keeps the GIL in calls that block."""
_BINDINGS_END: Final = (14,)


def are_bindings_supported(version: str) -> bool:
    """Whether aiokv works with this version of cuda-bindings; of "12.9.10.post1" the numbers in front count."""
    return _OLDEST_BINDINGS <= _numbers(version) < _BINDINGS_END


def is_driver_supported(version: str) -> bool:
    """Whether aiokv works with a driver that supports this CUDA version, such as "12.9"."""
    return _numbers(version) >= _numbers(OLDEST_DRIVER)


def as_text(version: int) -> str:
    """The driver's number for a CUDA version as it is written elsewhere: 12090 is "12.9"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, takewhile(str.isdecimal, version.split("."))))
