"""The `aiokv` command.

`doctor`, `bench` and `top` are built in; commands of integrations come from entry points (see `aiokv.cli.plugins`).
Errors of aiokv end as one line on stderr: status 2 if the caller must change something, else 1. `AIOKV_DEBUG=1` shows
the traceback instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, version
from typing import Annotated

import typer
from typer.core import TyperGroup
from typer.main import get_group

from aiokv.cli import doctor, top
from aiokv.cli.bench import app as bench
from aiokv.cli.help_pages import mend_help
from aiokv.cli.output import debugging, exit_status, print_error
from aiokv.cli.plugins import explain_unavailable, installed_commands, register_commands
from aiokv.errors import AiokvError

__all__ = ["build_command", "main"]


def main(args: Sequence[str] | None = None) -> None:
    """Run the command that `args` (by default the process's own arguments) ask for, then exit with its status."""
    arguments = list(sys.argv[1:] if args is None else args)
    commands = _needed(installed_commands(), arguments=arguments)
    try:
        build_command(commands)(args=arguments, prog_name="aiokv")
    except Exception as error:  # the last frame: nothing is swallowed, every error becomes a message and a status
        if debugging():
            raise
        shown = _with_remedy(error, commands=commands)
        print_error(_describe(shown))
        sys.exit(exit_status(shown))


def build_command(commands: Sequence[EntryPoint]) -> TyperGroup:
    """`aiokv` with the built-in commands and those of `commands`."""
    app = typer.Typer(
        help="KV-cache blocks in GPU and CPU memory, awaited from asyncio.",
        rich_markup_mode="rich",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    app.callback()(_root)
    doctor.register(app)
    bench.register(app)
    top.register(app)
    register_commands(app, commands=commands)
    command = get_group(app)
    mend_help(command)
    return command


def _print_version(value: bool) -> None:  # noqa: FBT001  # typer calls it with the value alone
    if value:
        typer.echo(version("aiokv"))
        raise typer.Exit


def _root(
    *,
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """KV-cache blocks in GPU and CPU memory, awaited from asyncio."""


def _needed(commands: Sequence[EntryPoint], *, arguments: Sequence[str]) -> Sequence[EntryPoint]:
    """Those to load: the one asked for, none for a built-in command, all of them for help or an unknown name."""
    asked = next((argument for argument in arguments if not argument.startswith("-")), "")  # root options take no value
    if asked in (doctor.NAME, bench.NAME, top.NAME):
        return ()
    return [command for command in commands if command.name == asked] or commands


def _with_remedy(error: Exception, *, commands: Sequence[EntryPoint]) -> Exception:
    """A module that the command asked for misses only when it runs is explained like one missing when it is loaded."""
    if isinstance(error, ModuleNotFoundError) and len(commands) == 1:
        return explain_unavailable(commands[0], error=error)
    return error


def _describe(error: Exception) -> str:
    if isinstance(error, AiokvError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"there is not enough memory: {error}"
    return f"unexpected {type(error).__name__}: {error} (AIOKV_DEBUG=1 shows where)"


if __name__ == "__main__":
    main()
