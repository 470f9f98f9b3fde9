"""Whether what is asked for fits into memory, and whether a process grows: samples of its resident memory, and the
slope of a straight line through them.

The first third of a run is warm-up (pools are touched, caches of the interpreter fill) and left out.
"""

from __future__ import annotations

import resource
import sys
from typing import Final, final

import numpy as np

from aiokv.backends.host_memory import read_host_memory
from aiokv.backends.memory_plan import SLOT_STATE_BYTES
from aiokv.errors import ConfigError

__all__ = ["BYTES_PER_SLOT", "MemoryTrend", "available_memory", "require_memory", "resident_bytes"]

BYTES_PER_SLOT: Final = SLOT_STATE_BYTES
_STATM: Final = "/proc/self/statm"
_WARM_UP: Final = 1 / 3
_LEAST_SAMPLES: Final = 3
_MIB: Final = 2**20


@final
class MemoryTrend:
    """Resident bytes over time."""

    __slots__ = ("_bytes", "_seconds")

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._bytes: list[int] = []

    def sample(self, at_s: float) -> None:
        """Look now; `at_s` are seconds since the run began."""
        self._seconds.append(at_s)
        self._bytes.append(resident_bytes())

    @property
    def mean_bytes(self) -> float:
        """Over the run after its warm-up; 0.0 without samples."""
        _, sizes = self._after_warm_up()
        return float(sizes.mean()) if len(sizes) else 0.0

    @property
    def slope_percent(self) -> float:
        """How much a least squares line rises from the end of the warm-up to the last sample, in percent of the mean.

        0.0 with fewer than three samples: they show no trend. Negative where memory shrank.
        """
        seconds, sizes = self._after_warm_up()
        if len(seconds) < _LEAST_SAMPLES or seconds[-1] == seconds[0]:
            return 0.0
        slope = float(np.polyfit(seconds - seconds[0], sizes, 1)[0])
        return 100.0 * slope * float(seconds[-1] - seconds[0]) / self.mean_bytes

    def _after_warm_up(self) -> tuple[np.ndarray, np.ndarray]:
        seconds = np.array(self._seconds, np.float64)
        kept = seconds >= (seconds[-1] * _WARM_UP if len(seconds) else 0.0)
        return seconds[kept], np.array(self._bytes, np.float64)[kept]


def resident_bytes() -> int:
    """Resident memory of this process; where the system does not tell, its peak."""
    try:
        with open(_STATM, encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def available_memory() -> int:
    """Bytes that this process may still take."""
    memory = read_host_memory()
    return memory.memory_available if memory.memory_left is None else min(memory.memory_left, memory.memory_available)


def require_memory(needed: int, *, what: str) -> None:
    """`ConfigError` if so many bytes will not fit: better than being killed half way through."""
    available = available_memory()
    if needed > available:
        raise ConfigError(f"{what} take about {needed // _MIB:,} MiB, {available // _MIB:,} are available")
