"""The options of `aiokv bench convoy`."""

from __future__ import annotations

from typing import Annotated

import typer

from aiokv.cli.bench.convoy.settings import ConvoySettings
from aiokv.cli.output import JsonOption

__all__ = ["register"]

_DEFAULTS = ConvoySettings()

ClientsOption = Annotated[int, typer.Option(min=2, help="Clients at once.")]
TokensOption = Annotated[int, typer.Option(min=16, help="Tokens of the prefix; whole blocks of 16 are used.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="How often each way is measured.")]
BlockBytesOption = Annotated[int, typer.Option(min=384, help="About so many bytes a block of 16 tokens.")]


def register(bench: typer.Typer) -> None:
    """Add the benchmark to `bench`."""
    bench.command("convoy")(_convoy)


def _convoy(
    *,
    clients: ClientsOption = _DEFAULTS.clients,
    tokens: TokensOption = _DEFAULTS.tokens,
    rounds: RoundsOption = _DEFAULTS.rounds,
    block_bytes: BlockBytesOption = _DEFAULTS.block_bytes,
    as_json: JsonOption = False,
) -> None:
    """Let many clients ask at once for one prefix that lies in the CPU tier, each with a question of its own.

    One client alone is timed first, then all at once, then all at once with the first one cancelled while its copy
    runs. Exits 0 only if each block was copied exactly once, every client was given the whole prefix, byte for byte,
    and its tokens were attributed to the CPU tier. Times are reported, not judged.
    """
    from aiokv.cli.bench.convoy.runner import convoy
    from aiokv.cli.bench.report import answer

    settings = ConvoySettings(clients=clients, tokens=tokens, rounds=rounds, block_bytes=block_bytes)
    answer(lambda: convoy(settings), as_json=as_json)
