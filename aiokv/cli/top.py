"""`aiokv top URL`: what the cache of a running server does, live.

On a terminal it shows a picture a second until Ctrl-C (status 0); a server that goes away meanwhile is asked on, its
last values stay, in grey. Elsewhere, and with `--once`, it prints one picture and ends. A server that has never
answered, or answers something else, is one line on stderr and status 1.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Annotated, Final, final

import typer
from rich.console import Console
from rich.live import Live

from aiokv.cli.output import JsonOption, print_json, stdout
from aiokv.cli.top_source import LiveSource, NoLiveState
from aiokv.cli.top_state import NotLiveState, Rates, ServerState, find_rates, parse_state
from aiokv.cli.top_view import Outage, Picture
from aiokv.errors import UsageError

__all__ = ["NAME", "register"]

NAME: Final = "top"

_SCHEMA_VERSION: Final = 1
_BOUNDS_S: Final = (0.5, 3600.0)
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
            threading.Event().wait(interval)
            watch.look()
        print_json(watch.as_json(), schema_version=_SCHEMA_VERSION)
    elif not once and _is_live(console):
        _show(watch, console=console, interval_s=interval)
    else:
        console.print(watch.picture)


@final
class _Watch:
    """What is known of one server."""

    __slots__ = ("_rates", "_seen_at", "_source", "_state", "_trouble")

    def __init__(self, source: LiveSource) -> None:
        self._source = source
        self._state: ServerState | None = None
        self._rates: Rates | None = None
        self._seen_at = 0.0
        self._trouble: str | None = None

    def look(self) -> None:
        """Ask once; `NoLiveState` where no live state comes."""
        before = None if self._trouble else self._state
        self._state = self._read()
        self._rates = find_rates(before, self._state) if before else None
        self._seen_at = time.monotonic()
        self._trouble = None

    def look_again(self) -> None:
        """Ask once; where no live state comes the last one stays, and there are no rates across the gap."""
        try:
            self.look()
        except NoLiveState as error:
            self._trouble = error.detail
            self._rates = None

    def _read(self) -> ServerState:
        document = self._source.read()
        try:
            return parse_state(document)
        except NotLiveState as error:
            raise NoLiveState(self._source.url, detail=str(error)) from None

    @property
    def picture(self) -> Picture:
        """What is to be shown now."""
        outage = Outage(seconds=time.monotonic() - self._seen_at, detail=self._trouble) if self._trouble else None
        return Picture(address=self._source.address, state=self.state, rates=self._rates, outage=outage)

    @property
    def state(self) -> ServerState:
        """The last one; `UsageError` before the first."""
        if self._state is None:
            raise UsageError("nothing was looked at yet")
        return self._state

    def as_json(self) -> dict[str, object]:
        """The last state, and the rates if there was another one before."""
        rates = None if self._rates is None else asdict(self._rates)
        return {"url": self._source.url, "state": asdict(self.state), "rates": rates}


def _is_live(console: Console) -> bool:
    """Whether pictures can follow each other: FORCE_COLOR makes a pipe coloured, and no terminal."""
    return sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal


def _show(watch: _Watch, *, console: Console, interval_s: float) -> None:
    """Look again and again, until the user or a signal ends it."""
    clock = threading.Event()
    screen = Live(console=console, screen=True, auto_refresh=False)
    with _ended_by_sigterm(), suppress(KeyboardInterrupt), screen as live:
        while True:
            live.update(watch.picture, refresh=True)
            clock.wait(interval_s)
            watch.look_again()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Meanwhile SIGTERM ends the program as Ctrl-C does, so that the terminal is left as it was."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
