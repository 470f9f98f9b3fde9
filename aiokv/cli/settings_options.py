"""The options that commands share for `aiokv.runtime.config_file.Settings`, and how `--print-config` shows them.

A command declares the options it needs with these types, each defaulting to `None`, which means "not given".
"""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from aiokv.cli.output import print_json
from aiokv.runtime.config_file import LoadedSettings, Settings

__all__ = [
    "BackendOption",
    "ConfigFileOption",
    "CpuBlocksOption",
    "CpuBytesOption",
    "GpuBlocksOption",
    "PrintConfigOption",
    "print_config",
    "settings_as_json",
]

ConfigFileOption = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.", metavar="FILE")]
GpuBlocksOption = Annotated[int | None, typer.Option("--gpu-blocks", help="Slots of the GPU pool.")]
CpuBlocksOption = Annotated[int | None, typer.Option("--cpu-blocks", help="Slots of the CPU pool.")]
CpuBytesOption = Annotated[str | None, typer.Option("--cpu-bytes", help='Size of the CPU pool, such as "8GiB".')]
BackendOption = Annotated[str | None, typer.Option("--backend", help="auto, cuda or host.")]
PrintConfigOption = Annotated[
    bool, typer.Option("--print-config", help="Print the effective settings, and where each comes from, and exit.")
]


def print_config(loaded: LoadedSettings, *, as_json: bool) -> None:
    """Print the settings as a TOML file that loads to the same, or as one JSON object."""
    if as_json:
        sources = {key: source.value for key, source in loaded.sources.items()}
        print_json({"settings": settings_as_json(loaded.settings), "sources": sources}, schema_version=1)
        return
    for key, value in settings_as_json(loaded.settings).items():
        line = f"# {key} is not set" if value is None else f"{key} = {json.dumps(value)}"
        typer.echo(f"{line}  # {loaded.sources[key].value}")


def settings_as_json(settings: Settings) -> dict[str, object]:
    """The settings by name, enums by their value."""
    return {key: value.value if isinstance(value, Enum) else value for key, value in asdict(settings).items()}
