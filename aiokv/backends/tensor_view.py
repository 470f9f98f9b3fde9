"""`TensorView`: what a tensor says of itself, whatever library it is of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from aiokv.errors import ConfigError

__all__ = ["TensorView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """What is known of one tensor. `strides` are in bytes; `owner` keeps its memory alive."""

    label: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    device: str
    owner: object = field(repr=False, compare=False)

    def reject(self, why: str) -> NoReturn:
        """Raise the `ConfigError` that names this tensor."""
        raise ConfigError(f"{self.label} of shape {list(self.shape)}: {why}")
