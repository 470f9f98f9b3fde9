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

    __slots__ = ("jobs",)

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        """Read it, never write."""

    def __len__(self) -> int:
        return len(self.jobs)

    def start(self, job: Job) -> None:
        """Run the first slice now; what is left waits its turn."""
        if _advance(job):
            self.jobs.append(job)

    def append(self, job: Job) -> None:
        """Run all of it later."""
        self.jobs.append(job)

    def step(self) -> bool:
        """Run one slice of the oldest job. True while jobs are left."""
        if self.jobs:
            job = self.jobs.popleft()
            if _advance(job):
                self.jobs.appendleft(job)
        return bool(self.jobs)


def _advance(job: Job) -> bool:
    """Run one slice; True if the job goes on."""
    try:
        next(job)
    except StopIteration:
        return False
    return True
