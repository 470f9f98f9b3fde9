"""`aiokv top URL`: what the cache of a running server does, live.

On a terminal it shows a picture a second until Ctrl-C (status 0); a server that goes away meanwhile is asked on, its
last values stay, in grey. Elsewhere, and with `--once`, it prints one picture and ends. A server that has never answered,
or answers something else, is one line on stderr and status 1.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Final, final

import typer
from rich.console import Console
from rich.live import Live

from aiokv.cli.output import JsonOption, print_json, stdout
from aiokv.cli.top_source import LiveSource, NoLiveState
from aiokv.cli.top_state import Rates, ServerState, find_rates, parse_state
from aiokv.cli.top_view import Outage, Picture
from aiokv.errors import UsageError

__all__ = ["NAME", "register"]

NAME: Final = "top"

_SCHEMA_VERSION: Final = 1
_BOUNDS_S: Final = (0.1, 3600.0)
"""Of the interval and the timeout: what is shorter is of no use to eyes and a load for the server."""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(NAME)(_top)


def _top(
    *,
    url: Annotated[str, typer.Argument(help="Of a server that embeds aiokv, such as http://127.0.0.1:8000.")],
    interval: Annotated[float, typer.Option("--interval", help="Seconds between two looks.")] = 1.0,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that an answer may take.")] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print, and end.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what the cache of a running server does: tiers, hits by source, transfers, leases. Ctrl-C ends it.

    Elsewhere than on a terminal it prints one picture and ends. --json looks twice, one interval apart, so that it can
    tell rates; with --once it looks once, and `rates` is null.
    """
    for name, seconds in (("--interval", interval), ("--timeout", timeout)):
        if not _BOUNDS_S[0] <= seconds <= _BOUNDS_S[1]:
            raise UsageError(f"{name} must be between {_BOUNDS_S[0]:g} and {_BOUNDS_S[1]:g} seconds, not {seconds:g}")
    watch = _Watch(LiveSource(url, patience_s=timeout))
    watch.look()
    console = stdout()
    if as_json:
        if not once:
            time.sleep(interval)
            watch.look()
        _print_as_json(watch)
    elif once or not console.is_terminal:
        console.print(watch.picture)
    else:
        _show(watch, console=console, interval_s=interval)
