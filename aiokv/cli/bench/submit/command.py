"""The options of `aiokv bench submit`."""

from __future__ import annotations

from typing import Annotated

import typer

from aiokv.cli.bench.movers import CopyBackend
from aiokv.cli.bench.submit.settings import SubmitSettings
from aiokv.cli.output import JsonOption

__all__ = ["register"]

_DEFAULTS = SubmitSettings()

CopiesOption = Annotated[
    list[int], typer.Option("--copies", min=1, help="Copies of one batch; may be given several times.")
]
RepeatsOption = Annotated[int, typer.Option(min=1, max=1_000_000, help="How often each case is measured.")]
BackendOption = Annotated[CopyBackend, typer.Option("--backend", help="Who makes the copies.")]


def register(bench: typer.Typer) -> None:
    """Add the benchmark to `bench`."""
    bench.command("submit")(_submit)


def _submit(
    *,
    copies: CopiesOption = list(_DEFAULTS.copies),  # noqa: B006  # typer's way; nobody changes it
    repeats: RepeatsOption = _DEFAULTS.repeats,
    backend: BackendOption = _DEFAULTS.backend,
    as_json: JsonOption = False,
) -> None:
    """Hand batches of copies to the backend and time who does so.

    On a CUDA device, or on the fake driver of a checkout, beside the list path of the bindings. On the host in CPU
    time: `adjacent` batches are one run of slots on both sides, `scattered` ones have no two neighbours. Exits 0 only
    if the blocks have arrived, and 8,192 copies cost at most an eighth of the bindings' lists.
    """
    from aiokv.cli.bench.report import answer
    from aiokv.cli.bench.submit.runner import submit

    settings = SubmitSettings(copies=tuple(copies), repeats=repeats, backend=backend)
    answer(lambda: submit(settings), as_json=as_json)
