"""The options of `aiokv bench scale`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

import typer

from aiokv.cli.bench.cases import Model
from aiokv.cli.output import JsonOption, stdout_kept_clean

__all__ = ["register"]

PoolSlotsOption = Annotated[
    list[int] | None,
    typer.Option(
        "--pool-slots",
        min=2,
        help="Slots of each of the two pools. Repeatable, two sizes at least. Default: 20,000, 1,000,000, 10,000,000.",
    ),
]
BlocksOption = Annotated[int, typer.Option(min=1, help="Blocks of 16 tokens of a prompt.")]
ModelOption = Annotated[Model, typer.Option(help="One full group, or a full and a sliding window group.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Rounds in pools of each size.")]


def register(bench: typer.Typer) -> None:
    """Add the benchmark to `bench`."""
    bench.command("scale")(_scale)


def _scale(
    *,
    pool_slots: PoolSlotsOption = None,
    blocks: BlocksOption = 8_192,
    model: ModelOption = Model.FULL,
    repeats: RepeatsOption = 15,
    as_json: JsonOption = False,
) -> None:
    """Tell what a block costs in small and in large pools, all of them full: lookup, reserve, release, store, load.

    Caches of all sizes are filled in one process (the default takes 2 GB and some minutes), and their rounds take
    turns. A ratio is that of the medians to the smallest pools'. Prompts that come back do so after as many others in
    all sizes, prompts_in_turn, as the smallest pools hold; larger pools are measured also with as many as they hold,
    64 at most, which no processor's cache remembers. With the layout miss no prompt comes back. Exits 0 only if no
    block costs more than 3 times what it costs in the smallest pools.
    """
    from aiokv.cli.bench.report import conclude
    from aiokv.cli.bench.scale.runner import measure_scale
    from aiokv.cli.bench.scale.settings import ScaleSettings
    from aiokv.cli.bench.scale.table import table_of

    settings = ScaleSettings(
        pool_slots=tuple(pool_slots or ScaleSettings().pool_slots), blocks=blocks, model=model, repeats=repeats
    )
    with stdout_kept_clean() if as_json else nullcontext():
        report, results = measure_scale(settings)
    conclude(report, as_json=as_json, table=table_of(results))
