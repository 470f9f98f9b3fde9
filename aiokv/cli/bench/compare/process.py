"""A worker as the driver sees it: a process that is asked one question at a time, and gone whatever happens.

It is a session of its own, so that a Ctrl-C reaches the driver alone, which ends the worker with all that it started.
If the driver is killed, a worker ends with its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import IO, Any, Final, final

from aiokv.errors import AiokvError, ConfigError
from aiokv.model.numbers import is_number

__all__ = ["SlotCosts", "Worker", "WorkerFailed", "started"]

_FAREWELL_S: Final = 5.0


class WorkerFailed(AiokvError):
    """A worker died, hung, or answered what nobody can use."""

    def __init__(self, side: str, *, what: str) -> None:
        self.side = side
        self.what = what
        super().__init__(f"the worker of {side} {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCosts:
    """What a process has grown by per slot of a pool that it has made, and that it has filled."""

    slots: int
    resident: int
    bytes_per_empty_slot: float
    bytes_per_resident_slot: float
    """With its index entry."""


@final
class Worker:
    """One running worker."""

    __slots__ = ("_complaints", "_process", "_timeout_s", "python", "side", "system")

    def __init__(
        self, process: asyncio.subprocess.Process, *, side: str, complaints: IO[bytes], timeout_s: float
    ) -> None:
        self._process = process
        self._complaints = complaints
        self._timeout_s = timeout_s
        self.side = side
        self.system = ""
        """Name and version of what it measures."""
        self.python = ""

    async def greet(self) -> None:
        """Wait until it can be asked."""
        greeting = await self._answer()
        self.system, self.python = str(greeting.get("system")), str(greeting.get("python"))

    async def open(self, case: Mapping[str, object]) -> None:
        """Have it build the world of a case."""
        await self._ask({"open": case})

    async def rounds(self, number: int) -> list[int]:
        """Nanoseconds of so many rounds."""
        times = (await self._ask({"rounds": number})).get("ns")
        if not isinstance(times, list) or len(times) != number or not all(isinstance(time, int) for time in times):
            raise WorkerFailed(self.side, what=f"answered {str(times)[:80]!r}, not {number} times")
        return times

    async def memory(self, slots: int) -> SlotCosts:
        """What a slot of a GPU pool of so many costs. Wants a worker that has measured nothing yet."""
        return self._costs_of((await self._ask({"memory": slots})).get("memory"), slots=slots)

    def _costs_of(self, answered: object, *, slots: int) -> SlotCosts:
        names = [field.name for field in fields(SlotCosts)]
        if not isinstance(answered, dict) or not all(is_number(answered.get(name)) for name in names):
            raise WorkerFailed(self.side, what=f"answered {str(answered)[:80]!r}, not {', '.join(names)}")
        costs = SlotCosts(**{name: answered[name] for name in names})
        if (costs.slots, costs.resident) != (slots, slots):
            raise WorkerFailed(self.side, what=f"has filled {costs.resident} of {costs.slots} slots, not {slots}")
        return costs

    async def _ask(self, question: Mapping[str, object]) -> dict[str, Any]:
        stdin = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(ConnectionError):  # it has died; the missing answer says so
                stdin.write(json.dumps(question).encode() + b"\n")
                await stdin.drain()
        return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        try:
            line = b"" if stdout is None else await asyncio.wait_for(stdout.readline(), self._timeout_s)
        except TimeoutError:
            raise WorkerFailed(self.side, what=f"did not answer within {self._timeout_s:g} s") from None
        except ValueError:  # a line that has no end
            raise WorkerFailed(self.side, what="answered something that is no line of JSON") from None
        if not line:
            raise WorkerFailed(self.side, what=await self._last_words())
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise WorkerFailed(self.side, what=f"answered {line[:80].decode(errors='replace')!r}, which is no object")
        if "error" in answer:
            raise WorkerFailed(self.side, what=f"failed: {answer['error']}")
        return answer

    async def _last_words(self) -> str:
        try:
            status = await asyncio.wait_for(self._process.wait(), self._timeout_s)
        except TimeoutError:
            return "has closed its stdout"
        lines = (await asyncio.to_thread(self._printed)).strip().splitlines()
        return f"ended with status {status}" + (f": {lines[-1]}" if lines else "")

    def _printed(self) -> str:
        """All of its stderr."""
        self._complaints.seek(0)
        return self._complaints.read().decode(errors="replace")


@asynccontextmanager
async def started(
    command: Sequence[str], *, side: str, environment: Mapping[str, str], timeout_s: float
) -> AsyncIterator[Worker]:
    """A worker that can be asked, until the end of the block. `ConfigError` if its interpreter cannot be run."""
    with tempfile.TemporaryFile() as complaints:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=complaints,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"{command[0]!r} cannot be run: {error.strerror}") from None
        except ValueError as error:  # a null byte in the path
            raise ConfigError(f"{command[0]!r} cannot be run: {error}") from None
        try:
            worker = Worker(process, side=side, complaints=complaints, timeout_s=timeout_s)
            await worker.greet()
            yield worker
        finally:
            _kill(process)
            with contextlib.suppress(TimeoutError):  # someone else, in a session of his own, has its stdout
                await asyncio.wait_for(process.communicate(), _FAREWELL_S)


def _kill(process: asyncio.subprocess.Process) -> None:
    """The worker and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
