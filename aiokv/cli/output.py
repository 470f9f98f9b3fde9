"""What every command prints: people read tables, programs read one JSON object on stdout and nothing else there.

Progress, warnings and errors go to stderr, so that `--json` output can be piped as it is. Integrations that register
commands use the same helpers.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from aiokv.errors import ConfigError, UsageError
from aiokv.runtime.config_file import parse_bool

__all__ = [
    "JsonOption",
    "debugging",
    "exit_status",
    "new_progress",
    "new_still_progress",
    "print_error",
    "print_json",
    "stderr",
    "stdout",
    "stdout_kept_clean",
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")]
"""The type of a command's `as_json` parameter."""

_STATUS_FAILED: Final = 1
_STATUS_USAGE: Final = 2


def stdout() -> Console:
    """A console on the stdout of this moment."""
    return Console(highlight=False)


def stderr() -> Console:
    """A console on the stderr of this moment."""
    return Console(stderr=True, highlight=False)


def new_progress() -> Progress:
    """A progress display on stderr, which disappears when it is done; use it as a context manager.

    Where stderr is no terminal there is none: it would leave an empty line there.
    """
    console = stderr()
    return Progress(*_columns(), console=console, transient=True, disable=not console.is_interactive)


def new_still_progress() -> Progress:
    """Like `new_progress`, but without a thread of its own: it is drawn where it is told to be, and nowhere between."""
    console = stderr()
    return Progress(
        *_columns(), console=console, transient=True, auto_refresh=False, disable=not console.is_interactive
    )


def _columns() -> tuple[ProgressColumn, ...]:
    return SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()


def print_json(payload: Mapping[str, object], *, schema_version: int) -> None:
    """Write one JSON object with its `schema_version` first; NaN and infinity, which JSON lacks, are a `ValueError`."""
    document = {"schema_version": schema_version, **payload}
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Send what the work inside prints on stdout, libraries included, to stderr, so that JSON stays alone there."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def print_error(message: str) -> None:
    """One line on stderr, however the message was broken into lines."""
    stderr().print(f"[bold red]aiokv:[/] {escape(' '.join(message.split()))}", soft_wrap=True)


def exit_status(error: Exception) -> int:
    """2 if the caller must change something (`ConfigError`, `UsageError`), 1 for every other failure."""
    return _STATUS_USAGE if isinstance(error, ConfigError | UsageError) else _STATUS_FAILED


def debugging() -> bool:
    """Whether `AIOKV_DEBUG` asks for tracebacks; an unreadable value counts as yes."""
    try:
        return parse_bool(os.environ.get("AIOKV_DEBUG", "false"))
    except ConfigError:
        return True
