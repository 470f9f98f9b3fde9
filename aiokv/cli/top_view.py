"""What `aiokv top` shows: one picture of one moment, as wide as the terminal; complete at 60 columns and more.

Duty: lines that never wrap. On a live screen that is too low empty lines go first: 24 lines hold two tiers and the five
oldest leases. Values that are not of now are grey and said to be old.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from aiokv.cli.top_bars import Block, Look, count_blocks, draw_map, draw_share, draw_states, find_look, read_cells
from aiokv.cli.top_state import Flow, Rates, ServerState, TierState
from aiokv.cli.top_text import (
    format_byte_rate,
    format_count,
    format_duration,
    format_rate,
    format_share,
)
from aiokv.model.sizes import format_bytes

__all__ = ["Outage", "Picture"]

_OLDEST: Final = 5
_WIDE: Final = 78
"""From so many columns on there is room for what is good to know as well."""
_LABEL: Final = 11
_NUMBER: Final = 6
_HITS: Final = 13 + 1 + _NUMBER + 1 + 7 + 1 + 8 + 1
"""What stands beside the bars of hits."""
_STATES: Final = tuple(reversed(Block))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """For how long a server has given no live state, and what it did the last time."""

    seconds: float
    detail: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """What stands together, and how many lines it takes."""

    parts: tuple[RenderableType, ...]
    lines: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The last state of a server, how fast it changes where that is known, and whether it still answers."""

    address: str
    state: ServerState
    rates: Rates | None = None
    outage: Outage | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        look = find_look(options.encoding)
        page = _Page(self, look.greyed() if self.outage else look, width=options.max_width)
        sections = [section for section in page.sections() if section.lines]
        lines = sum(section.lines for section in sections)
        room = console.height - lines if console.is_alt_screen else len(sections)
        for place, section in enumerate(sections):
            if place and len(sections) - place <= room:  # the empty lines that are needed most are the lower ones
                yield Text()
            yield from section.parts


@final
class _Page:
    """The sections of a picture."""

    __slots__ = ("_look", "_picture", "_state", "_width")

    def __init__(self, picture: Picture, look: Look, *, width: int) -> None:
        self._picture = picture
        self._state = picture.state
        self._look = look
        self._width = width

    def sections(self) -> tuple[_Section, ...]:
        """All of them, from top to bottom; one without lines has nothing to say."""
        return self._head(), self._tiers(), self._hits(), self._transfers(), self._leases()

    def _head(self) -> _Section:
        """Who answers, and how it is."""
        state, look = self._state, self._look
        name = self._line(("aiokv", look.heading), (f" {look.show(state.version)} {look.show(state.backend)}", ""))
        name.append(f"  {self._picture.address}", look.text)
        return _Section(parts=(name, self._health()), lines=2)

    def _health(self) -> Text:
        state, look, outage = self._state, self._look, self._picture.outage
        if outage is not None:
            gone = f"gone for {format_duration(outage.seconds)}, these are the last values"
            return self._line((gone, look.alarm), (f": {look.show(outage.detail)}", look.alarm))
        intake = ("accepting", look.fine) if state.is_accepting else ("not accepting", look.warning)
        reasons = ", ".join(map(look.show, state.degraded))
        health = (f"degraded: {reasons}", look.warning) if reasons else ("not degraded", look.fine)
        blocks = f"{look.dot}blocks of {format_count(state.block_tokens)} tokens" if self._width >= _WIDE else ""
        return self._line(
            intake, (look.dot, ""), health, (f"{look.dot}up {format_duration(state.uptime_s)}{blocks}", "")
        )

    def _tiers(self) -> _Section:
        """Slots by state, in numbers, as a bar and as a map."""
        look = self._look
        table = self._table("tier", "slots", *(look.glyphs[block] + block.value for block in _STATES))
        self._add_wide(table, "evicted", "evicted/s")
        lines: list[Text] = []
        width = self._width - _LABEL
        for name, tier in self._state.tiers.items():
            table.add_row(name, format_count(tier.slots), *self._slot_counts(tier), *self._evictions(name))
            lines.append(self._labelled(f"{name} states", draw_states(tier, look, width=width)))
            lines.append(self._labelled(f"{name} map", draw_map(read_cells(tier.cells), look, width=width)))
        return _Section(parts=(table, *lines), lines=1 + len(self._state.tiers) + len(lines))

    def _labelled(self, label: str, bar: Text) -> Text:
        return Text.assemble((label.ljust(_LABEL), self._look.text), bar, no_wrap=True, overflow="crop")

    def _slot_counts(self, tier: TierState) -> list[Text]:
        """In the order of the headings."""
        counts = count_blocks(tier)
        return [self._count(counts[block], is_fault=block is Block.QUARANTINED) for block in _STATES]

    def _count(self, count: int, *, is_fault: bool) -> Text:
        return Text(format_count(count), self._look.fault if is_fault and count else "")

    def _evictions(self, tier: str) -> list[str]:
        if self._width < _WIDE:
            return []
        rates = self._picture.rates
        return [format_count(self._state.evictions.get(tier, 0)), format_rate(rates and rates.evictions.get(tier, 0.0))]

    def _hits(self) -> _Section:
        """Where the tokens of prompts came from."""
        look, rates, tokens = self._look, self._picture.rates, self._state.prompt_tokens
        table = self._table("prompt tokens", "total", "share  ", "tokens/s")
        table.add_column(no_wrap=True)
        whole = sum(tokens.values())
        for source, count in tokens.items():
            rate = format_rate(rates and rates.prompt_tokens.get(source))
            bar = draw_share(count / whole if whole else 0.0, look, width=max(self._width - _HITS, 0))
            table.add_row(source, format_count(count), format_share(count, whole=whole), rate, bar)
        return _Section(parts=(table,), lines=1 + len(tokens))

    def _transfers(self) -> _Section:
        """What is copied between the tiers: loads go to the GPU, stores to the CPU."""
        if not self._state.transfers:
            return _Section(parts=(), lines=0)
        table = self._table("transfers", "queued", "in flight", "done", "errors", "   bandwidth")
        self._add_wide(table, "blocks/s", "bytes")
        for name, flow in self._state.transfers.items():
            table.add_row(name, *self._flow_cells(name, flow))
        return _Section(parts=(table,), lines=1 + len(self._state.transfers))

    def _flow_cells(self, name: str, flow: Flow) -> list[str | Text]:
        rates = self._picture.rates
        counts = (flow.queued_blocks, flow.inflight_blocks, flow.ok_blocks)
        errors = self._count(flow.failed_blocks, is_fault=True)
        cells: list[str | Text] = [
            *map(format_count, counts),
            errors,
            format_byte_rate(rates and rates.transfer_bytes[name]),
        ]
        if self._width >= _WIDE:
            cells += [format_rate(rates and rates.transfer_blocks[name]), format_bytes(flow.num_bytes)]
        return cells

    def _leases(self) -> _Section:
        """How many requests hold blocks or wait for some, and who has held them longest."""
        state, look = self._state, self._look
        overdue = (f"{format_count(state.overdue)} overdue", look.fault if state.overdue else "")
        counts = f"  {format_count(state.active)} active{look.dot}{format_count(state.waiting)} waiting{look.dot}"
        summary = self._line(("leases", look.heading), (counts, ""), overdue)
        oldest, held = state.oldest[:_OLDEST], state.active + state.overdue
        note = f"{look.dot}oldest {len(oldest)} of {format_count(held)}"
        if len(oldest) < held and summary.cell_len + len(note) <= self._width:
            summary.append(note)
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), row_styles=[look.text])
        table.add_column(no_wrap=True, overflow=look.overflow)
        for _ in range(3):
            table.add_column(no_wrap=True, overflow=look.overflow, justify="right")
        for lease in oldest:
            name = Text(look.show(lease.request_id))
            name.truncate(max(self._width - 40, 8), overflow=look.overflow)
            blocks = f"{format_count(lease.blocks)} blocks"
            table.add_row(name, Text(look.show(lease.state)), blocks, f"for {format_duration(lease.age_s)}")
        return _Section(parts=(summary, table), lines=1 + len(oldest))

    def _table(self, label: str, *columns: str) -> Table:
        """Numbers stand to the right, what they are of to the left."""
        look = self._look
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style=look.heading, row_styles=[look.text])
        table.add_column(label, no_wrap=True, overflow=look.overflow)
        self._add_numbers(table, *columns)
        return table

    def _add_wide(self, table: Table, *columns: str) -> None:
        if self._width >= _WIDE:
            self._add_numbers(table, *columns)

    def _add_numbers(self, table: Table, *columns: str) -> None:
        for column in columns:
            table.add_column(column, no_wrap=True, overflow=self._look.overflow, justify="right", min_width=_NUMBER)

    def _line(self, *parts: tuple[str, str]) -> Text:
        """One line, cut at the end rather than wrapped."""
        line = Text(no_wrap=True, overflow=self._look.overflow, style=self._look.text)
        for text, style in parts:
            line.append(text, style)
        return line
