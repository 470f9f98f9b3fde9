"""The picture of the dashboard: small, as wide as it is drawn, by the same Grafana as the types."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Final

from dashboards.picture.draw import WIDTH
from tests.dashboards.queries import FOLDER

PICTURE: Final = FOLDER / "dashboard.png"
PROJECTS: Final = (FOLDER / "picture", Path(__file__).parent / "typecheck")


def packages(folder: Path, *, name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return read


def test_the_picture_is_a_small_png() -> None:
    content = PICTURE.read_bytes()
    (width,) = struct.unpack(">I", content[16:20])
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(content) < 300_000
    assert width == WIDTH


def test_both_projects_pin_every_package_and_lock_it() -> None:
    for folder in PROJECTS:
        wanted = packages(folder, name="package.json")["devDependencies"]
        locked = packages(folder, name="package-lock.json")["packages"]
        assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted


def test_picture_and_types_are_of_one_grafana() -> None:
    versions = {packages(folder, name="package.json")["devDependencies"]["@grafana/schema"] for folder in PROJECTS}
    assert len(versions) == 1


def test_no_lock_names_where_packages_were_fetched() -> None:
    """They come from whatever registry a machine is set up with."""
    for folder in PROJECTS:
        assert '"resolved"' not in (folder / "package-lock.json").read_text(encoding="utf-8")
