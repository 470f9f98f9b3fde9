"""The options of `aiokv bench events`."""

from __future__ import annotations

from typing import Annotated

import typer

from aiokv.cli.bench.events.settings import EventsSettings
from aiokv.cli.output import JsonOption

__all__ = ["register"]

_DEFAULTS = EventsSettings()

BlocksOption = Annotated[int, typer.Option(min=1, help="Blocks of each prompt.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="How often each case is measured.")]


def register(bench: typer.Typer) -> None:
    """Add the benchmark to `bench`."""
    bench.command("events")(_events)


def _events(
    *,
    blocks: BlocksOption = _DEFAULTS.blocks,
    repeats: RepeatsOption = _DEFAULTS.repeats,
    as_json: JsonOption = False,
) -> None:
    """Time a busy runtime while nobody, one, four and one slow reader listen to its cache events, and a scrape.

    Exits 0 only if every reader was told of every block, a slow one how much it has missed, and no scrape ran on the
    loop.
    """
    from aiokv.cli.bench.events.runner import events
    from aiokv.cli.bench.report import answer

    settings = EventsSettings(blocks=blocks, repeats=repeats)
    answer(lambda: events(settings), as_json=as_json)
