"""Who moves the bytes of a benchmark of copies."""

from __future__ import annotations

from aiokv.cli.bench.device import DriverKind, find_driver
from aiokv.errors import ConfigError
from aiokv.model.ids import KeyEnum

__all__ = ["CopyBackend", "find_device"]


class CopyBackend(KeyEnum):
    """Who moves the bytes."""

    AUTO = "auto"
    """A CUDA device, the fake driver of a checkout, or else the host: the first that there is."""
    CUDA = "cuda"
    """A CUDA device, or the fake driver of a checkout."""
    HOST = "host"


def find_device(backend: CopyBackend) -> DriverKind | None:
    """What answers where a device is meant, None for the host; `ConfigError` says what a device that must be misses."""
    if backend is CopyBackend.HOST:
        return None
    try:
        return find_driver()
    except ConfigError:
        if backend is CopyBackend.CUDA:
            raise
        return None
