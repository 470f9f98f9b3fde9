"""The help pages of all commands: paragraphs that fill the terminal, and flags that take no value."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path

import pytest
from typer.core import TyperGroup

from aiokv.cli import main as command
from aiokv.cli.main import build_command
from aiokv.cli.plugins import GROUP

_ROOT = Path(__file__).parent.parent.parent
_SCRIPTS = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"][GROUP]
_PLUGIN = '''
def register(app):
    @app.command("foreign")
    def foreign(count: int = 3, *, loud: bool = False, sound: bool = True) -> None:
        """One line of it.

        A second paragraph whose lines end
        early, as
        in a narrow editor.

        \\b
        kept as
        it is
        """
'''


@pytest.fixture(autouse=True)
def _commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of this checkout, whatever is installed, and a foreign one."""
    monkeypatch.delenv("AIOKV_DEBUG", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "plugin_with_help.py").write_text(_PLUGIN)
    found = {**_SCRIPTS, "foreign": "plugin_with_help:register"}
    entry_points = tuple(EntryPoint(name, value, GROUP) for name, value in found.items())
    monkeypatch.setattr(command, "installed_commands", lambda: entry_points)
    yield
    sys.modules.pop("plugin_with_help", None)


def all_commands() -> Iterator[tuple[str, ...]]:
    entry_points = [EntryPoint(name, value, GROUP) for name, value in _SCRIPTS.items()]
    return _paths_below(build_command(entry_points), path=())


def _paths_below(group: TyperGroup, *, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in group.commands.items():
        if isinstance(inner, TyperGroup):
            yield from _paths_below(inner, path=(*path, name))
        else:
            yield (*path, name)


def help_page(*path: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        command.main([*path, "--help"])
    assert ended.value.code in {0, None}
    return capsys.readouterr().out.splitlines()


def prose_of(page: list[str]) -> list[list[str]]:
    """The lines of each paragraph between the usage and the first frame."""
    first = next(number for number, line in enumerate(page) if "Usage:" in line) + 1
    last = next(number for number, line in enumerate(page) if line.startswith("╭"))
    paragraphs: list[list[str]] = [[]]
    for line in page[first:last]:
        if line.strip():
            paragraphs[-1].append(line.strip())
        else:
            paragraphs.append([])
    return [paragraph for paragraph in paragraphs if paragraph]


@pytest.mark.parametrize("width", [60, 80, 130])
@pytest.mark.parametrize("path", list(all_commands()), ids=" ".join)
def test_paragraphs_are_broken_only_where_the_next_word_does_not_fit(
    path: tuple[str, ...], width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    paragraphs = prose_of(help_page(*path, capsys=capsys))
    assert paragraphs
    for paragraph in paragraphs:
        for line, following in pairwise(paragraph):
            assert len(f"{line} {following.split()[0]}") > width - 2, (line, following)


def test_commands_of_integrations_are_among_them() -> None:
    found = set(all_commands())
    assert {("demo",), ("serve",), ("doctor",), ("top",), ("bench",), ("bench", "hash"), ("bench", "replay")} <= found


@pytest.mark.parametrize("path", list(all_commands()), ids=" ".join)
def test_flags_have_no_type(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    page = "\n".join(help_page(*path, capsys=capsys))
    assert "--help" in page
    assert "bool" not in page


def test_a_foreign_command_is_shown_as_well_and_keeps_its_paragraphs_and_types(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    page = help_page("foreign", capsys=capsys)
    assert prose_of(page) == [
        ["One line of it."],
        ["A second paragraph whose lines end early, as in a narrow editor."],
        ["kept as", "it is"],
    ]
    assert any("--count" in line and "<int>" in line for line in page)
    assert not any("bool" in line for line in page)
