"""A device whose copies end by hand: a `FakeBackend` says when and how, a `CudaBackend` on the fake driver copies.

So whatever was written for the fake backend, turns of the loop counted, runs on the device too. The device stands
still: a copy is made, step by step, when the host asks for the end that the fake backend has declared. Until then it
reads and writes nothing, and whoever believes otherwise is told by the driver's oracles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from aiokv.backends.base import Backend, BackendLayout, DeviceEvent, EventStatus
from aiokv.backends.cuda import CudaBackend
from aiokv.backends.cuda_completion import CudaEvent
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch
from aiokv.testing.passing_backend import PassingBackend
from tests.backends.support import wait_until
from tests.fakecuda import FakeDriver

__all__ = ["MirroredBackend", "MirroredEvent"]


@final
class MirroredBackend(PassingBackend):
    """`inner` decides: a `FakeBackend`, or one around it."""

    def __init__(self, inner: Backend, *, cuda: CudaBackend, fake: FakeDriver) -> None:
        super().__init__(inner)
        self.cuda = cuda
        self.fake = fake
        self.name = cuda.name
        self.needs_fences = True

    def open(self, layout: BackendLayout) -> None:
        """See `Backend`. The CPU arena is settled before it returns; then the streams of copies stand still."""
        super().open(layout)
        self.cuda.open(layout)
        wait_until(lambda: self.cuda.pinning.status.is_settled)
        for direction in Direction:
            self.fake.hold(self.cuda.stream_of(direction))

    def submit(self, batch: CopyBatch) -> MirroredEvent:
        """See `Backend`."""
        decided = super().submit(batch)
        return MirroredEvent(decided, copied=self.cuda.submit(batch), step=self._stepping(batch.direction))

    def fence(self, stream: object) -> object | None:
        """See `Backend`."""
        return self.cuda.fence(stream)

    def fence_done(self, fence: object) -> bool:
        """See `Backend`."""
        return self.cuda.fence_done(fence)

    def wait(self, stream: object, fence_or_event: object) -> None:
        """See `Backend`."""
        self.cuda.wait(stream, fence_or_event.copied if isinstance(fence_or_event, MirroredEvent) else fence_or_event)

    def close(self, *, deadline_s: float) -> bool:
        """See `Backend`. What the fake backend has ended, and nobody asked for any more, is copied first."""
        is_clean = super().close(deadline_s=deadline_s)
        if is_clean:
            for direction in Direction:
                self.fake.release(self.cuda.stream_of(direction))
        return self.cuda.close(deadline_s=deadline_s) and is_clean

    def _stepping(self, direction: Direction) -> Callable[[], object]:
        stream = self.cuda.stream_of(direction)
        return lambda: self.fake.step(stream)


@final
class MirroredEvent:
    """Ends as decided, once the copy has been made."""

    def __init__(self, decided: DeviceEvent, *, copied: CudaEvent, step: Callable[[], object]) -> None:
        self._decided = decided
        self._step = step
        self.copied = copied

    def query(self) -> EventStatus:
        status = self._decided.query()
        if status in (EventStatus.PENDING, EventStatus.LOST):
            return status
        while (copied := self.copied.query()) is EventStatus.PENDING:
            self._step()
        return status if copied is EventStatus.DONE else copied

    def detail(self) -> str:
        return self._decided.detail() or self.copied.detail()

    def corrupt_copies(self) -> Sequence[int]:
        return self._decided.corrupt_copies()
