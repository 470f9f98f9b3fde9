"""The options of `aiokv bench memory`."""

from __future__ import annotations

from typing import Annotated

import typer

from aiokv.cli.output import JsonOption

__all__ = ["register"]

SlotsOption = Annotated[int, typer.Option(min=1, help="Slots of each pool; ten million take 3 GB for some minutes.")]


def register(bench: typer.Typer) -> None:
    """Add the benchmark to `bench`."""
    bench.command("memory")(_memory)


def _memory(*, slots: SlotsOption = 10_000_000, as_json: JsonOption = False) -> None:
    """Tell what a slot costs, by how much the process's resident memory grows: per empty slot and per resident one.

    A GPU pool, a CPU pool, and a GPU pool while somebody listens to cache events are opened, one after the other, and
    filled with blocks by requests. Exits 0 only if an empty slot costs at most 40 bytes, a resident one with its index
    entry at most 200, and 4 more per token with events on. Pools under a million slots measure the interpreter instead.
    """
    from aiokv.cli.bench.footprint.runner import memory
    from aiokv.cli.bench.report import answer

    answer(lambda: memory(slots), as_json=as_json)
