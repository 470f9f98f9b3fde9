"""What repeats of one measurement say together: the median, and how far the others lie from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

__all__ = ["spread_of"]

_QUANTILES: Final = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


def spread_of(name: str, samples: Sequence[float], *, digits: int = 3) -> dict[str, float]:
    """`name_p10`, `name_p50` and `name_p90` of at least one sample."""
    values = np.quantile(samples, tuple(_QUANTILES.values())).tolist()
    return {f"{name}_{quantile}": round(value, digits) for quantile, value in zip(_QUANTILES, values, strict=True)}
