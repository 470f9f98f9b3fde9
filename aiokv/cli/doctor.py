"""`aiokv doctor`: what this machine offers, and what to change. Exit status 0 fine, 1 degraded, 2 unusable."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import typer
from rich.markup import escape
from rich.table import Table

from aiokv.cli.diagnosis import Finding, Level, diagnose, worst_level
from aiokv.cli.machine import Machine, read_machine
from aiokv.cli.output import JsonOption, print_json, stdout
from aiokv.cli.settings_options import (
    BackendOption,
    ConfigFileOption,
    CpuBytesOption,
    PrintConfigOption,
    print_config,
    settings_as_json,
)
from aiokv.runtime.config_file import Settings, load_settings_with_sources

__all__ = ["NAME", "register"]

NAME: Final = "doctor"

_SCHEMA_VERSION: Final = 1
_STYLES: Final = {Level.FINE: "green", Level.DEGRADED: "yellow", Level.UNUSABLE: "bold red"}


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(NAME)(_doctor)


def _doctor(
    *,
    config: ConfigFileOption = None,
    backend: BackendOption = None,
    cpu_bytes: CpuBytesOption = None,
    show_config: PrintConfigOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say what this machine offers and what to change; exit 0 if fine, 1 if degraded, 2 if unusable.

    A machine without a GPU is fine unless the backend "cuda" is asked for. The CPU pool is checked against the memory
    this process may use if its size is given in bytes.
    """
    loaded = load_settings_with_sources(
        file=config, environ=os.environ, arguments={"backend": backend, "cpu_bytes": cpu_bytes}
    )
    if show_config:
        print_config(loaded, as_json=as_json)
        return
    machine = read_machine()
    findings = diagnose(machine, settings=loaded.settings)
    if as_json:
        _print_as_json(findings, machine=machine, settings=loaded.settings)
    else:
        _print_table(findings)
    raise typer.Exit(worst_level(findings))


def _print_as_json(findings: Sequence[Finding], *, machine: Machine, settings: Settings) -> None:
    status = worst_level(findings)
    payload = {
        "status": status.name.lower(),
        "exit_status": int(status),
        "checks": [{**asdict(finding), "level": finding.level.name.lower()} for finding in findings],
        "machine": asdict(machine),
        "settings": settings_as_json(settings),
    }
    print_json(payload, schema_version=_SCHEMA_VERSION)


def _print_table(findings: Sequence[Finding]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found and what to change")
    for finding in findings:
        lines = [escape(finding.found), *(f"[bold]→ {escape(advice)}[/]" for advice in finding.advice)]
        style = _STYLES[finding.level]
        table.add_row(finding.check, f"[{style}]{finding.level.name.lower()}[/]", "\n".join(lines))
    console = stdout()
    console.print(table)
    status = worst_level(findings)
    console.print(f"\nThis machine is [{_STYLES[status]}]{status.name.lower()}[/] for aiokv.")
