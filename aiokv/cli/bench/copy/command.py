"""The options of `aiokv bench copy`."""

from __future__ import annotations

from typing import Annotated

import typer

from aiokv.cli.bench.copy.settings import CopySettings
from aiokv.cli.bench.movers import CopyBackend
from aiokv.cli.output import JsonOption

__all__ = ["register"]

_DEFAULTS = CopySettings()

BlockBytesOption = Annotated[
    list[int], typer.Option("--block-bytes", min=64, help="Bytes of a block; may be given several times.")
]
MibOption = Annotated[int, typer.Option("--mib", min=1, help="MiB of one transfer. Eight times as much is allocated.")]
BackendOption = Annotated[CopyBackend, typer.Option("--backend", help="Who makes the copies.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="How often each case is measured.")]


def register(bench: typer.Typer) -> None:
    """Add the benchmark to `bench`."""
    bench.command("copy")(_copy)


def _copy(
    *,
    block_bytes: BlockBytesOption = list(_DEFAULTS.block_bytes),  # noqa: B006  # typer's way; nobody changes it
    mib: MibOption = _DEFAULTS.round_mib,
    repeats: RepeatsOption = _DEFAULTS.repeats,
    backend: BackendOption = _DEFAULTS.backend,
    as_json: JsonOption = False,
) -> None:
    """Copy blocks between the tiers, by size, direction and how their slots lie, beside one plain copy.

    On a CUDA device, or on the fake driver of a checkout, whose speed says nothing of a GPU: exits 0 only if every byte
    arrived. With `--backend host` in RAM: `ratio` is then the speed of the memcpy that was measured just before, and
    `shared` a copy while another thread runs Python code without a pause, of whose speed `shared_python` says what is
    left. There blocks of 64 KiB and more must also reach 90 % of the memcpy in their better rounds.
    """
    from aiokv.cli.bench.copy.runner import copy
    from aiokv.cli.bench.report import answer

    settings = CopySettings(block_bytes=tuple(block_bytes), round_mib=mib, repeats=repeats, backend=backend)
    answer(lambda: copy(settings), as_json=as_json)
