"""The peer, in an interpreter of its own: it is told what to serve, and waits while the other side is served.

It is a session of its own, so that a Ctrl-C reaches the driver alone, which ends it with all that it has started. Its
script lies with the tests of a checkout. Each line is one JSON object; what vLLM logs goes to a file, of which the
end is shown if the peer dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
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
_LOG_LINES: Final = 3
_SHOWN: Final = 80
_QUIET: Final = {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What serving one slice took, and where each prompt's tokens came from: (GPU tokens, CPU tokens)."""

    seconds: float
    cpu_seconds: float
    hits: Sequence[tuple[int, int]]


@final
class Peer:
    """A running peer; `start` it, `close` it. Of its answers `ConfigError` says what is wrong, or that none came."""

    __slots__ = ("_log", "_process", "_timeout_s", "name")

    def __init__(self, process: asyncio.subprocess.Process, *, log: IO[bytes], timeout_s: float) -> None:
        self._process = process
        self._log = log
        self._timeout_s = timeout_s
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
                start_new_session=True,
            )
        except OSError as error:
            log.close()
            raise ConfigError(f"cannot start the peer's interpreter {python}: {error.strerror}") from error
        peer = cls(process, log=log, timeout_s=settings.timeout_s)
        try:
            await peer._greet(settings)
        except BaseException:
            await peer.close()
            raise
        return peer

    async def _greet(self, settings: ReplaySettings) -> None:
        answer = await self._ask(
            {
                "block_size": settings.block_size,
                "gpu_blocks": settings.gpu_blocks,
                "cpu_blocks": settings.cpu_blocks,
                "watermark": WATERMARK,
            }
        )
        if not isinstance(answer.get("peer"), str):
            raise ConfigError(f"the peer does not say what it is, but {str(answer)[:_SHOWN]}")
        self.name = answer["peer"]

    async def play(self, arrivals: Sequence[Arrival], *, last: bool) -> Served:
        """Serve a slice; after the `last` one every request ends."""
        described = [{"index": a.index, "ends": a.ends, **asdict(a.request)} for a in arrivals]
        answer = await self._ask({"arrivals": described, "last": last})
        try:
            hits = [(int(gpu), int(cpu)) for gpu, cpu in answer["hits"]]
            served = Served(seconds=float(answer["seconds"]), cpu_seconds=float(answer["cpu_seconds"]), hits=hits)
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"the peer's answer cannot be used: {str(answer)[:_SHOWN]}") from None
        if len(hits) != len(arrivals):
            raise ConfigError(f"the peer has served {len(hits)} requests, not {len(arrivals)}")
        return served

    async def close(self) -> None:
        """End it and all that it has started: what it was asked for has been read."""
        try:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        finally:
            self._log.close()

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            line = await asyncio.wait_for(self._exchange(message), self._timeout_s)
        except TimeoutError:
            said = self._last_words()
            raise ConfigError(f"the peer gave no answer within {self._timeout_s:g} s; it said last: {said}") from None
        except ValueError:
            raise ConfigError("the peer gave an answer that has no end") from None
        if not line:
            raise ConfigError(f"the peer gave no answer; it said last: {self._last_words()}")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ConfigError(f"the peer gave no answer, but {line[:_SHOWN]!r}; it said last: {self._last_words()}")
        return answer

    async def _exchange(self, message: dict[str, Any]) -> bytes:
        """The next line of its stdout; empty if it has ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            return b""
        with contextlib.suppress(ConnectionError, RuntimeError):  # it has gone, which the missing answer says
            stdin.write(json.dumps(message).encode() + b"\n")
            await stdin.drain()
        return await stdout.readline()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return " / ".join([line.strip() for line in lines if line.strip()][-_LOG_LINES:]) or "nothing"


def _environment() -> dict[str, str]:
    """Ours, without what would lead the other interpreter to our packages."""
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
