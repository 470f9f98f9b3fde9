"""The contract's answer to "how long is the hit, and where does each token come from", by brute force.

For tests, ours and those of whoever embeds aiokv. It shares nothing with the lookup: what a prefix needs is derived
from attention masks, one query and one position at a time. Slow on purpose; a few hundred tokens are fine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from aiokv.errors import ConfigError
from aiokv.model.spec import CacheGeometry, ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow

__all__ = ["TokenSource", "exhaustive_hit", "exhaustive_sources"]

TokenSource = Literal["gpu", "cpu", "compute"]

_LETTERS: Final = "gcb-"
_ABSENT: Final = "-"


def exhaustive_hit(  # noqa: PLR0917  # reads best in a test
    geometry: CacheGeometry, num_tokens: int, layout: Mapping[str, str], *, align: int = 1
) -> int:
    """The largest valid prefix, in tokens, of a prompt of `num_tokens` tokens.

    `layout` has per group one letter per block: g GPU, c CPU, b both, - neither; what lies beyond the string, and a
    group without one, is absent. Raises `ConfigError` for an unknown group or letter and for an `align` below 1.
    """
    groups = _groups(geometry, layout=layout, num_tokens=num_tokens, align=align)
    return _longest(groups, num_tokens=num_tokens, align=align)


def exhaustive_sources(  # noqa: PLR0917  # like `exhaustive_hit`
    geometry: CacheGeometry, num_tokens: int, layout: Mapping[str, str], *, align: int = 1
) -> tuple[TokenSource, ...]:
    """Where each token of the prompt comes from when it resumes at `exhaustive_hit`. Takes and raises the same."""
    groups = _groups(geometry, layout=layout, num_tokens=num_tokens, align=align)
    length = _longest(groups, num_tokens=num_tokens, align=align)
    covered = [{b for b in range(length // g.block) if g.is_covered(b, length)} for g in groups]
    sources: list[TokenSource] = ["compute"] * num_tokens
    following: TokenSource = "gpu"
    for position in reversed(range(length)):
        blocks = [(g, position // g.block) for g in groups]
        letters = {g.letter(b) for (g, b), needed in zip(blocks, covered, strict=True) if b in needed}
        if letters:
            following = "cpu" if "c" in letters else "gpu"
        sources[position] = following
    return tuple(sources)


class _Group:
    """One group's blocks and, for each position, the last query that reads it."""

    def __init__(self, geometry: CacheGeometry, index: int, *, layout: Mapping[str, str], num_tokens: int) -> None:
        self.spec = geometry.groups[index]
        self.block = self.spec.block_size * (geometry.context_parallel if self.spec.sharded else 1)
        self.letters = layout.get(self.spec.name, "")
        self.num_tokens = num_tokens
        self.last_query = [_last_query(self.spec, p, num_tokens=num_tokens) for p in range(num_tokens)]

    def can_resume(self, length: int) -> bool:
        """Whether queries from `length` on find all they read, and draft heads the margin they recompute."""
        missing = any(not self.is_resident(b) and self.is_covered(b, length) for b in range(length // self.block))
        return not missing and (not self.spec.lookahead or self.has_margin(length))

    def has_margin(self, length: int) -> bool:
        """Whether one more block after `length` is resident and ends before the last token."""
        return length + self.block <= self.num_tokens - 1 and self.is_resident(length // self.block)

    def is_covered(self, block: int, length: int) -> bool:
        """Whether block number `block` must be there to go on after `length` tokens."""
        first = block * self.block
        return any(self.is_needed(p, length) for p in range(first, min(first + self.block, length)))

    def is_needed(self, position: int, length: int) -> bool:
        """Whether some query at or after `length` needs what was cached at `position`."""
        if isinstance(self.spec, RecurrentState):
            return position == length - 1  # the state after exactly `length` tokens stands in the block that ends there
        return self.last_query[position] >= length

    def is_resident(self, block: int) -> bool:
        """Whether block number `block` is in either tier."""
        return self.letter(block) != _ABSENT

    def letter(self, block: int) -> str:
        """Where block number `block` is."""
        return self.letters[block] if block < len(self.letters) else _ABSENT


def _last_query(spec: GroupSpec, position: int, *, num_tokens: int) -> int:
    """The last query up to `num_tokens`, which is past every prefix, that reads `position`."""
    match spec:
        case SlidingWindow(window=reach) | ChunkedLocal(chunk=reach):
            horizon = min(position + reach, num_tokens)
        case _:
            horizon = num_tokens
    candidates = range(horizon, position, -1)
    return next((q for q in candidates if _reads(spec, query=q, position=position)), position)


def _reads(spec: GroupSpec, *, query: int, position: int) -> bool:
    """The attention mask."""
    match spec:
        case FullAttention():
            return position <= query
        case SlidingWindow(window=window):
            return query - window < position <= query
        case ChunkedLocal(chunk=chunk):
            return position // chunk == query // chunk and position <= query
        case _:
            return False


def _longest(groups: list[_Group], *, num_tokens: int, align: int) -> int:
    length = 0
    for candidate in range(1, num_tokens):
        aligned = candidate % align == 0 and all(candidate % g.block == 0 for g in groups)
        if aligned and all(g.can_resume(candidate) for g in groups):
            length = candidate
    return length


def _groups(geometry: CacheGeometry, *, layout: Mapping[str, str], num_tokens: int, align: int) -> list[_Group]:
    if isinstance(align, bool) or align < 1:
        raise ConfigError(f"align must be a positive integer, not {align!r}")
    for name, letters in layout.items():
        geometry.group_index(name)
        unknown = sorted(set(letters) - set(_LETTERS))
        if unknown:
            raise ConfigError(
                f"group {name!r}: unknown letters {unknown} in {letters!r}; each block is one of {_LETTERS!r}"
            )
    return [_Group(geometry, i, layout=layout, num_tokens=num_tokens) for i in range(len(geometry.groups))]
