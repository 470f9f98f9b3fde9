"""The options of `aiokv bench hold`."""

from __future__ import annotations

from typing import Annotated

import typer

from aiokv.cli.bench.holds.settings import HoldSettings
from aiokv.cli.output import JsonOption

__all__ = ["register"]

_DEFAULTS = HoldSettings()

ClientsOption = Annotated[int, typer.Option(min=1, help="Requests at once.")]
TokensOption = Annotated[int, typer.Option(min=64, help="Tokens of a prompt.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="How often each client asks in each way.")]
ChurnSlotsOption = Annotated[int, typer.Option(min=16, help="Slots of each tier's pool in the churn.")]
ChurnBlocksOption = Annotated[int, typer.Option(min=1, help="Blocks that go through the full pool.")]


def register(bench: typer.Typer) -> None:
    """Add the benchmark to `bench`."""
    bench.command("hold")(_hold)


def _hold(
    *,
    clients: ClientsOption = _DEFAULTS.clients,
    tokens: TokensOption = _DEFAULTS.tokens,
    rounds: RoundsOption = _DEFAULTS.rounds,
    churn_slots: ChurnSlotsOption = _DEFAULTS.churn_slots,
    churn_blocks: ChurnBlocksOption = _DEFAULTS.churn_blocks,
    as_json: JsonOption = False,
) -> None:
    """Tell how long aiokv holds the loop's thread at a time while long prompts are acquired, stored and released.

    Many clients at once ask for prompts that lie in the GPU tier, in the CPU tier, in both, in none, and for
    conversations that grow; then blocks that nobody has seen go through a large pool. Timed, by the thread's CPU clock,
    is each public call, each stretch of a coroutine and each callback. Copies are the fake backend's: nothing is
    copied. Exits 0 only if 99 % of the steps take at most 1 ms and 99.9 % at most 2 ms.
    """
    from aiokv.cli.bench.holds.runner import hold
    from aiokv.cli.bench.report import answer

    settings = HoldSettings(
        clients=clients, tokens=tokens, rounds=rounds, churn_slots=churn_slots, churn_blocks=churn_blocks
    )
    answer(lambda: hold(settings), as_json=as_json)
