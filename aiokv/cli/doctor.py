"""`aiokv doctor`: what this machine offers, and what to change. Exit status 0 fine, 1 degraded, 2 unusable."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Final

import typer
from rich.markup import escape
from rich.table import Table

from aiokv.cli.diagnosis import Finding, Level, diagnose, plan_machine, worst_level
from aiokv.cli.machine import Machine, read_machine
from aiokv.cli.memory_view import ArenaSize, find_arena_size, plan_as_json, plan_as_table
from aiokv.cli.output import JsonOption, print_json, stdout
from aiokv.cli.settings_options import (
    BackendOption,
    ConfigFileOption,
    CpuBlocksOption,
    CpuBytesOption,
    PrintConfigOption,
    print_config,
    settings_as_json,
)
from aiokv.errors import ConfigError
from aiokv.runtime.config_file import load_settings_with_sources, parse_bytes

__all__ = ["NAME", "register"]

NAME: Final = "doctor"

_SCHEMA_VERSION: Final = 1
BlockBytesOption = Annotated[
    str | None, typer.Option("--block-bytes", help='Bytes of one block over all layers, such as "2MiB".')
]

_STYLES: Final = {Level.FINE: "green", Level.DEGRADED: "yellow", Level.UNUSABLE: "bold red"}


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(NAME)(_doctor)


def _doctor(
    *,
    config: ConfigFileOption = None,
    backend: BackendOption = None,
    cpu_bytes: CpuBytesOption = None,
    cpu_blocks: CpuBlocksOption = None,
    block_bytes: BlockBytesOption = None,
    show_config: PrintConfigOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say what this machine offers and what to change; exit 0 if fine, 1 if degraded, 2 if unusable.

    A machine without a GPU is fine unless the backend "cuda" is asked for. The memory plan says what each part of the
    pools takes and what limits it; a CPU pool that is given in blocks needs --block-bytes for it.
    """
    loaded = load_settings_with_sources(
        file=config,
        environ=os.environ,
        arguments={"backend": backend, "cpu_bytes": cpu_bytes, "cpu_blocks": cpu_blocks},
    )
    if show_config:
        print_config(loaded, as_json=as_json)
        return
    machine = read_machine()
    size = None if block_bytes is None else _parse_block_bytes(block_bytes)
    findings = diagnose(machine, settings=loaded.settings, block_bytes=size)
    plan = plan_machine(machine, settings=loaded.settings, block_bytes=size)
    arena = find_arena_size(loaded.settings, block_bytes=size)
    if as_json:
        shown = {"memory_plan": plan_as_json(plan, arena=arena), "settings": settings_as_json(loaded.settings)}
        _print_as_json(findings, machine=machine, rest=shown)
    else:
        _print_findings(findings)
        stdout().print(plan_as_table(plan, machine, arena=arena))
        _print_verdict(findings, arena=arena)
    raise typer.Exit(worst_level(findings))


def _parse_block_bytes(text: str) -> int:
    size = parse_bytes(text)
    if not size:
        raise ConfigError("--block-bytes must be more than zero")
    return size


def _print_as_json(findings: Sequence[Finding], *, machine: Machine, rest: Mapping[str, object]) -> None:
    status = worst_level(findings)
    payload = {
        "status": status.name.lower(),
        "exit_status": int(status),
        "checks": [{**asdict(finding), "level": finding.level.name.lower()} for finding in findings],
        "machine": asdict(machine),
        **rest,
    }
    print_json(payload, schema_version=_SCHEMA_VERSION)


def _print_findings(findings: Sequence[Finding]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found and what to change")
    for finding in findings:
        lines = [escape(finding.found), *(f"[bold]→ {escape(advice)}[/]" for advice in finding.advice)]
        style = _STYLES[finding.level]
        table.add_row(finding.check, f"[{style}]{finding.level.name.lower()}[/]", "\n".join(lines))
    stdout().print(table)
    stdout().print()


def _print_verdict(findings: Sequence[Finding], *, arena: ArenaSize) -> None:
    status = worst_level(findings)
    unknown = "" if arena is ArenaSize.KNOWN else ", as far as can be told without --block-bytes"
    stdout().print(f"\nThis machine is [{_STYLES[status]}]{status.name.lower()}[/] for aiokv{unknown}.")
