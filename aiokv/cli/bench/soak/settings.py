"""What a soak is asked for, and the model and prompts it talks about."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from aiokv.errors import ConfigError
from aiokv.model.plan import Checksum, StorePolicy
from aiokv.model.spec import CacheGeometry, ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow

__all__ = ["BLOCK", "LONGEST_TOKENS", "Sabotage", "SoakBackend", "SoakSettings", "parse_groups"]

BLOCK: Final = 16
"""Tokens."""
LONGEST_TOKENS: Final = 40 * BLOCK
"""No request knows or reserves more tokens."""

_GROUPS: Final[dict[str, GroupSpec]] = {
    "full": FullAttention("full", block_size=BLOCK),
    "window": SlidingWindow("window", block_size=BLOCK, window=100),
    "chunk": ChunkedLocal("chunk", block_size=BLOCK, chunk=64),
    "state": RecurrentState("state", block_size=2 * BLOCK),
}
_MIXES: Final = (
    ("full", "window", "chunk", "state"),
    ("full", "window", "chunk"),
    ("full", "state"),
    ("window", "chunk"),
)
_STATE_SLOTS: Final = 3
"""What a request needs in a recurrent group: the hit, the working state and the one that is being captured."""


class Sabotage(StrEnum):
    """What is broken on purpose, so that a run shows what it would find."""

    NONE = "none"
    BYTE = "byte"
    """Some copies end well with one byte wrong."""
    LEASE = "lease"
    """One lease is kept and never given back."""
    COPY = "copy"
    """One copy never ends."""


class SoakBackend(StrEnum):
    """What copies."""

    HOST = "host"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSettings:
    """One run."""

    seconds: float = 60.0
    seed: int = 0
    clients: int = 32
    gpu_blocks: int = 512
    cpu_blocks: int = 1024
    faults: float = 0.02
    """Fraction of copies that fail; as many are late, half as many are refused."""
    store_policy: StorePolicy = StorePolicy.EAGER
    groups: tuple[str, ...] = ()
    """Kinds of attention, by the names of their groups; with none the seed chooses, and 0 takes all."""
    checksum: Checksum = Checksum.OFF
    """With one, bytes in the CPU tier are changed behind the runtime's back."""
    remote_ranks: int = 0
    """Ranks beside the one that really copies: they only report, in any order."""
    grace_s: float = 5.0
    """How long to wait at the end for what must come to rest."""
    sabotage: Sabotage = Sabotage.NONE
    backend: SoakBackend = SoakBackend.HOST

    def __post_init__(self) -> None:
        """`ConfigError` for groups that do not exist, and for pools in which a long request never fits."""
        if not self.groups:
            object.__setattr__(self, "groups", _MIXES[self.seed % len(_MIXES)])
        if unknown := [name for name in self.groups if name not in _GROUPS]:
            raise ConfigError(f"--groups: there is no {unknown[0]!r}, only {', '.join(_GROUPS)}")
        if len(set(self.groups)) != len(self.groups):
            raise ConfigError(f"--groups names a group twice: {','.join(self.groups)}")
        if not self.positional:
            raise ConfigError("--groups: besides state there must be full, window or chunk")
        if self.backend is SoakBackend.CUDA and self.sabotage not in (Sabotage.NONE, Sabotage.LEASE):
            raise ConfigError(f"--sabotage {self.sabotage.value} is for --backend host")
        least = self.positional * LONGEST_TOKENS // BLOCK + _STATE_SLOTS * self.recurrent + 1
        if self.gpu_blocks < least:
            raise ConfigError(f"a soak needs at least {least} GPU blocks, not {self.gpu_blocks}")

    @property
    def geometry(self) -> CacheGeometry:
        """That of the model."""
        return CacheGeometry(groups=tuple(_GROUPS[name] for name in self.groups), hash_block_size=BLOCK)

    @property
    def positional(self) -> int:
        """How many groups keep KV by position."""
        return len(self.groups) - self.recurrent

    @property
    def recurrent(self) -> int:
        """How many groups keep a state."""
        return sum(isinstance(_GROUPS[name], RecurrentState) for name in self.groups)


def parse_groups(text: str) -> tuple[str, ...]:
    """Names between commas; none for an empty text."""
    return tuple(name for name in map(str.strip, text.split(",")) if name)
