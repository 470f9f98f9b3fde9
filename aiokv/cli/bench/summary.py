"""What benchmarks tell of repeated measurements, and of the interpreter and the processor that they ran on."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np

__all__ = ["Spread", "describe_interpreter"]

_CPUINFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and 10th and 90th percentile of repeated measurements, in the unit of these."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of at least one value; between two of them percentiles are interpolated."""
        p10, median, p90 = np.quantile(values, (0.1, 0.5, 0.9)).tolist()
        return cls(median=median, p10=p10, p90=p90)

    def figures(self, *, digits: int = 3) -> Mapping[str, float]:
        """As they are reported, rounded."""
        return {name: round(getattr(self, name), digits) for name in ("median", "p10", "p90")}


def describe_interpreter(*, cpuinfo: Path = _CPUINFO) -> Mapping[str, str]:
    """The version of Python and the processor's name, as far as the system tells it."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "cpu": _read_cpu_model(cpuinfo) or platform.processor() or platform.machine(),
    }


def _read_cpu_model(cpuinfo: Path) -> str:
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""
