"""How the next token is chosen from the logits: the most likely one, or one drawn by its probability.

Called in the worker's thread, for one request's tokens one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import torch
from torch import Tensor

from aiokv.errors import UsageError

__all__ = ["Chooser", "Sampler", "Sampling", "choose_likeliest", "make_chooser"]

Chooser: TypeAlias = Callable[[Tensor], int]
"""Takes float32 logits, `[vocab_size]`; returns a token id."""

_SEED_BITS: Final = 63


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """`temperature` 0 is greedy. Of the likeliest tokens so many are kept that they have `top_p` of the probability.

    The same `seed` draws the same tokens from the same logits; without one they differ from call to call.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise UsageError(f"temperature must be at least 0, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p must be more than 0 and at most 1, not {self.top_p}")


@final
class Sampler:
    """Draws tokens with a generator of its own, so that who else is running does not show."""

    __slots__ = ("_generator", "_sampling")

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed % 2**_SEED_BITS)

    def __call__(self, logits: Tensor) -> int:
        """Draws one token. The largest logit becomes 0 first, so that no temperature is too small."""
        scaled = (logits - logits.max()).double() / self._sampling.temperature
        chances, token_ids = scaled.softmax(dim=-1).sort(descending=True)
        if self._sampling.top_p < 1.0:
            before = chances.cumsum(dim=-1) - chances
            chances = chances.masked_fill(before >= self._sampling.top_p, 0.0)
        place = torch.multinomial(chances, 1, generator=self._generator)
        return int(token_ids[place])


def choose_likeliest(logits: Tensor) -> int:
    """Returns the likeliest token; of several the one with the smallest id."""
    return int(logits.argmax())


def make_chooser(sampling: Sampling) -> Chooser:
    """Returns what chooses the tokens of one request."""
    return Sampler(sampling) if sampling.temperature else choose_likeliest
