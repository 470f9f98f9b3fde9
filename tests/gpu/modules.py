"""Which modules are here, asked before anything is imported; and aiokv where its runtime misses one."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final

FOR_REQUESTS: Final = ("anyio", "prometheus_client")
"""What `aiokv.runtime` imports beside numpy."""

_ROOT: Final = Path(__file__).resolve().parents[2]


def find_missing(names: Iterable[str]) -> tuple[str, ...]:
    """Those that are not installed."""
    return tuple(name for name in names if not _is_installed(name))


def import_aiokv_without_its_runtime() -> None:
    """`import aiokv` imports the runtime as well: where that misses something, the package becomes a mere folder."""
    if "aiokv" not in sys.modules:
        package = ModuleType("aiokv")
        package.__path__ = [str(_ROOT / "aiokv")]
        sys.modules["aiokv"] = package


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:  # the package that it would be in
        return False
