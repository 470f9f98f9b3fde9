"""Whatever a server answers, `aiokv top` says in one line why it cannot show it, or shows it in lines that fit."""

from __future__ import annotations

import copy
import io
import json
from typing import Any, Final

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from aiokv.cli.top_state import NotLiveState, ServerState, find_rates, parse_state
from aiokv.cli.top_view import Outage, Picture
from tests.cli.top_server import LIVE

Path = tuple[str, ...]
MOST: Final = 2**63 - 1
EDGES: Final = (0, 1, 99_999, 100_000, 999_499, 999_500, 10**15, MOST)
COUNTS: Final = st.sampled_from(EDGES) | st.integers(0, MOST)
SECONDS: Final = st.floats(0, allow_nan=False, allow_infinity=False) | st.sampled_from([5e-324, 0.0005, 59.96, 1e308])
JUNK: Final = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
LEASES: Final = st.lists(
    st.fixed_dictionaries({"request_id": st.text(), "age_s": SECONDS, "state": st.text(), "blocks": COUNTS}),
    max_size=8,
)
GROWING: Final = ("prompt_tokens", "evictions", "bytes", "ok", "error", "corrupt", "lost", "uptime_s")


def paths_of(part: Any, path: Path = ()) -> list[Path]:  # noqa: ANN401  # JSON
    """Every member of the objects of a document that is no object itself."""
    if not isinstance(part, dict):
        return [path]
    return [deeper for name, member in part.items() for deeper in paths_of(member, (*path, name))]


PATHS: Final = [path for path in paths_of(LIVE) if path != ("schema_version",)]


def replaced(live: dict[str, Any], path: Path, value: object) -> dict[str, Any]:
    changed = copy.deepcopy(live)
    place = changed
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return changed


def values_for(path: Path) -> st.SearchStrategy[Any]:
    """What a server might well say there."""
    if path[-1] == "oldest":
        return LEASES
    if path[-1] == "cells":
        return st.text("pcrq.Z", max_size=300)
    return {bool: st.booleans(), float: SECONDS, int: COUNTS, str: st.text()}.get(
        type(value_at(path)), st.lists(st.text(), max_size=4)
    )


def value_at(path: Path) -> object:
    place: Any = LIVE
    for name in path:
        place = place[name]
    return place


@st.composite
def live_states(draw: st.DrawFn) -> dict[str, Any]:
    live = LIVE
    for path in draw(st.lists(st.sampled_from(PATHS), max_size=10)):
        live = replaced(live, path, draw(values_for(path)))
    return live


@st.composite
def spoilt_states(draw: st.DrawFn) -> dict[str, Any]:
    return replaced(draw(live_states()), draw(st.sampled_from(PATHS)), draw(JUNK))


def grown(live: dict[str, Any]) -> dict[str, Any]:
    """The same server at its end: all totals have grown as far as they can."""
    for path in PATHS:
        if set(path) & set(GROWING):
            live = replaced(live, path, 1e308 if path[-1] == "uptime_s" else MOST)
    return live


def lines_of(picture: Picture, *, width: int, encoding: str) -> list[str]:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    console = Console(width=width, file=out, force_terminal=True, color_system="standard", highlight=False)
    with console.capture() as captured:
        console.print(picture)
    captured.get().encode(encoding)
    return [Text.from_ansi(line).plain for line in captured.get().split("\n")]


FUZZ: Final = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=150)


@FUZZ
@given(
    live=live_states(),
    width=st.integers(20, 200),
    encoding=st.sampled_from(["utf-8", "ascii", "cp437"]),
    detail=st.none() | st.text(),
)
def test_every_state_is_shown_in_as_many_lines_as_in_a_wide_terminal(
    live: dict[str, Any], width: int, encoding: str, detail: str | None
) -> None:
    before, after = parse_state(live), parse_state(grown(live))
    rates = find_rates(before, after)
    outage = None if detail is None else Outage(seconds=3.0, detail=detail)
    picture = Picture(address="http://127.0.0.1:8000", state=after, rates=rates, outage=outage)
    lines = lines_of(picture, width=width, encoding=encoding)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) == len(lines_of(picture, width=2000, encoding=encoding))


@FUZZ
@given(first=live_states(), second=live_states())
def test_two_looks_give_rates_that_can_be_written_or_none(first: dict[str, Any], second: dict[str, Any]) -> None:
    before, after = parse_state(first), parse_state(second)
    for rates in (find_rates(before, after), find_rates(after, before)):
        if rates is not None:
            lines_of(Picture(address="http://kv", state=after, rates=rates), width=80, encoding="utf-8")


@FUZZ
@given(live=spoilt_states() | JUNK)
def test_what_is_spoilt_is_refused_in_one_line_or_shown(live: object) -> None:
    document = json.loads(json.dumps(live))
    try:
        state: ServerState | None = parse_state(document)
    except NotLiveState as error:
        assert "\n" not in str(error)
        return
    assert state is not None
    assert lines_of(Picture(address="http://kv", state=state), width=60, encoding="utf-8")
