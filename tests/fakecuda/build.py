"""Builds the fake driver once per version of its sources, with whatever C compiler there is."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "driver"
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
NAME = "libcuda.so.1"
BUILD_LIMIT_S = 120


class NoCompiler(Exception):
    """There is no C compiler here: the text says what was looked for."""


def find_compiler() -> list[str]:
    """The command of a C compiler: `$CC`, the usual names, or the one that the wheel `ziglang` brings."""
    named = os.environ.get("CC")
    if named:
        return shlex.split(named)
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise NoCompiler("no C compiler: neither $CC, cc, gcc, clang nor the Python package ziglang is here")


def build_fake_driver() -> Path:
    """The path of a `libcuda.so.1` made from the sources as they are; builds it unless that was done before."""
    compiler = find_compiler()
    folder = _cache_folder() / _digest(compiler)
    library = folder / NAME
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(compiler, library)
    return library


def _cache_folder() -> Path:
    configured = os.environ.get("AIOKV_CACHE_DIR")
    return (Path(configured) if configured else Path.home() / ".cache" / "aiokv") / "fakecuda"


def _digest(compiler: list[str]) -> str:
    digest = hashlib.sha256(repr((compiler, FLAGS, sys.platform)).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: list[str], library: Path) -> None:
    """Into a folder of its own first: another process may build the same at the same time."""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / NAME
        files = [str(path) for path in sorted(SOURCES.glob("*.c"))]
        command = [*compiler, *FLAGS, f"-Wl,-soname,{NAME}", "-o", str(made), *files]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_LIMIT_S)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")
        made.replace(library)
