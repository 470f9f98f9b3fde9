"""What `--help` shows, for all commands, those of integrations included: one place, after they are registered.

Typer keeps the line ends that a docstring has in its source, and shows a flag with a type, as if it took a value.
"""

from __future__ import annotations

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

__all__ = ["mend_help"]


def mend_help(command: TyperCommand | TyperGroup) -> None:
    """Let the paragraphs of `command` and of those below it flow, at any width; name flags without a type."""
    command.help = _flowing(command.help or "")
    with typer.Context(command, **command.context_settings) as context:
        for option in (*command.params, command.get_help_option(context)):
            if isinstance(option, TyperOption) and option.is_flag:
                option.metavar = ""
    if isinstance(command, TyperGroup):
        for inner in command.commands.values():
            if isinstance(inner, TyperCommand | TyperGroup):
                mend_help(inner)


def _flowing(text: str) -> str:
    """Each paragraph in one line, but for those that begin with a backspace: Typer's sign that theirs are to stay."""
    return "\n\n".join(
        paragraph if paragraph.startswith("\b") else " ".join(paragraph.splitlines())
        for paragraph in text.split("\n\n")
    )
