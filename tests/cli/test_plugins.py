"""Commands of integrations: loaded when asked for, and explained where they cannot be."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from aiokv.cli import main as command
from aiokv.cli.plugins import GROUP, InstallHint
from aiokv.errors import AcquireTimeout, UsageError

PLUGIN = """
import typer

def register(app):
    @app.command("greet")
    def greet(name: str = "you", *, as_json: bool = False) -> None:
        "Say hello."
        typer.echo(f"hello {name}")

def register_failing(app):
    from aiokv.errors import AcquireTimeout
    @app.command("late")
    def late() -> None:
        raise AcquireTimeout("req-1", timeout=2.0)

def register_lazy(app):
    @app.command("lazy")
    def lazy() -> None:
        import absent_for_sure

def register_bug(app):
    @app.command("bug")
    def bug() -> None:
        raise ZeroDivisionError("boom")
"""


@pytest.fixture(autouse=True)
def _plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOKV_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "plugin_for_test.py").write_text(PLUGIN)
    (tmp_path / "plugin_needs.py").write_text("import absent_for_sure")
    (tmp_path / "plugin_broken.py").write_text("raise RuntimeError('two\\nlines')")
    targets = {
        "greet": "plugin_for_test:register",
        "late": "plugin_for_test:register_failing",
        "lazy": "plugin_for_test:register_lazy",
        "bug": "plugin_for_test:register_bug",
        "needs": "plugin_needs:register",
        "broken": "plugin_broken:register",
        "wrong": "plugin_for_test:no_such_function",
    }
    entry_points = tuple(EntryPoint(name, value, GROUP) for name, value in targets.items())
    monkeypatch.setattr(command, "installed_commands", lambda: entry_points)
    for module in ("plugin_for_test", "plugin_needs", "plugin_broken"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        command.main(arguments)
    code = exit_info.value.code
    return code if isinstance(code, int) else 0


def test_the_command_of_an_integration_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("greet", "--name", "kv") == 0
    assert capsys.readouterr().out == "hello kv\n"


def test_only_the_command_asked_for_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--print-config") == 0
    assert run("needs") == 2
    assert "plugin_for_test" not in sys.modules
    assert "not available" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("needs", "the package 'absent_for_sure' is not installed"),
        ("broken", "plugin_broken:register of an unnamed package failed to load (RuntimeError: two lines)"),
        ("wrong", "plugin_for_test:no_such_function of an unnamed package failed to load (AttributeError: "),
    ],
)
@pytest.mark.parametrize("options", [[], ["--json", "--help", "--prompt=x", "y"]])
def test_a_command_that_cannot_be_loaded_says_so_in_one_line(
    name: str, reason: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"aiokv: the command '{name}' is not available: {reason}")
    assert captured.err.count("\n") == 1


def test_a_package_missing_only_when_the_command_runs_is_explained_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("lazy") == 2
    assert "'absent_for_sure' is not installed" in capsys.readouterr().err


def test_help_lists_what_works_and_what_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    assert "Say hello." in shown
    assert "the package 'absent_for_sure' is not installed" in shown


def test_an_error_of_aiokv_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("late") == 1
    assert capsys.readouterr().err == f"aiokv: {AcquireTimeout('req-1', timeout=2.0)}\n"


def test_a_bug_is_one_line_that_says_how_to_see_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bug") == 1
    assert capsys.readouterr().err == "aiokv: unexpected ZeroDivisionError: boom (AIOKV_DEBUG=1 shows where)\n"


def test_with_debugging_a_stand_in_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOKV_DEBUG", "1")
    with pytest.raises(UsageError, match="not available"):
        command.main(["needs"])


HINT = InstallHint(
    distribution="aiokv",
    extras=("cuda", "demo", "engine"),
    requirements=(
        "torch>=2.5",
        "cuda-python<14,>=12.9; (sys_platform == 'linux') and extra == 'cuda'",
        "gguf==0.19.0; extra == 'demo'",
        "gguf; extra == 'engine'",
        'x-y; extra == "engine"',
    ),
)


@pytest.mark.parametrize(
    ("name", "missing", "expected"),
    [
        ("demo", "gguf", "pip install 'aiokv[demo]' (the package 'gguf' is not installed)"),
        ("engine", "gguf.constants", "pip install 'aiokv[engine]' (the package 'gguf' is not installed)"),
        ("serve", "gguf", "pip install 'aiokv[demo]' (the package 'gguf' is not installed)"),
        ("serve", "x_y", "pip install 'aiokv[engine]' (the package 'x_y' is not installed)"),
        ("serve", "torch", "the package 'torch' is not installed"),
        ("serve", "nothing", "the package 'nothing' is not installed"),
    ],
)
def test_the_extra_that_brings_the_package_is_named(name: str, missing: str, expected: str) -> None:
    assert HINT.remedy(command=name, missing=missing) == expected
