"""The options of `aiokv bench compare`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from aiokv.cli.bench.cases import Model, Operation
from aiokv.cli.output import JsonOption, stdout_kept_clean

__all__ = ["register"]

PeerPythonOption = Annotated[
    Path,
    typer.Option(envvar="AIOKV_PEER_PYTHON", help="The interpreter of an environment with vLLM, also a CPU build."),
]
BlocksOption = Annotated[
    list[int] | None,
    typer.Option(min=1, help="Blocks of 16 tokens in a prompt; repeatable. Default: 64, 512, 2048, 8192."),
]
OperationOption = Annotated[
    list[Operation] | None, typer.Option(help="What is compared; repeatable. Default: everything.")
]
ModelOption = Annotated[list[Model] | None, typer.Option(help="Repeatable. Default: both.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Turns of each side.")]
PoolSlotsOption = Annotated[int, typer.Option("--pool-slots", min=1, help="Slots of each tier.")]
MemorySlotsOption = Annotated[
    int,
    typer.Option(min=0, help="Slots of the pools whose memory is compared, 600 bytes each at most; 0 leaves it out."),
]
TimeoutOption = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer of either side.")]


def register(bench: typer.Typer) -> None:
    """Add the benchmark to `bench`."""
    bench.command("compare")(_compare)


def _compare(
    *,
    peer_python: PeerPythonOption,
    blocks: BlocksOption = None,
    operation: OperationOption = None,
    model: ModelOption = None,
    repeats: RepeatsOption = 15,
    pool_slots: PoolSlotsOption = 20_000,
    memory_slots: MemorySlotsOption = 1_000_000,
    timeout: TimeoutOption = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Time the core's operations side by side with vLLM's own code, in turns on one core.

    Both sides have full pools, where each allocation evicts, new keys in each round, and Python's garbage collector
    off. Of prompts up to 512 blocks 8 go through an operation one right after the other, as in a scheduler's step
    (fewer where the pools are too small), and one request's share is told. An untimed short request comes first. A
    prefix that interleaves tiers vLLM cannot use: its side is one of the same length in CPU memory. Exits 0 only if
    every floor is kept: from 64 blocks on no slower, from 8,192 on as many times as fast as the table says; and if a
    resident slot takes at most half of the peer's memory, which is how much a process grows that fills a GPU pool
    (few slots measure the interpreter instead). Needs a checkout, where the peer's side lies in `tests/bench`.
    """
    from aiokv.cli.bench.compare.runner import compare
    from aiokv.cli.bench.compare.settings import CompareSettings
    from aiokv.cli.bench.compare.table import table_of
    from aiokv.cli.bench.report import conclude

    defaults = CompareSettings(peer_python=peer_python)
    settings = CompareSettings(
        peer_python=peer_python,
        blocks=tuple(dict.fromkeys(blocks or defaults.blocks)),
        operations=tuple(dict.fromkeys(operation or defaults.operations)),
        models=tuple(dict.fromkeys(model or defaults.models)),
        repeats=repeats,
        pool_slots=pool_slots,
        memory_slots=memory_slots,
        timeout_s=timeout,
    )
    with stdout_kept_clean() if as_json else nullcontext():
        report, results = compare(settings)
    conclude(report, as_json=as_json, table=table_of(results))
