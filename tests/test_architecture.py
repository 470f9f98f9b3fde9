"""The layers and habits that no other tool checks, read from the syntax trees of the sources.

import-linter checks the order of the packages; this file checks what a module may contain.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = sorted((ROOT / "aiokv").rglob("*.py"))
INTEGRATIONS = sorted((ROOT / "integrations").rglob("*.py"))
BENCHMARKS = sorted((ROOT / "aiokv/cli/bench").rglob("*.py"))
DASHBOARDS = sorted(path for path in (ROOT / "dashboards").rglob("*.py") if "node_modules" not in path.parts)
SOURCES = [*LIBRARY, *INTEGRATIONS, *DASHBOARDS]
TESTS = sorted((ROOT / "tests").rglob("*.py"))

TOP_LEVEL = {"pyproject.toml", "aiokv", "integrations", "tests", "dashboards", "README.md", "LICENSE"}
BUILD_PRODUCTS = {"build", "dist", "venv", "__pycache__"}  # ignored by git
NEED_HYPOTHESIS = {
    ROOT / "aiokv/testing" / f"{name}.py"
    for name in ("hint_machine", "machine", "run", "scheduler_machine", "strategies", "tier_machine", "wait_machine")
}
NOT_IN_CORE = {"asyncio", "anyio", "uvloop", "threading", "time", "logging", "torch", "cuda", "prometheus_client"}
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 40


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def below(*packages: str) -> list[Path]:
    return [path for path in LIBRARY if path.relative_to(ROOT / "aiokv").parts[0] in packages]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def places(path: Path, wanted: Callable[[ast.AST], bool]) -> list[str]:
    return [f"{name_of(path)}:{getattr(node, 'lineno', 0)}" for node in ast.walk(parse(path)) if wanted(node)]


def imported_modules(path: Path) -> Iterator[str]:
    """Every module named by an import statement, inside functions and `TYPE_CHECKING` too, or by `import_module`."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__"):
            yield from (str(argument.value) for argument in node.args if isinstance(argument, ast.Constant))


def called_name(call: ast.Call) -> str:
    return dotted_name(call.func).rpartition(".")[2]


def dotted_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def comments(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def function_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of signature and body; docstrings, its own and those of attributes, are free."""
    return lines_of(function) - sum(lines_of(statement) for statement in function.body if is_docstring(statement))


def is_docstring(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def lines_of(statement: ast.stmt) -> int:
    return (statement.end_lineno or statement.lineno) - statement.lineno + 1


@pytest.mark.parametrize("path", [*below("core", "model"), ROOT / "aiokv/errors.py"], ids=name_of)
def test_core_and_model_know_no_loop_clock_thread_log_or_device(path: Path) -> None:
    roots = {module.partition(".")[0] for module in imported_modules(path)}
    assert not roots & NOT_IN_CORE


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_the_library_imports_no_integration_and_no_test(path: Path) -> None:
    integrations = {directory.name for directory in (ROOT / "integrations").iterdir() if directory.is_dir()}
    roots = {module.partition(".")[0] for module in imported_modules(path)}
    optional = set() if path in NEED_HYPOTHESIS else {"hypothesis"}
    assert not roots & (integrations | {"tests", "integrations", "pytest"} | optional)


@pytest.mark.parametrize("path", below("core", "model", "backends", "observe"), ids=name_of)
def test_only_the_runtime_is_asynchronous(path: Path) -> None:
    asynchronous = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    assert not places(path, lambda node: isinstance(node, asynchronous))


@pytest.mark.parametrize("path", below("core", "model", "observe", "cli"), ids=name_of)
def test_only_runtime_and_backends_write_logs(path: Path) -> None:
    assert "logging" not in imported_modules(path)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_has_a_docstring_and_at_most_350_lines(path: Path) -> None:
    assert ast.get_docstring(parse(path)), "no module docstring"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_function_is_longer_than_40_lines(path: Path) -> None:
    functions = [node for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert not {
        function.name: lines for function in functions if (lines := function_lines(function)) > MAX_FUNCTION_LINES
    }


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=name_of)
def test_no_comment_puts_work_off(path: Path) -> None:
    assert not [line for line, text in comments(path) if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)]


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=name_of)
def test_a_type_ignore_names_its_code_and_its_reason(path: Path) -> None:
    ignores = [(line, text) for line, text in comments(path) if re.match(r"#\s*type:\s*ignore", text)]
    assert not [line for line, text in ignores if not re.match(r"# type: ignore\[[\w, -]+\]  # \w+", text)]
    assert not (ignores and path in below("core")), "core has no type: ignore at all"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_assert_is_for_tests(path: Path) -> None:
    assert not places(path, lambda node: isinstance(node, ast.Assert))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_source_uses_what_has_cost_others_their_data(path: Path) -> None:
    """`shield` frees too early, `sleep` hides a missing event, `hash()` is seeded per process, pickle runs code."""
    forbidden = {"asyncio.shield", "hash", "pickle.load", "pickle.loads", "torch.load", "eval", "exec"}
    forbidden |= {"time.sleep"} if path in LIBRARY else set()
    calls = [node for node in ast.walk(parse(path)) if isinstance(node, ast.Call)]
    assert not [
        f"{dotted_name(call.func)} in line {call.lineno}" for call in calls if dotted_name(call.func) in forbidden
    ]


@pytest.mark.parametrize("path", [p for p in LIBRARY if p not in BENCHMARKS], ids=name_of)
def test_the_library_leaves_the_garbage_collector_alone(path: Path) -> None:
    """It is the host's. A benchmark is a host."""
    assert "gc" not in imported_modules(path)


def test_the_top_level_holds_only_what_was_agreed() -> None:
    names = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert names - BUILD_PRODUCTS <= TOP_LEVEL


IMPORT_EVERYTHING = """
import json, logging, os, pkgutil, sys, threading, warnings
environment, handlers, filters = dict(os.environ), list(logging.root.handlers), list(warnings.filters)
import aiokv
after_root = sorted(name for name in ("torch", "cuda", "asyncio", "prometheus_client") if name in sys.modules)
for module in pkgutil.walk_packages(aiokv.__path__, "aiokv."):
    __import__(module.name)
print(json.dumps({
    "after_root": after_root,
    "cuda": sorted(name for name in sys.modules if name.partition(".")[0] == "cuda"),
    "threads": threading.active_count(),
    "environment_changed": environment != dict(os.environ),
    "handlers_changed": handlers != logging.root.handlers,
    "engine": sorted(name for name in sys.modules if name.partition(".")[0].startswith("aiokv_")),
}))
"""


def test_nothing_happens_at_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not {"torch", "cuda"} & set(found["after_root"]), "`import aiokv` must stay light"
    assert found["cuda"] == []
    assert found["threads"] == 1
    assert not found["environment_changed"]
    assert not found["handlers_changed"]
    assert found["engine"] == []
