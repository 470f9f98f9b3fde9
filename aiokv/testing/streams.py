"""Prompts with few names: every prompt is a prefix of a *stream*, fixed token sequences that share their beginnings.

So every block of every request is block p of stream s, and the model of what slots hold can name it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, final

from aiokv.core.cache import CacheState
from aiokv.model.ids import Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import Hit
from aiokv.model.spec import CacheGeometry, ChunkedLocal, FullAttention, GroupSpec, SlidingWindow

__all__ = ["FORKS", "STREAM_TOKENS", "Streams", "geometry_of", "hit_of", "is_covered", "letters_of", "stream_tokens"]

STREAM_TOKENS: Final = 96
FORKS: Final = (0, 0, 20)
"""Stream s > 0 shares its first FORKS[s] tokens with stream 0."""


def stream_tokens(stream: int, start: int, stop: int) -> list[int]:  # noqa: PLR0917  # like a slice
    """Tokens `[start, stop)` of a stream."""
    return [i if stream == 0 or i < FORKS[stream] else 1000 * stream + i for i in range(start, stop)]


def geometry_of(*groups: GroupSpec, hash_block_size: int = 4) -> CacheGeometry:
    """A geometry of these groups."""
    return CacheGeometry(groups=groups, hash_block_size=hash_block_size)


def is_covered(spec: GroupSpec, block: int, *, length: int, position: int) -> bool:
    """By the mask: does the query at `length`, or the state after it, need a token of this block before `length`?"""
    tokens = range(position * block, min((position + 1) * block, length))
    match spec:
        case FullAttention():
            return bool(tokens)
        case SlidingWindow(window=window):
            return any(length - token < window for token in tokens)
        case ChunkedLocal(chunk=chunk):
            return any(token // chunk == length // chunk for token in tokens)
        case _:
            return length - 1 in tokens


def hit_of(totals: Counter[str]) -> Hit:
    """Tokens counted by source, as a value."""
    return Hit(
        prompt_tokens=sum(totals.values()),
        gpu_tokens=totals["gpu"],
        cpu_tokens=totals["cpu"],
        compute_tokens=totals["compute"],
    )


@final
class Streams:
    """The streams of one geometry: their keys, the hashes of their blocks, and whose block a hash is."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self.geometry = geometry
        self.sizes = [geometry.effective_block_size(i) for i in range(len(geometry.groups))]
        """Tokens of one block, per group."""
        self._keys: dict[tuple[int, int], BlockKeys] = {}
        self._digests: dict[tuple[int, int], list[bytes]] = {}
        self._places: dict[tuple[int, bytes], tuple[int, int]] = {}

    def keys(self, stream: int, num_tokens: int = STREAM_TOKENS) -> BlockKeys:
        """The keys of a prompt; the same object each time."""
        if (stream, num_tokens) not in self._keys:
            tokens = stream_tokens(stream, 0, num_tokens)
            self._keys[stream, num_tokens] = BlockKeys(tokens, hash_block_size=self.geometry.hash_block_size)
        return self._keys[stream, num_tokens]

    def digests(self, stream: int, group: int) -> list[bytes]:
        """The hashes of all blocks of a stream in one group."""
        if (stream, group) not in self._digests:
            step = self.geometry.hashes_per_block(group)
            keys = self.keys(stream)
            rows = keys.digests(step, 0, keys.num_blocks // step)
            self._digests[stream, group] = [row.tobytes() for row in rows]
        return self._digests[stream, group]

    def digest(self, stream: int, group: int, position: int) -> bytes:  # noqa: PLR0917  # where a block is
        """The hash of one block."""
        return self.digests(stream, group)[position]

    def place_of(self, group: int, digest: bytes) -> tuple[int, int]:
        """A stream and the position of the block with this hash; `KeyError` if it is of no stream."""
        if (group, digest) not in self._places:
            for stream in range(len(FORKS)):
                for position in range(STREAM_TOKENS // self.sizes[group]):
                    self._places.setdefault((group, self.digest(stream, group, position)), (stream, position))
        return self._places[group, digest]

    def is_prompt(self, tokens: Sequence[int]) -> bool:
        """Whether any stream begins with these tokens."""
        return any(list(tokens) == stream_tokens(stream, 0, len(tokens)) for stream in range(len(FORKS)))

    def stream_of(self, tokens: Sequence[int]) -> int:
        """The first stream that begins with these tokens; `LookupError` if none does."""
        for stream in range(len(FORKS)):
            if list(tokens) == stream_tokens(stream, 0, len(tokens)):
                return stream
        raise LookupError(f"tokens {list(tokens)} begin no stream")


def letters_of(cache: CacheState, streams: Streams, *, stream: int, group: int) -> str:
    """Where a cache finds the blocks of one group of a stream: g GPU, c CPU, b both, - neither."""
    gpu = cache.find_blocks(streams.keys(stream), group=group, tier=Tier.GPU)
    cpu = cache.find_blocks(streams.keys(stream), group=group, tier=Tier.CPU)
    return "".join("-gcb"[g + 2 * c] for g, c in zip(gpu.present, cpu.present, strict=True))
