"""Commands that integrations bring: each entry point of the group `aiokv.commands` is a function that takes the app.

An entry point is loaded only when its command is asked for, or for the list of all commands. One that cannot be loaded
is replaced by a command of its name that says in one line what is missing; no other command suffers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Final, final

import typer
from rich.markup import escape

from aiokv.errors import UsageError

__all__ = [
    "GROUP",
    "CommandUnavailable",
    "InstallHint",
    "explain_unavailable",
    "installed_commands",
    "register_commands",
]

GROUP: Final = "aiokv.commands"

_REQUIREMENT: Final = re.compile(r"\s*([\w.-]+).*;.*\bextra\s*==\s*['\"]([\w.-]+)['\"]", re.DOTALL)


@final
class CommandUnavailable(UsageError):
    """A command was asked for whose integration cannot be loaded."""

    def __init__(self, command: str, *, remedy: str) -> None:
        self.command = command
        self.remedy = remedy
        super().__init__(f"the command {command!r} is not available: {remedy}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InstallHint:
    """What the distribution behind an entry point says about its extras."""

    distribution: str
    extras: tuple[str, ...]
    requirements: tuple[str, ...]

    def remedy(self, *, command: str, missing: str) -> str:
        """How to install the module `missing` for `command`, through an extra where one holds it."""
        package = missing.partition(".")[0]
        extras = [command] if command in self.extras else self._extras_with(package)
        if not extras:
            return f"the package {package!r} is not installed"
        return f"pip install '{self.distribution}[{extras[0]}]' (the package {package!r} is not installed)"

    def _extras_with(self, package: str) -> list[str]:
        matches = filter(None, map(_REQUIREMENT.match, self.requirements))
        return [match[2] for match in matches if _normal(match[1]) == _normal(package)]


def installed_commands() -> tuple[EntryPoint, ...]:
    """The commands that installed distributions offer, by name; of two with one name the first is kept."""
    by_name: dict[str, EntryPoint] = {}
    for entry_point in entry_points(group=GROUP):
        by_name.setdefault(entry_point.name, entry_point)
    return tuple(by_name[name] for name in sorted(by_name))


def register_commands(app: typer.Typer, *, commands: Iterable[EntryPoint]) -> None:
    """Load each entry point and let it register its command on `app`, or put a stand-in there that says why not."""
    for entry_point in commands:
        try:
            register: Callable[[typer.Typer], None] = entry_point.load()
            register(app)
        except Exception as error:  # whatever a foreign package does at import must not take the other commands away
            _register_stand_in(app, explain_unavailable(entry_point, error=error))


def explain_unavailable(entry_point: EntryPoint, *, error: Exception) -> CommandUnavailable:
    """What to tell who asked for the command behind `entry_point`, which ended in `error` while it was being loaded."""
    hint = _install_hint(entry_point)
    if isinstance(error, ModuleNotFoundError) and error.name:
        remedy = hint.remedy(command=entry_point.name, missing=error.name)
    else:
        remedy = f"{entry_point.value} of {hint.distribution} failed to load ({type(error).__name__}: {error})"
    return CommandUnavailable(entry_point.name, remedy=remedy)


def _register_stand_in(app: typer.Typer, error: CommandUnavailable) -> None:
    @app.command(
        error.command,
        help=f"Not available: {escape(error.remedy)}",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    )
    def stand_in() -> None:
        raise error


def _install_hint(entry_point: EntryPoint) -> InstallHint:
    distribution = entry_point.dist
    if distribution is None:
        return InstallHint(distribution="an unnamed package", extras=(), requirements=())
    return InstallHint(
        distribution=distribution.name,
        extras=tuple(distribution.metadata.get_all("Provides-Extra") or ()),
        requirements=tuple(distribution.requires or ()),
    )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
