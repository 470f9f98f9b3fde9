"""The `bench` command: the benchmarks by name."""

from __future__ import annotations

from typing import Final

import typer

from aiokv.cli.bench import (
    bridge,
    compare,
    convoy,
    copy,
    events,
    footprint,
    holds,
    operation_commands,
    replay,
    scale,
    soak,
    submit,
)

__all__ = ["NAME", "register"]

NAME: Final = "bench"
_BENCHMARKS: Final = (
    soak.register,
    convoy.register,
    operation_commands.register,
    copy.register,
    submit.register,
    bridge.register,
    events.register,
    holds.register,
    scale.register,
    footprint.register,
    compare.register,
    replay.register,
)


def register(app: typer.Typer) -> None:
    """Add `bench` and its benchmarks to `app`."""
    bench = typer.Typer(
        help="Measure aiokv on this machine, and prove what it promises.",
        rich_markup_mode="rich",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    bench.callback()(_bench)
    for register_benchmark in _BENCHMARKS:
        register_benchmark(bench)
    app.add_typer(bench, name=NAME)


def _bench() -> None:
    """Measure aiokv on this machine, and prove what it promises. Exit status 0 only if the promises hold."""
