"""Processes that a test starts: whatever happens to the test, none is left behind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

__all__ = ["first_line", "started"]


@contextmanager
def started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Runs `command`, with pipes; ends it by force if the block raises, else waits for its end."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
            process.communicate(timeout=40)
        except BaseException:
            process.kill()
            raise


def first_line(process: subprocess.Popen[str]) -> str:
    """What it says when it is ready."""
    output: IO[str] | None = process.stdout
    line = output.readline() if output else ""
    assert line, "it ended without a word"
    return line.strip()
