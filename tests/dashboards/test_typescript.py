"""Grafana's own types accept the dashboard, and do not accept a broken one.

There is no other schema of Grafana that works without a server: `@grafana/schema` from npm, pinned in `typecheck/`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from dashboards.generate import FILE

PROJECT: Final = Path(__file__).parent / "typecheck"
HEADER: Final = """
import type { Dashboard } from "@grafana/schema";
// JSON has the words of an enum, never the enum itself.
type Json<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Json<T[K]> } : T;
export const board: Json<Dashboard> = """
OF_INTERVALS: Final = ("auto", "auto_min", "auto_count")
"""What the builders write into variables of every kind, and Grafana's types do not know: it reads them for one kind."""


@pytest.fixture(scope="module")
def compiler() -> Path:
    """The installed compiler; skips without. `npm ci` in `typecheck/` installs it."""
    compiler = PROJECT / "node_modules/.bin/tsc"
    if shutil.which("node") is None or not compiler.exists():
        pytest.skip(f"no TypeScript: install Node.js and run `npm ci --ignore-scripts` in {PROJECT}")
    return compiler


def without_nulls(value: Any) -> Any:  # noqa: ANN401  # any JSON
    """The builders write `null` where Grafana's types want nothing; Grafana reads both alike."""
    match value:
        case dict():
            return {key: without_nulls(one) for key, one in value.items() if one is not None}
        case list():
            return [without_nulls(one) for one in value]
        case _:
            return value


def read_board() -> dict[str, Any]:
    board: dict[str, Any] = without_nulls(json.loads(FILE.read_text(encoding="utf-8")))
    for variable in board["templating"]["list"]:
        for name in OF_INTERVALS:
            variable.pop(name, None)
    return board


BREAK: dict[str, Callable[[dict[str, Any]], object]] = {
    "a number as the refresh": lambda board: board.update(refresh=10),
    "a word as a width": lambda board: board["panels"][1]["gridPos"].update(w="wide"),
    "a number as a panel's type": lambda board: board["panels"][1].update(type=5),
    "a field that nobody knows": lambda board: board.update(colour="red"),
    "a colour scheme that does not exist": lambda board: board["panels"][1]["fieldConfig"]["defaults"].update(
        color={"mode": "pretty"}
    ),
}


@pytest.fixture(scope="module")
def complaints(compiler: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the compiler says about the dashboard ("as it is") and about broken copies, all read in one run.

    Each is a literal: then the compiler knows every field by name.
    """
    folder = tmp_path_factory.mktemp("typecheck")
    shutil.copy(PROJECT / "tsconfig.json", folder)
    (folder / "node_modules").symlink_to(PROJECT / "node_modules")
    boards = {"as it is": read_board()} | {fault: read_board() for fault in BREAK}
    for fault, break_it in BREAK.items():
        break_it(boards[fault])
    files = {name: folder / f"board{place}.ts" for place, name in enumerate(boards)}
    for name, file in files.items():
        file.write_text(HEADER + json.dumps(boards[name], indent=1))
    command: list[str | Path] = [compiler, "--pretty", "false", "--project", folder / "tsconfig.json"]
    checked = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=55, check=False)
    lines = checked.stdout.splitlines()
    assert lines, "the broken ones pass"
    assert all(line.startswith(("board", " ")) for line in lines), checked.stdout
    return {name: "\n".join(line for line in lines if line.startswith(file.name)) for name, file in files.items()}


def test_the_dashboard_has_the_fields_and_types_that_grafana_wants(complaints: dict[str, str]) -> None:
    assert not complaints["as it is"]


@pytest.mark.parametrize("fault", BREAK)
def test_the_same_check_finds(complaints: dict[str, str], fault: str) -> None:
    assert "error TS" in complaints[fault]
