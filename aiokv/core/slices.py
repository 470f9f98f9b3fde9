"""Work that would hold the loop too long, cut into slices (law 8).

A *job* is a generator that yields after every slice of at most `SLICE_BLOCKS` blocks. The host runs one slice a turn;
a synchronous host runs them until none is left. A job re-checks what it works on after every yield.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Final, final

__all__ = ["SLICE_BLOCKS", "SLICE_PARTS", "Job", "SliceQueue"]

SLICE_BLOCKS: Final = 1024
"""Blocks handled in one slice: about 0.4 ms of the loop's thread."""

SLICE_PARTS: Final = 4
"""Transfers planned or ended in one slice, however small: each takes 0.1 to 0.3 ms before the first block."""

Job = Generator[None, None, None]


@final
class SliceQueue:
    """Jobs that are not finished, oldest first."""

    __slots__ = ("_jobs",)

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def start(self, job: Job) -> None:
        """Run the first slice now; what is left waits its turn."""
        if _advance(job):
            self._jobs.append(job)

    def append(self, job: Job) -> None:
        """Run all of it later."""
        self._jobs.append(job)

    def step(self) -> bool:
        """Run one slice of the oldest job. True while jobs are left."""
        if self._jobs:
            job = self._jobs.popleft()
            if _advance(job):
                self._jobs.appendleft(job)
        return bool(self._jobs)


def _advance(job: Job) -> bool:
    """Run one slice; True if the job goes on."""
    try:
        next(job)
    except StopIteration:
        return False
    return True
