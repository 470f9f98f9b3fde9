"""The picture of `aiokv top`: complete and in place at every usual width, whatever a server says."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Final

import pytest
from rich.cells import cell_len
from rich.console import Console

from aiokv.cli.top_bars import Block, draw_map, draw_share, draw_states, find_look, read_cells
from aiokv.cli.top_state import find_rates, parse_state
from aiokv.cli.top_text import format_count, format_duration, format_rate, format_share
from aiokv.cli.top_view import Outage, Picture
from tests.cli.top_server import LIVE, changed

ADDRESS: Final = "http://127.0.0.1:8000"
UNICODE: Final = find_look("utf-8")
CUT: Final = "…"


def picture(**members: object) -> Picture:
    before, after = parse_state(LIVE), parse_state(changed(**{"uptime_s": 14.5, **members}))
    return Picture(address=ADDRESS, state=after, rates=find_rates(before, after))


def shown(
    what: Picture, *, width: int, height: int = 24, is_screen: bool = False, encoding: str = "utf-8"
) -> list[str]:
    """The lines, as a terminal of this size shows them, without the spaces at their ends."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    console = Console(width=width, height=height, file=out, force_terminal=True, color_system=None, highlight=False)
    if is_screen:
        console.set_alt_screen(True)
    with console.capture() as captured:
        console.print(what)
    captured.get().encode(encoding)
    return [line.rstrip() for line in captured.get().splitlines()]


def find_line(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.startswith(start))


def words(line: str) -> list[str]:
    return line.split()


LARGE: Final = {
    "tiers__gpu__slots": 10_000_000,
    "tiers__gpu__states": {"free": 9_999_999, "reserved": 9_999_999, "resident": 9_999_999, "quarantined": 9_999_999},
    "tiers__gpu__pinned": 9_999_999,
    "prompt_tokens__gpu": 2**62,
    "transfers__load__queued_blocks": 99_999,
    "transfers__load__inflight_blocks": 99_999,
    "transfers__load__ended_blocks": {"ok": 10**9, "error": 99_999},
    "transfers__load__bytes": 2**60,
    "leases__active": 99_999,
    "leases__waiting": 99_999,
    "leases__overdue": 99_999,
    "evictions__gpu": 10**12,
    "uptime_s": 10.0**8,
}


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("members", [{}, LARGE], ids=["usual", "large"])
def test_no_line_wraps_or_is_cut(width: int, members: dict[str, object]) -> None:
    lines = shown(picture(**members), width=width)
    assert all(cell_len(line) <= width for line in lines)
    assert CUT not in "".join(lines)
    assert len(lines) == len(shown(picture(**members), width=1000))
    assert words(find_line(lines, "tier"))[:7] == [
        "tier", "slots", "░free", "▒reserved", "▓evictable", "█pinned", "×quarantined",
    ]  # fmt: skip


def test_every_number_stands_where_its_heading_says() -> None:
    lines = shown(picture(prompt_tokens__gpu=3500, transfers__load__bytes=520 << 20, evictions__gpu=80), width=80)
    assert lines[0] == f"aiokv 0.1.0 host  {ADDRESS}"
    assert lines[1] == "accepting · not degraded · up 14.5 s · blocks of 16 tokens"
    assert words(find_line(lines, "gpu   1,023")) == ["gpu", "1,023", "123", "45", "789", "66", "0", "80", "5.0"]
    assert words(find_line(lines, "cpu   8,192")) == ["cpu", "8,192", "4,000", "0", "4,179", "12", "1", "0", "0"]
    assert words(find_line(lines, "gpu   ").strip())
    hits = [words(line)[:5] for line in lines if re.match(r"(gpu|cpu|compute) .* %", line)]
    assert hits == [
        ["gpu", "3,500", "41.2", "%", "250"],
        ["cpu", "1,000", "11.8", "%", "0"],
        ["compute", "4,000", "47.1", "%", "0"],
    ]
    assert words(find_line(lines, "load")) == ["load", "7", "64", "500", "0", "10", "MiB/s", "0", "520", "MiB"]
    assert words(find_line(lines, "store")) == ["store", "0", "8", "900", "3", "0", "B/s", "0", "900", "MiB"]
    assert find_line(lines, "leases") == "leases  6 active · 2 waiting · 1 overdue · oldest 5 of 7"
    assert words(find_line(lines, "req-1")) == ["req-1", "ready", "11", "blocks", "for", "11", "min", "40", "s"]
    assert sum(line.startswith("req-") for line in lines) == 5


def test_no_rate_is_shown_before_there_are_two_looks() -> None:
    lines = shown(Picture(address=ADDRESS, state=parse_state(LIVE)), width=80)
    assert words(find_line(lines, "load"))[5:7] == ["-", "-"]
    assert words(find_line(lines, "compute"))[4] == "-"


@pytest.mark.parametrize(("held", "listed"), [(1, 1), (5, 5), (0, 0)])
def test_nothing_is_said_of_leases_that_are_all_listed(held: int, listed: int) -> None:
    oldest = LIVE["leases"]["oldest"][:listed]
    lines = shown(picture(leases__active=held, leases__overdue=0, leases__oldest=oldest), width=80)
    assert find_line(lines, "leases").endswith(f"{held} active · 2 waiting · 0 overdue")


def test_screen_of_24_lines_holds_everything() -> None:
    lines = shown(picture(), width=80, is_screen=True)
    assert len(lines) == 24
    assert lines[-1].startswith("req-5")
    assert "" in lines


@pytest.mark.parametrize(("height", "empty"), [(22, 0), (23, 1), (25, 3), (26, 4), (50, 4)])
def test_empty_lines_are_the_first_to_go(height: int, empty: int) -> None:
    lines = shown(picture(), width=80, height=height, is_screen=True)
    assert lines.count("") == empty


def test_what_is_degraded_is_said() -> None:
    lines = shown(picture(degraded=["unpinned", "no_cpu_tier"], is_accepting=False), width=80)
    assert lines[1].startswith("not accepting · degraded: unpinned, no_cpu_tier")


def test_tier_and_transfers_that_do_not_exist_take_no_line() -> None:
    lines = shown(picture(tiers={"gpu": LIVE["tiers"]["gpu"]}, transfers={}), width=80)
    assert not [line for line in lines if line.startswith(("cpu states", "transfers", "load"))]


def test_empty_pool_without_requests_is_shown() -> None:
    empty = {"slots": 0, "states": dict.fromkeys(LIVE["tiers"]["gpu"]["states"], 0), "pinned": 0, "cells": ""}
    nothing = dict.fromkeys(("gpu", "cpu", "compute"), 0)
    lines = shown(picture(tiers={"gpu": empty}, prompt_tokens=nothing, leases__oldest=[]), width=80)
    assert words(find_line(lines, "compute"))[:3] == ["compute", "0", "-"]
    assert find_line(lines, "gpu map") == "gpu map"


@pytest.mark.parametrize(
    "name",
    [
        "\x1b[2J\x1b]0;owned\x07", "a\nb\rc\td", "[red]x[/red] [/] :boom:", "\u202egnp.exe", "\x9b31m", "\ud800",
        "é\u200b",
    ],
)  # fmt: skip
def test_what_a_client_called_its_request_is_inert(name: str) -> None:
    oldest = [{"request_id": name, "age_s": 1, "state": name, "blocks": 1}]
    what = picture(leases__oldest=oldest, version=name, backend=name, degraded=[name])
    lines = shown(what, width=200)
    assert len(lines) == len(shown(picture(leases__oldest=LIVE["leases"]["oldest"][:1]), width=200))
    assert all(line.isprintable() for line in lines)
    assert "".join(char if char.isprintable() else "?" for char in name) in lines[-1]


@pytest.mark.parametrize("name", ["x" * 100_000, "漢字" * 50_000, "e\u0301" * 5_000])
def test_long_name_is_shortened_and_moves_nothing(name: str) -> None:
    oldest = [{"request_id": name, "age_s": 1, "state": "ready", "blocks": 1}, *LIVE["leases"]["oldest"]]
    lines = shown(picture(leases__oldest=oldest), width=80)
    assert all(cell_len(line) <= 80 for line in lines)
    assert sum(line.endswith("for 1.0 s") for line in lines) == 1


@pytest.mark.parametrize("width", [1, 10, 20, 40])
def test_narrow_terminal_cuts_lines_and_never_wraps_them(width: int) -> None:
    lines = shown(picture(**LARGE), width=width)
    assert all(cell_len(line) <= width for line in lines)
    assert len(lines) == len(shown(picture(**LARGE), width=80))


@pytest.mark.parametrize("width", [20, 80])
def test_terminal_that_knows_ascii_only_gets_no_other_character(width: int) -> None:
    oldest = [{"request_id": "größe", "age_s": 1, "state": "ready", "blocks": 1}]
    lines = shown(picture(leases__oldest=oldest), width=width, encoding="ascii")
    assert "".join(lines).isascii()
    if width == 80:
        assert words(lines[-1])[0] == "gr??e"
        assert "=" in find_line(lines, "gpu states")


def test_values_of_a_server_that_is_gone_are_said_to_be_old_and_are_grey() -> None:
    outage = Outage(seconds=75, detail="Connection refused")
    what = replace(picture(degraded=["unpinned"]), outage=outage)
    assert shown(what, width=80)[1] == "gone for 1 min 15 s, these are the last values: Connection refused"
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard", highlight=False)
    with console.capture() as captured:
        console.print(what)
    assert "\x1b[1;31mgone for" in captured.get()
    head, _, *values = console.render_lines(what)
    written = [segment for line in (head, *values) for segment in line if segment.text.strip()]
    assert {str(segment.style) for segment in written} == {"bright_black"}


def test_colours_are_left_out_where_nobody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard", highlight=False)
    with console.capture() as captured:
        console.print(picture())
    assert set(re.findall(r"\x1b\[([\d;]*)m", captured.get())) <= {"0", "1"}
    assert "█" in captured.get()


def test_bar_of_states_is_in_proportion_and_hides_no_state() -> None:
    bar = draw_states(parse_state(LIVE).tiers["cpu"], UNICODE, width=40).plain
    assert len(bar) == 40
    assert bar.count("×") == 1
    assert bar.count("█") == 1
    assert bar.count("░") == 4000 * 40 // 8192


@pytest.mark.parametrize("width", range(12))
def test_bar_of_states_is_never_wider_than_its_room(width: int) -> None:
    states = {"free": 5, "reserved": 9, "resident": 70, "quarantined": 1}
    tier = replace(parse_state(LIVE).tiers["gpu"], slots=85, states=states, pinned=30)
    bar = draw_states(tier, UNICODE, width=width).plain
    assert len(bar) == (width if width >= 5 else 0)


def test_map_has_one_column_per_cell_where_there_is_room() -> None:
    cells = read_cells("..ppccrq")
    assert draw_map(cells, UNICODE, width=80).plain == "░░██▓▓▒×"


def test_map_shows_what_most_slots_of_a_column_are() -> None:
    assert draw_map(read_cells("ccc.ccc.pppr...p"), UNICODE, width=4).plain == "▓▓█░"
    assert draw_map(read_cells("cq"), UNICODE, width=1).plain == "×"


def test_letter_that_is_not_known_is_shown_as_such() -> None:
    assert draw_map(read_cells(".Z."), UNICODE, width=3).plain == "░?░"


@pytest.mark.parametrize(("share", "filled"), [(0.0, 0), (1e-9, 1), (0.5, 5), (1.0, 10)])
def test_share_that_is_not_zero_has_a_column(share: float, filled: int) -> None:
    assert draw_share(share, UNICODE, width=10).plain.count(UNICODE.glyphs[Block.EVICTABLE]) == filled


@pytest.mark.parametrize("count", [0, 9, 99_999, 100_000, 999_499, 999_500, 999_999_999, 10**12, 10**15, 2**63])
def test_a_count_takes_six_columns_at_most(count: int) -> None:
    assert len(format_count(count)) <= 6


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (format_count(123_456), "123k"),
        (format_count(1_234_567), "1.23M"),
        (format_rate(0.25), "0.2"),
        (format_rate(None), "-"),
        (format_rate(1234.5), "1,234"),
        (format_share(1, whole=3), "33.3 %"),
        (format_share(0, whole=0), "-"),
        (format_duration(59.4), "59.4 s"),
        (format_duration(3599), "59 min 59 s"),
        (format_duration(7260), "2 h 01 min"),
        (format_duration(90_000), "1 d 01 h"),
    ],
)
def test_numbers_are_written_for_people(written: str, expected: str) -> None:
    assert written == expected
