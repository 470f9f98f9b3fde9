"""The bars and block maps of `aiokv top`: one line each, told apart by glyphs as well as by colours.

A block map has a column per cell where there is room, else the most frequent state of several cells. Glyphs differ, so
that both can be read without colours, and there are some for terminals that know ASCII only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby, pairwise
from typing import Final, final

from rich.console import OverflowMethod
from rich.text import Text

from aiokv.cli.top_state import TierState
from aiokv.cli.top_text import make_inert

__all__ = ["Block", "Look", "count_blocks", "draw_map", "draw_share", "draw_states", "find_look", "read_cells"]


class Block(Enum):
    """What a place of a bar shows; the value is its name. In the order of a bar, and of what wins in a map."""

    QUARANTINED = "quarantined"
    PINNED = "pinned"
    EVICTABLE = "evictable"
    RESERVED = "reserved"
    FREE = "free"


_LETTERS: Final = {
    "q": Block.QUARANTINED,
    "p": Block.PINNED,
    "c": Block.EVICTABLE,
    "r": Block.RESERVED,
    ".": Block.FREE,
}
"""The cells of a live state."""

_COLOURS: Final = {
    Block.QUARANTINED: "bold red",
    Block.PINNED: "bright_green",
    Block.EVICTABLE: "green",
    Block.RESERVED: "yellow",
    Block.FREE: "bright_black",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Glyphs and styles; `unknown` stands for a letter that is not known, `alarm` is for what is wrong now."""

    glyphs: Mapping[Block, str]
    unknown: str
    dot: str
    overflow: OverflowMethod
    encoding: str
    styles: Mapping[Block, str]
    heading: str = "bold"
    alarm: str = "bold red"
    fault: str = "bold red"
    warning: str = "yellow"
    fine: str = "green"
    text: str = ""

    def show(self, text: str) -> str:
        """What others have written, inert, in characters that the terminal knows."""
        return make_inert(text).encode(self.encoding, "replace").decode(self.encoding)

    def greyed(self) -> Look:
        """For values that are not those of now; the alarm stays."""
        grey = "bright_black"
        return replace(
            self, styles=dict.fromkeys(Block, grey), heading=grey, fault=grey, warning=grey, fine=grey, text=grey
        )


_UNICODE: Final = Look(
    glyphs=dict(zip(Block, "×█▓▒░", strict=True)),
    unknown="?",
    dot=" · ",
    overflow="ellipsis",
    encoding="utf-8",
    styles=_COLOURS,
)
_ASCII: Final = replace(
    _UNICODE, glyphs=dict(zip(Block, "x#=-.", strict=True)), dot=", ", overflow="crop", encoding="ascii"
)


def find_look(encoding: str) -> Look:
    """The glyphs that a terminal of this encoding can show."""
    return _UNICODE if encoding.lower().startswith("utf") else replace(_ASCII, encoding=encoding)


def read_cells(letters: str) -> list[Block | None]:
    """What each cell of a live state shows; None for a letter that is not known."""
    return list(map(_LETTERS.get, letters))


def count_blocks(tier: TierState) -> dict[Block, int]:
    """All slots of a tier by what they are shown as, in the order of a bar."""
    return {
        Block.QUARANTINED: tier.states["quarantined"],
        Block.PINNED: tier.pinned,
        Block.EVICTABLE: max(tier.states["resident"] - tier.pinned, 0),
        Block.RESERVED: tier.states["reserved"],
        Block.FREE: tier.states["free"],
    }


def draw_states(tier: TierState, look: Look, *, width: int) -> Text:
    """All slots of a tier by state. Every state that occurs has a column, however few its slots."""
    counts = count_blocks(tier)
    columns = _share_out(list(counts.values()), width=width)
    return _draw((block for block, times in zip(counts, columns, strict=True) for _ in range(times)), look)


def draw_map(cells: Sequence[Block | None], look: Look, *, width: int) -> Text:
    """The slots of a tier in their order, those with low numbers first; None is a cell that is not understood."""
    num_columns = min(width, len(cells))
    bounds = [column * len(cells) // num_columns for column in range(num_columns + 1)] if num_columns else []
    return _draw((_find_dominant(cells[start:stop]) for start, stop in pairwise(bounds)), look)


def draw_share(share: float, look: Look, *, width: int) -> Text:
    """A bar of so much of the width; every share that is not zero has a column."""
    filled = min(max(round(share * width), int(share > 0)), width)
    return _draw([Block.EVICTABLE] * filled + [Block.FREE] * (width - filled), look)


def _find_dominant(cells: Sequence[Block | None]) -> Block | None:
    """The most frequent one; of equally frequent ones the first in the order of `Block`."""
    counts = Counter(cells)
    order: tuple[Block | None, ...] = (*Block, None)
    return max(order, key=lambda block: counts[block])


def _share_out(counts: list[int], *, width: int) -> list[int]:
    """Columns in proportion to the counts, at least one for each that is not zero; their sum is the width."""
    whole = sum(counts)
    if not whole or width < len(counts):
        return [0] * len(counts)
    columns = [max(count * width // whole, int(count > 0)) for count in counts]
    columns[counts.index(max(counts))] += width - sum(columns)
    return columns


def _draw(blocks: Iterable[Block | None], look: Look) -> Text:
    line = Text(no_wrap=True, overflow="crop")
    for block, run in groupby(blocks):
        glyph, style = (look.unknown, look.text) if block is None else (look.glyphs[block], look.styles[block])
        line.append(glyph * len(list(run)), style)
    return line
