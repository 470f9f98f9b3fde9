"""`aiokv bench hash|lookup|reserve|release|store|load|lifecycle`: a command per operation, the same options for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Final

import typer

from aiokv.cli.bench.cases import LAYOUTS, Collector, Layout, Model, Operation
from aiokv.cli.output import JsonOption

__all__ = ["DEFAULT_BLOCKS", "register"]

DEFAULT_BLOCKS: Final = (64, 512, 2_048, 8_192)
_POOL_SLOTS: Final = 20_000
_REPEATS: Final = 30

BlocksOption = Annotated[list[int], typer.Option(min=1, help="Blocks of 16 tokens of the prompt. Repeatable.")]
LayoutsOption = Annotated[
    list[Layout] | None,
    typer.Option("--layout", help="Where the blocks lie before. Repeatable. Default: all that the operation has."),
]
ModelOption = Annotated[Model, typer.Option(help="One full group, or a full and a sliding window group.")]
PoolSlotsOption = Annotated[
    int, typer.Option(min=2, help="Slots of each of the two pools, all in use: about 100 bytes of memory each.")
]
RequestsOption = Annotated[
    int, typer.Option(min=1, help="So many go through the operation one right after the other in a round.")
]
RepeatsOption = Annotated[int, typer.Option(min=1, help="How often each case is measured.")]
CollectorOption = Annotated[Collector, typer.Option("--gc", help="Python's garbage collector while it is timed.")]

_HELP: Final[Mapping[Operation, str]] = {
    Operation.HASH: "Hash the blocks of new prompts. Pools have no part in it.",
    Operation.LOOKUP: "Look up prompts in full pools, plan, pin, claim, and name what was claimed.",
    Operation.RESERVE: "Let new prompts in, where every block evicts another one.",
    Operation.RELEASE: "Give back leases whose blocks are resident on the GPU.",
    Operation.STORE: "Plan the stores of prompts that were just computed, and register what was copied.",
    Operation.LOAD: "Hand over loads that were planned and named, and register what was copied.",
    Operation.LIFECYCLE: "Take requests from admission to the end, their loads and stores included.",
}
_ENDING: Final = (
    "Each round uses new keys, and begins with a short request that is not timed. Times are CPU time of the thread for "
    "one request, us_per_block that of a block of the prompt, however many groups there are. What makes up a figure is "
    "told in parts; what was done beside it is told too, and not counted. No bytes are copied: transfers end at once, "
    "and well."
)


def register(bench: typer.Typer) -> None:
    """Add the commands to `bench`."""
    for operation in Operation:
        bench.command(operation.value, help=f"{_HELP[operation]}\n\n{_ENDING}")(_command_of(operation))


def _command_of(operation: Operation) -> Callable[..., None]:
    def command(
        *,
        blocks: BlocksOption = list(DEFAULT_BLOCKS),  # noqa: B006  # typer copies it
        layout: LayoutsOption = None,
        model: ModelOption = Model.FULL,
        pool_slots: PoolSlotsOption = _POOL_SLOTS,
        requests: RequestsOption = 1,
        repeats: RepeatsOption = _REPEATS,
        gc: CollectorOption = Collector.OFF,
        as_json: JsonOption = False,
    ) -> None:
        from aiokv.cli.bench.operations.runner import OperationSettings, measure
        from aiokv.cli.bench.report import answer

        settings = OperationSettings(
            operation=operation,
            layouts=tuple(layout or LAYOUTS[operation]),
            blocks=tuple(blocks),
            model=model,
            pool_slots=pool_slots,
            requests=requests,
            repeats=repeats,
            collector=gc,
        )
        answer(lambda: measure(settings), as_json=as_json)

    return command
