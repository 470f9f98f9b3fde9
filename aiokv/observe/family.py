"""What one metric family is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import final

from aiokv.observe.readers import Reading, View

__all__ = ["Family", "Kind"]


class Kind(Enum):
    """The types of the exposition format that are used."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family; `name` is without the suffixes that its samples get (`_total`, `_bucket`, `_info`)."""

    name: str
    kind: Kind
    help: str
    read: Callable[[View], Iterable[Reading]]
    labels: tuple[str, ...] = ()
    unit: str = ""
