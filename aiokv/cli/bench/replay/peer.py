"""The peer, in an interpreter of its own: it is told what to serve, and waits while the other side is served.

Its script lies with the tests of a checkout. Each line is one JSON object; what vLLM logs goes to a file, of which the
end is shown if the peer dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final, Self, final

import aiokv
from aiokv.cli.bench.replay.schedule import Arrival
from aiokv.cli.bench.replay.settings import WATERMARK, ReplaySettings
from aiokv.errors import ConfigError

__all__ = ["Peer", "Served"]

_SCRIPT: Final = Path(aiokv.__file__).parent.parent / "tests/bench/peer_replay.py"
_LINE_LIMIT: Final = 2**26
_GRACE_S: Final = 5.0
_LOG_LINES: Final = 3
_QUIET: Final = {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What serving one slice took, and where each prompt's tokens came from: (GPU tokens, CPU tokens)."""

    seconds: float
    cpu_seconds: float
    hits: Sequence[tuple[int, int]]


@final
class Peer:
    """A running peer; `start` it, `close` it."""

    __slots__ = ("_log", "_process", "name")

    def __init__(self, process: asyncio.subprocess.Process, *, log: IO[bytes]) -> None:
        self._process = process
        self._log = log
        self.name = ""
        """What it says that it is."""

    @classmethod
    async def start(cls, python: Path, *, settings: ReplaySettings) -> Self:
        """Start it with the same pools; `ConfigError` if this interpreter cannot run it."""
        if not _SCRIPT.is_file():
            raise ConfigError(f"the peer's script is part of a checkout of aiokv and not here: {_SCRIPT}")
        log = tempfile.TemporaryFile()  # closed by `close`
        try:
            process = await asyncio.create_subprocess_exec(
                str(python),
                str(_SCRIPT),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**_environment(), **_QUIET},
                limit=_LINE_LIMIT,
            )
        except OSError as error:
            log.close()
            raise ConfigError(f"cannot start the peer's interpreter {python}: {error}") from error
        peer = cls(process, log=log)
        try:
            answer = await peer._ask(
                {
                    "block_size": settings.block_size,
                    "gpu_blocks": settings.gpu_blocks,
                    "cpu_blocks": settings.cpu_blocks,
                    "watermark": WATERMARK,
                }
            )
        except BaseException:
            await peer.close()
            raise
        peer.name = str(answer["peer"])
        return peer

    async def play(self, arrivals: Sequence[Arrival], *, last: bool) -> Served:
        """Serve a slice; after the `last` one every request ends."""
        described = [{"index": a.index, "ends": a.ends, **asdict(a.request)} for a in arrivals]
        answer = await self._ask({"arrivals": described, "last": last})
        hits = [(gpu, cpu) for gpu, cpu in answer["hits"]]
        return Served(seconds=answer["seconds"], cpu_seconds=answer["cpu_seconds"], hits=hits)

    async def close(self) -> None:
        """End it: it leaves when its input does, and is killed if it does not."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
            async with asyncio.timeout(_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        finally:
            self._log.close()

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise ConfigError("the peer has no pipes")
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            await stdin.drain()
            line = await stdout.readline()
            answer = json.loads(line)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(f"the peer gave no answer; it said last: {self._last_words()}") from error
        if not isinstance(answer, dict):
            raise ConfigError(f"the peer gave no answer, but {line!r}")
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return " / ".join([line.strip() for line in lines if line.strip()][-_LOG_LINES:]) or "nothing"


def _environment() -> dict[str, str]:
    """Ours, without what would lead the other interpreter to our packages."""
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
