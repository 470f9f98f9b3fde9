"""Media in a prompt: images and the like, by digest and position (law 10)."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, final

from aiokv.errors import UsageError
from aiokv.model.numbers import is_whole

__all__ = ["MediaMap", "MediaSpan", "canonical_spans"]

_NO_SPANS: Final = bytes(8)


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Tokens `[start, start + length)` of the prompt stand for media (image, audio, ...) with this content digest.

    Spans may come in any order, may overlap (audio within video) and may reach beyond the tokens known so far.
    """

    digest: bytes
    start: int
    length: int

    def __post_init__(self) -> None:
        if not _is_bytes(self.digest) or not self.digest:
            raise UsageError(f"a media digest must be non-empty bytes, not {self.digest!r}")
        if not is_whole(self.start) or not 0 <= self.start < 2**62:
            raise UsageError(f"a media span must start at a token position, not at {self.start!r}")
        if not is_whole(self.length) or not 0 < self.length < 2**62:
            raise UsageError(f"a media span must cover at least one token, not {self.length!r}")

    @property
    def stop(self) -> int:
        """The first token after the span."""
        return self.start + self.length


@final
class MediaMap:
    """Spans in canonical order, found by where they start. Immutable."""

    __slots__ = ("_spans", "_starts")

    def __init__(self, spans: Iterable[MediaSpan]) -> None:
        if not isinstance(spans, Iterable):
            raise UsageError(f"media must be MediaSpan values, not {spans!r}")
        given = list(spans)
        if not all(isinstance(span, MediaSpan) for span in given):
            raise UsageError("media must be MediaSpan values")
        self._spans = sorted(set(given), key=lambda s: (s.start, s.length, s.digest))
        self._starts = [s.start for s in self._spans]

    def starting(self, start: int, stop: int) -> list[MediaSpan]:
        """Spans whose first token is in `[start, stop)`, in canonical order."""
        return self._spans[bisect_left(self._starts, start) : bisect_left(self._starts, stop)]

    def next_start(self, position: int) -> int | None:
        """The first start of a span at or after `position`."""
        index = bisect_left(self._starts, position)
        return self._starts[index] if index < len(self._starts) else None

    def last_start(self, position: int) -> int | None:
        """The last start of a span before `position`."""
        index = bisect_left(self._starts, position)
        return self._starts[index - 1] if index else None

    def before(self, position: int) -> MediaMap:
        """The spans that end at or before `position`; `UsageError` if one lies across it."""
        kept = self._spans[: bisect_left(self._starts, position)]
        if any(s.stop > position for s in kept):
            raise UsageError(f"cannot truncate to {position} tokens, inside a media span")
        return MediaMap(kept)


def canonical_spans(spans: Sequence[MediaSpan], block_start: int) -> bytes:
    """The spans that start in the block at token `block_start`, as bytes to be hashed: a count, then each of them."""
    if not spans:
        return _NO_SPANS
    parts = [struct.pack("<Q", len(spans))]
    for span in spans:
        parts.append(struct.pack("<Q", len(span.digest)) + span.digest)
        parts.append(struct.pack("<QQ", span.start - block_start, span.length))
    return b"".join(parts)


def _is_bytes(value: object) -> bool:
    return isinstance(value, bytes)
