"""The options of `aiokv bench bridge`."""

from __future__ import annotations

from typing import Annotated

import typer

from aiokv.cli.bench.bridge.settings import BridgeBackend, BridgeSettings
from aiokv.cli.output import JsonOption

__all__ = ["register"]

_DEFAULTS = BridgeSettings()

InFlightOption = Annotated[
    list[int], typer.Option("--in-flight", min=1, help="Transfers in flight; may be given several times.")
]
CompletionsOption = Annotated[int, typer.Option(min=1, help="Wake-ups measured for each size in each repeat.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="How often each size is measured.")]
CopyOption = Annotated[int, typer.Option("--copy-us", min=1, help="What one transfer takes, in microseconds.")]
BackendOption = Annotated[BridgeBackend, typer.Option("--backend", help="Whose copies are waited for.")]
IdleOption = Annotated[int, typer.Option("--idle-ms", min=1, help="How long to listen to an idle runtime.")]


def register(bench: typer.Typer) -> None:
    """Add the benchmark to `bench`."""
    bench.command("bridge")(_bridge)


def _bridge(
    *,
    in_flight: InFlightOption = list(_DEFAULTS.in_flight),  # noqa: B006  # typer's way; nobody changes it
    completions: CompletionsOption = _DEFAULTS.completions,
    repeats: RepeatsOption = _DEFAULTS.repeats,
    copy_us: CopyOption = _DEFAULTS.copy_us,
    idle_ms: IdleOption = _DEFAULTS.idle_ms,
    backend: BackendOption = _DEFAULTS.backend,
    as_json: JsonOption = False,
) -> None:
    """Time how soon a request goes on after its copy has ended, with few and with many transfers in flight.

    The CUDA backend copies, on the fake driver of a checkout, which ends copies on time; elsewhere the device is a
    clock: so the end of each copy is known. Exits 0 only if the median with most in flight is no more than 1.3 times
    that with fewest, and nothing is polled while nothing is in flight.
    """
    from aiokv.cli.bench.bridge.runner import bridge
    from aiokv.cli.bench.bridge.table import table_of
    from aiokv.cli.bench.report import answer

    settings = BridgeSettings(
        in_flight=tuple(in_flight),
        completions=completions,
        repeats=repeats,
        copy_us=copy_us,
        idle_ms=idle_ms,
        backend=backend,
    )
    answer(lambda: bridge(settings), as_json=as_json, table_of=table_of)
