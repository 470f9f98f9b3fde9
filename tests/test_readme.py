"""The README says only what is so: its example runs as written, its map is short and names what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_README = (_ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", _README, flags=re.DOTALL)


def test_embedding_example_runs_as_written_and_prints_what_it_says() -> None:
    example = _blocks("python")[0]
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], capture_output=True, text=True, timeout=55, check=False
    )
    assert ran.returncode == 0, ran.stderr
    promised = _blocks("text")[0]
    assert ran.stdout == promised


def test_the_example_of_an_async_frontend_is_the_one_that_is_tested() -> None:
    tested = (_ROOT / "tests" / "asgi" / "example_app.py").read_text(encoding="utf-8")
    assert [tested.partition("\n\n")[2]] == _blocks("python")[1:]


def test_both_commands_stand_in_one_line_each() -> None:
    assert [block.strip() for block in _blocks("sh")] == [
        "pip install -e '.[demo]' && aiokv demo",
        "pip install -e '.[test]' && pytest",
    ]


def test_map_has_at_most_sixty_lines_and_names_what_exists() -> None:
    section = _README.split("## Map")[1].split("## Changelog")[0]
    assert len(section.strip().splitlines()) <= 60
    folder = ""
    named = []
    for line in _blocks("text")[1].splitlines():
        if not line.startswith(" "):
            folder = line.split()[0]
            named.append(folder)
            folder = folder if folder.endswith("/") else ""
        else:
            named += [folder + name for name in re.findall(r"[a-z_]+\.py", line)]
    missing = [name for name in named if not (_ROOT / name).exists()]
    assert not missing


def test_each_alert_has_its_line() -> None:
    rules = (_ROOT / "dashboards" / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    told = re.findall(r"^- `(Aiokv\w+)`: \S", _README, flags=re.MULTILINE)
    assert sorted(told) == sorted(re.findall(r"alert: (\w+)", rules))
