"""Identity of a request's blocks: canonical bytes in, SHA-256 digests out (law 10).

Every hash block gets one digest that stands for *everything* before its end: root, tokens and media of the whole
prefix, at absolute positions. Two prefixes have the same digest only if all of that is equal.

What is hashed (`<` = little-endian; every variable part is length-prefixed or counted, so no two inputs share bytes):

- root    = SHA256(ROOT_DOMAIN, <u64 hash block size, field(salt), field(adapter)), `field` = 00 for None, else
  01, <u64 byte length, UTF-8 bytes.
- header of the segment that starts at block s = SEGMENT_DOMAIN, digest of block s - 1 (the root for s = 0), <u64 number
  of media spans that start in block s, then for each: <u64 digest length, digest, <u64 start relative to the block's
  first token, <u64 length of the span.
- digest of block i = SHA256(header of its segment, tokens of blocks s..i as <i32).

A segment starts at every `SEGMENT_BLOCKS`-th block and at every block in which a media span starts; so each block that
a span overlaps or follows depends on it. Inside a segment one running SHA-256 is read out after each block, a third
cheaper than a new hash object per block; the bound keeps the price of resuming after `truncate` small.
`SEGMENT_BLOCKS = 1` would be the plain chain hash(parent, tokens).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from aiokv.errors import ConfigError, UsageError
from aiokv.model.ids import DIGEST_WORDS, DigestArray
from aiokv.model.media import MediaMap, MediaSpan, canonical_spans
from aiokv.model.numbers import is_whole
from aiokv.model.tokens import TokenArray, TokenIds, as_tokens

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["SEGMENT_BLOCKS", "BlockKeys", "MediaSpan"]

SEGMENT_BLOCKS: Final = 256
"""Most hash blocks under one running hash. Part of the identity: changing it changes every digest."""

ROOT_DOMAIN: Final = b"aiokv/1/root\0"
SEGMENT_DOMAIN: Final = b"aiokv/1/segment\0"
_MAX_BLOCK: Final = 2**24
_SLACK_TOKENS: Final = 64
_SLACK_PART: Final = 16


@final
class BlockKeys:
    """Token ids of one request and the digests of its full hash blocks, at absolute positions; both only grow or shrink
    at the end.

    Digests are computed on demand, in slices if the caller wants (`hash_more`), each once. Salt and adapter are kept as
    the root digest only. Raises `UsageError` for ids that are no int32 integers, with the position of the first.
    """

    __slots__ = (
        "_block_dtype",
        "_digests",
        "_hash_block_size",
        "_hashed",
        "_hasher",
        "_media",
        "_num_tokens",
        "_root",
        "_tokens",
        "notes",
    )

    def __init__(
        self,
        token_ids: TokenIds,
        *,
        hash_block_size: int,
        salt: str | None = None,
        adapter: str | None = None,
        media: Iterable[MediaSpan] = (),
    ) -> None:
        if not is_whole(hash_block_size) or not 0 < hash_block_size <= _MAX_BLOCK:
            raise ConfigError(f"hash_block_size must be an integer from 1 to {_MAX_BLOCK}, not {hash_block_size!r}")
        tokens = as_tokens(token_ids)
        self._hash_block_size = hash_block_size
        self._block_dtype = np.dtype((np.void, 4 * hash_block_size))
        self._root = _root_digest(hash_block_size, salt=salt, adapter=adapter)
        self._media = MediaMap(media)
        self._num_tokens = len(tokens)
        self._tokens = np.empty(len(tokens) + _SLACK_TOKENS, "<i4")
        self._tokens[: len(tokens)] = tokens
        self._digests: DigestArray = np.empty((len(self._tokens) // hash_block_size + 1, DIGEST_WORDS), np.uint64)
        self._hashed = 0
        self._hasher: _Hash | None = None
        self.notes: dict[object, Any] = {}
        """What caches have put down with these keys, each under an identity of its own; shared with copies. Says
        nothing about what the blocks are; `truncate` and `append` leave it as it is."""

    @property
    def hash_block_size(self) -> int:
        """Tokens per digest."""
        return self._hash_block_size

    @property
    def num_tokens(self) -> int:
        """Tokens known."""
        return self._num_tokens

    @property
    def num_blocks(self) -> int:
        """Full hash blocks among the tokens known."""
        return self._num_tokens // self._hash_block_size

    @property
    def num_hashed(self) -> int:
        """Leading hash blocks whose digest has been computed."""
        return self._hashed

    @property
    def identity(self) -> bytes:
        """The root digest: what salt, adapter and hash block size were."""
        return self._root

    def tokens(self, start: int, stop: int) -> TokenArray:
        """Tokens `[start, stop)`, a read-only view that is valid until `truncate`."""
        if not 0 <= start <= stop <= self._num_tokens:
            raise UsageError(f"tokens [{start}, {stop}) are not among the {self._num_tokens} known")
        view = self._tokens[start:stop]
        view.flags.writeable = False
        return view

    def digests(self, step: int, start: int, stop: int) -> DigestArray:  # noqa: PLR0917  # reads like a range
        """Digests of blocks `[start, stop)` of `step` hash blocks each: contiguous, read-only, valid until `truncate`.

        What was not hashed yet is hashed first, in one go; call `hash_more` before to do that in slices.
        """
        if step < 1 or not 0 <= start <= stop or stop * step > self.num_blocks:
            raise UsageError(f"blocks [{start}, {stop}) x {step} are not among the {self.num_blocks} full hash blocks")
        if self._hashed < stop * step:
            self._hash_until(stop * step)
        rows = self._digests[start:stop]
        if step > 1:
            rows = np.ascontiguousarray(self._digests[start * step + step - 1 : stop * step : step])
        rows.flags.writeable = False
        return rows

    def hash_more(self, limit_blocks: int) -> int:
        """Compute at most `limit_blocks` further digests; returns how many full hash blocks are left without one."""
        if limit_blocks < 0:
            raise UsageError(f"cannot hash {limit_blocks} blocks")
        self._hash_until(min(self._hashed + limit_blocks, self.num_blocks))
        return self.num_blocks - self._hashed

    def make_room(self, num_tokens: int) -> None:
        """Allocate memory now for so many tokens in all, and for some that are generated after them."""
        total = num_tokens + num_tokens // _SLACK_PART + _SLACK_TOKENS
        if total > len(self._tokens):
            self._grow_tokens(total)
            self._grow_digests(total // self._hash_block_size + 1)

    def append(self, token_ids: TokenIds) -> None:
        """Add tokens at the end; nothing changes if they are refused. Amortised constant time per token."""
        new = as_tokens(token_ids)
        total = self._num_tokens + len(new)
        if total > len(self._tokens):
            self._grow_tokens(max(total, 2 * len(self._tokens)))
        self._tokens[self._num_tokens : total] = new
        self._num_tokens = total

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, their digests and their media; refused inside a media span."""
        if not is_whole(num_tokens) or not 0 <= num_tokens <= self._num_tokens:
            raise UsageError(f"cannot keep {num_tokens!r} of {self._num_tokens} tokens")
        if num_tokens == self._num_tokens:
            return
        self._media = self._media.before(num_tokens)
        self._num_tokens = num_tokens
        self._tokens = self._tokens[:num_tokens]  # what follows goes into a buffer of its own: a twin may read this one
        if self.num_blocks < self._hashed:
            self._hashed = self.num_blocks
            self._digests = self._digests[: self._hashed]
            self._hasher = None

    def sibling(self, token_ids: TokenIds, *, media: Iterable[MediaSpan] | None = None) -> BlockKeys:
        """Keys of other tokens with the same salt and adapter, and the same media unless others are given."""
        keys = BlockKeys(token_ids, hash_block_size=self._hash_block_size, media=() if media is None else media)
        keys._root = self._root
        keys._media = self._media if media is None else keys._media
        return keys

    def copy(self) -> BlockKeys:
        """An independent twin: same tokens, digests computed so far, media and root. Takes constant time."""
        return self.__copy__()

    def __copy__(self) -> BlockKeys:
        twin = object.__new__(BlockKeys)
        twin._hash_block_size = self._hash_block_size
        twin._block_dtype = self._block_dtype
        twin._root = self._root
        twin._media = self._media
        twin._num_tokens = self._num_tokens
        twin._tokens = self._tokens[: self._num_tokens]  # without room to grow, so only one of the two writes behind it
        twin._digests = self._digests[: self._hashed]
        twin._hashed = self._hashed
        twin._hasher = self._hasher.copy() if self._hasher is not None else None
        twin.notes = self.notes
        return twin

    def _hash_until(self, stop: int) -> None:
        if stop > len(self._digests):
            self._grow_digests(max(stop, 2 * len(self._digests)))
        while self._hashed < stop:
            self._hash_run(stop)

    def _grow_tokens(self, size: int) -> None:
        grown = np.empty(size, "<i4")
        grown[: self._num_tokens] = self._tokens[: self._num_tokens]
        self._tokens = grown

    def _grow_digests(self, size: int) -> None:
        grown = np.empty((size, DIGEST_WORDS), np.uint64)
        grown[: self._hashed] = self._digests[: self._hashed]
        self._digests = grown

    def _hash_run(self, stop: int) -> None:
        """Hash blocks up to `stop` or to the next start of a segment."""
        first, size = self._hashed, self._hash_block_size
        hasher = self._segment_hasher(first)
        self._hasher = None  # until the rows are written, so that an interrupt cannot leave it ahead of them
        stop = min(stop, self._next_segment(first))
        digest = hasher.digest
        chunks = self._tokens[first * size : stop * size].view(self._block_dtype).tolist()
        joined = b"".join([digest() for _ in map(hasher.update, chunks)])
        self._digests[first:stop] = np.frombuffer(joined, np.uint64).reshape(-1, DIGEST_WORDS)
        self._hasher = hasher
        self._hashed = stop

    def _segment_hasher(self, block: int) -> _Hash:
        """The running hash of the segment that holds `block`, fed with what precedes `block`."""
        start = self._segment_start(block)
        if start < block and self._hasher is not None:
            return self._hasher
        parent = self._digests[start - 1].tobytes() if start else self._root
        size = self._hash_block_size
        spans = self._media.starting(start * size, (start + 1) * size)
        hasher = hashlib.sha256(SEGMENT_DOMAIN + parent + canonical_spans(spans, start * size))
        if start < block:
            hasher.update(self._tokens[start * size : block * size].data)
        return hasher

    def _segment_start(self, block: int) -> int:
        """The first block of the segment that holds `block`."""
        regular = block - block % SEGMENT_BLOCKS
        touched = self._media.last_start((block + 1) * self._hash_block_size)
        return regular if touched is None else max(regular, touched // self._hash_block_size)

    def _next_segment(self, block: int) -> int:
        """The first block after `block` that starts a segment."""
        regular = block - block % SEGMENT_BLOCKS + SEGMENT_BLOCKS
        touched = self._media.next_start((block + 1) * self._hash_block_size)
        return regular if touched is None else min(regular, touched // self._hash_block_size)


def _root_digest(hash_block_size: int, *, salt: str | None, adapter: str | None) -> bytes:
    fields = _canonical_field(salt, "salt") + _canonical_field(adapter, "adapter")
    return hashlib.sha256(ROOT_DOMAIN + struct.pack("<Q", hash_block_size) + fields).digest()


def _canonical_field(value: str | None, name: str) -> bytes:
    if value is None:
        return b"\0"
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a string or None, not {type(value).__name__}")
    text = value.encode("utf-8", "surrogatepass")
    return b"\1" + struct.pack("<Q", len(text)) + text
