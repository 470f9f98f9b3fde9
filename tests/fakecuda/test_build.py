"""The driver is built once per version of its sources, and says so where it cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakecuda import FakeDriver, build_fake_driver
from tests.fakecuda.build import SOURCES

WITHOUT_A_COMPILER = """
import importlib.util
importlib.util.find_spec = lambda name: None
from tests.fakecuda.build import NoCompiler, build_fake_driver
try:
    build_fake_driver()
except NoCompiler as reason:
    print(reason)
"""


def test_it_is_built_once(fake_driver: FakeDriver) -> None:
    library = build_fake_driver()
    before = library.stat()
    assert build_fake_driver() == library
    assert library.name == "libcuda.so.1"
    assert library.stat().st_mtime_ns == before.st_mtime_ns


def test_another_folder_gets_a_build_of_its_own(
    fake_driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOKV_CACHE_DIR", str(tmp_path))
    library = build_fake_driver()
    assert tmp_path in library.parents
    assert [path.name for path in library.parent.iterdir()] == ["libcuda.so.1"], "nothing of the build stays behind"


def test_without_a_compiler_it_says_what_it_looked_for(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": str(SOURCES.parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_COMPILER],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=30,
    )
    assert "no C compiler" in done.stdout, done.stderr


def test_the_files_stay_readable() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in SOURCES.glob("*.[ch]")}
    assert lengths
    assert not {name: length for name, length in lengths.items() if length > 350}
    assert not [path.name for path in SOURCES.glob("*.[ch]") if max(map(len, path.read_text().splitlines())) > 120]
