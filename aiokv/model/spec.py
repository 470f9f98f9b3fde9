"""What the model's layers need cached: groups of layers, their attention kind, and the geometry they form together.

A *group* is a set of layers that share one spec and one block table. Its block size `B` is a multiple of the hash
block size `H`. The geometry knows the alignment of hits and checks the whole at construction, so that nobody below
has to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from aiokv.errors import ConfigError
from aiokv.model.numbers import is_whole

__all__ = ["CacheGeometry", "ChunkedLocal", "FullAttention", "GroupSpec", "RecurrentState", "SlidingWindow"]


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What every group states: its name, tokens per block, and whether context parallelism spreads its blocks.

    `lookahead` marks draft heads (EAGLE/MTP) that recompute the last block of a hit; only full and window groups may.
    """

    name: str
    block_size: int = field(kw_only=True)
    lookahead: bool = field(default=False, kw_only=True)
    sharded: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        _require(isinstance(self.name, str) and self.name, "a group needs a name")
        _require(_is_positive_int(self.block_size), f"group {self.name!r}: block_size must be a positive integer")


@dataclass(frozen=True, slots=True)
class FullAttention(GroupSpec):
    """Every query reads every earlier position."""


@dataclass(frozen=True, slots=True)
class SlidingWindow(GroupSpec):
    """A query at position q reads positions `[q - window + 1, q]`: the window includes the query itself."""

    window: int = field(kw_only=True)

    def __post_init__(self) -> None:
        GroupSpec.__post_init__(self)
        _require(_is_positive_int(self.window), f"group {self.name!r}: window must be a positive integer")


@dataclass(frozen=True, slots=True)
class ChunkedLocal(GroupSpec):
    """A query at position q reads positions `[floor(q / chunk) * chunk, q]`, counted from the start of the prompt."""

    chunk: int = field(kw_only=True)

    def __post_init__(self) -> None:
        GroupSpec.__post_init__(self)
        _require(_is_positive_int(self.chunk), f"group {self.name!r}: chunk must be a positive integer")
        _require(not self.lookahead, f"group {self.name!r}: lookahead needs a full or window group")


@dataclass(frozen=True, slots=True)
class RecurrentState(GroupSpec):
    """One state per sequence; a slot holds the state after exactly so many tokens."""

    def __post_init__(self) -> None:
        GroupSpec.__post_init__(self)
        _require(not self.lookahead, f"group {self.name!r}: lookahead needs a full or window group")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGeometry:
    """All groups of a model and the block size of the hashes, in tokens.

    `context_parallel` is the degree D of context parallelism: groups marked `sharded` have an effective block of
    `block_size * D` tokens. `sub_block_hits`, by which a prefix may end inside a block, is refused by this version.
    """

    groups: tuple[GroupSpec, ...]
    hash_block_size: int
    context_parallel: int = 1
    sub_block_hits: bool = False
    block_sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Per group, `effective_block_size`."""
    _alignment: int = field(init=False, repr=False, compare=False)
    full_groups: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The indices of the groups of full attention."""
    other_groups: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The indices of all others."""
    not_prefixes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The indices of groups that a resident leading run of blocks is not enough for: all but full ones without
    lookahead."""

    def __post_init__(self) -> None:
        _require(isinstance(self.groups, tuple) and self.groups, "a geometry needs a tuple of at least one group")
        kinds = (FullAttention, SlidingWindow, ChunkedLocal, RecurrentState)
        _require(all(isinstance(g, kinds) for g in self.groups), "every group must be of one of the four kinds")
        names = [g.name for g in self.groups]
        _require(len(set(names)) == len(names), f"group names must differ: {names}")
        _require(_is_positive_int(self.hash_block_size), "hash_block_size must be a positive integer")
        _require(_is_positive_int(self.context_parallel), "context_parallel must be a positive integer")
        for group in self.groups:
            _require(
                group.block_size % self.hash_block_size == 0,
                f"group {group.name!r}: block_size {group.block_size} is no multiple of "
                f"hash_block_size {self.hash_block_size}",
            )
        _require(not self.sub_block_hits, "sub_block_hits is not supported by this version")
        sizes = tuple(group.block_size * (self.context_parallel if group.sharded else 1) for group in self.groups)
        full = [i for i, group in enumerate(self.groups) if isinstance(group, FullAttention)]
        rest = [i for i, group in enumerate(self.groups) if group.lookahead or not isinstance(group, FullAttention)]
        object.__setattr__(self, "block_sizes", sizes)
        object.__setattr__(self, "_alignment", math.lcm(*sizes))
        object.__setattr__(self, "full_groups", tuple(full))
        object.__setattr__(self, "other_groups", tuple(i for i in range(len(sizes)) if i not in full))
        object.__setattr__(self, "not_prefixes", tuple(rest))

    def group_index(self, name: str) -> int:
        """The position of the group called `name`; `ConfigError` names the known ones."""
        for index, group in enumerate(self.groups):
            if group.name == name:
                return index
        known = ", ".join(repr(g.name) for g in self.groups)
        raise ConfigError(f"unknown group {name!r}; this geometry has {known}")

    def effective_block_size(self, index: int) -> int:
        """Tokens per block of group `index`, context parallelism included."""
        return self.block_sizes[index]

    def hashes_per_block(self, index: int) -> int:
        """Hash blocks in one block of group `index`."""
        return self.block_sizes[index] // self.hash_block_size

    def alignment(self, align: int = 1) -> int:
        """`A` of the contract: the least common multiple of all effective block sizes and of `align`, in tokens."""
        return math.lcm(align, self._alignment) if align > 1 else self._alignment


def _is_positive_int(value: object) -> bool:
    return is_whole(value) and value > 0
