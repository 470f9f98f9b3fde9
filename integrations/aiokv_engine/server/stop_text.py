"""The text of one answer while its tokens come: whole characters only, and nothing that may belong to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from aiokv_engine.tokenizer import GgufTokenizer, StreamDecoder

__all__ = ["AnswerText"]


@final
class AnswerText:
    """Ends before the stop string that is complete first; of several at once the longest counts.

    Where tokens are cut does not matter, and what it has returned never changes: it holds back the bytes of an
    unfinished character, and the end of the text as long as a stop string may begin there. That is fewer characters
    than the longest stop string has.
    """

    __slots__ = ("_decoder", "_held", "_stops", "is_stopped")

    def __init__(self, tokenizer: GgufTokenizer, *, stops: Sequence[str]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False
        """Whether a stop string was met; the text before it has been returned, and nothing follows."""

    def push(self, token_id: int) -> str:
        """Returns the text that is certain now, possibly none."""
        return self._add(self._decoder.push(token_id))

    def finish(self) -> str:
        """Returns what was held back, once no more tokens come."""
        certain = self._add(self._decoder.finish())
        rest, self._held = self._held, ""
        return certain + rest

    def _add(self, text: str) -> str:
        if self.is_stopped:
            return ""
        self._held += text
        found = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            _, place = min(found)
            certain, self._held = self._held[:place], ""
            return certain
        kept = max((_overlap(self._held, stop=stop) for stop in self._stops), default=0)
        cut = len(self._held) - kept
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain


def _overlap(text: str, *, stop: str) -> int:
    """Returns how many characters at the end of `text` are the beginning of `stop`: the most there are."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
