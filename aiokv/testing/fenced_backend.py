"""A fake backend that has compute streams, and an oracle that tells whether law 5 was kept: no device, no driver.

An engine's kernels are `launch`ed with the GPU slots that they read and write; copies come from the runtime. Nothing
runs: `order.violations` names what could overlap on a device though it must not.

    backend = FencedBackend(FakeBackend(manual=False))
    config = RuntimeConfig(..., backend=backend, compute_stream="main")
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import final

from aiokv.backends.base import DeviceEvent, EventStatus
from aiokv.backends.fake import FakeBackend
from aiokv.errors import StreamCaptured, UsageError
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch
from aiokv.testing.passing_backend import PassingBackend
from aiokv.testing.stream_order import Point, SlotUse, StreamOrder

__all__ = ["FencedBackend"]


@final
class FencedBackend(PassingBackend):
    """A `FakeBackend` behind which streams run. Any hashable thing but None is a stream of the engine.

    `deaf_to` are directions whose copies do not wait for fences, to see that the oracle finds it.
    """

    __slots__ = ("_deaf_to", "_passed", "calls", "capturing", "fault", "order", "refused", "waits")

    def __init__(self, fake: FakeBackend, *, deaf_to: Collection[Direction] = ()) -> None:
        super().__init__(fake)
        self.needs_fences = True
        self.order = StreamOrder()
        self.waits: list[tuple[Direction, tuple[Hashable, ...]]] = []
        """Per submitted batch, the engine's streams that it waits for."""
        self.capturing: set[Hashable] = set()
        """Streams that are being captured: add and discard them as you like."""
        self.refused: set[Hashable] = set()
        """Streams that are refused, as those are which the engine has destroyed."""
        self.fault: Exception | None = None
        """What `fence` raises, while there is something."""
        self.calls = 0
        """How often the runtime has called anything of it, questions to events included."""
        self._passed: dict[Hashable, int] = {}
        self._deaf_to = deaf_to

    # The engine's side.

    def launch(self, stream: Hashable, *, reads: Iterable[int] = (), writes: Iterable[int] = ()) -> None:
        """Queue a kernel that uses these GPU slots."""
        self.order.run(stream, f"a kernel on {stream!r}", reads=_on("gpu", reads), writes=_on("gpu", writes))

    def advance(self, stream: Hashable) -> None:
        """All that is queued on a stream of the engine has run."""
        self._passed[stream] = self.order.point(stream).position

    # The `Backend` protocol, as far as streams show in it.

    def submit(self, batch: CopyBatch) -> DeviceEvent:
        """See `Backend`."""
        self.calls += 1
        event = super().submit(batch)
        fences = batch.after if isinstance(batch.after, tuple) else (batch.after,)
        points = [fence for fence in fences if isinstance(fence, Point)]
        self.waits.append((batch.direction, tuple(point.stream for point in points)))
        for point in points if batch.direction not in self._deaf_to else ():
            self.order.wait(batch.direction, point)
        source, target = batch.direction.source_tier, batch.direction.target_tier
        end = self.order.run(
            batch.direction,
            f"a {batch.direction.value}",
            reads=_on(source.value, batch.source_blocks.tolist()),
            writes=_on(target.value, batch.target_blocks.tolist()),
        )
        return _OrderedEvent(event, end=end, backend=self)

    def fence(self, stream: object) -> Point:
        """See `Backend`."""
        self.calls += 1
        if self.fault is not None:
            raise self.fault
        return self.order.point(self._checked(stream))

    def fence_done(self, fence: object) -> bool:
        """See `Backend`. The host learns by it that the stream has come so far."""
        self.calls += 1
        if not isinstance(fence, Point):
            raise UsageError(f"{fence!r} is no fence")
        is_done = self.order.has_seen(fence) or self._passed.get(fence.stream, 0) >= fence.position
        if is_done:
            self.order.see(fence)
        return is_done

    def wait(self, stream: object, fence_or_event: object) -> None:
        """See `Backend`."""
        self.calls += 1
        point = fence_or_event.end if isinstance(fence_or_event, _OrderedEvent) else fence_or_event
        if not isinstance(point, Point):
            raise UsageError(f"{point!r} is neither a fence nor the event of a batch")
        self.order.wait(self._checked(stream), point)

    def block_bytes(self, group: str) -> int:
        """See `Backend`."""
        self.calls += 1
        return super().block_bytes(group)

    def eta_seconds(self, direction: Direction, num_bytes: int) -> float:
        """See `Backend`."""
        self.calls += 1
        return super().eta_seconds(direction, num_bytes)

    def _checked(self, stream: object) -> Hashable:
        if stream is None or not isinstance(stream, Hashable):
            raise UsageError(f"{stream!r} is no stream")
        if stream in self.refused:
            raise UsageError(f"the stream {stream!r} is refused")
        if stream in self.capturing:
            raise StreamCaptured(stream)
        return stream


@final
class _OrderedEvent:
    """The host learns of the end of the copies, and of all that was before, when it asks."""

    __slots__ = ("_backend", "_inner", "end")

    def __init__(self, inner: DeviceEvent, *, end: Point, backend: FencedBackend) -> None:
        self._inner = inner
        self._backend = backend
        self.end = end

    def query(self) -> EventStatus:
        self._backend.calls += 1
        status = self._inner.query()
        if status is not EventStatus.PENDING:
            self._backend.order.see(self.end)
        return status

    def detail(self) -> str:
        return self._inner.detail()

    def corrupt_copies(self) -> Sequence[int]:
        return self._inner.corrupt_copies()


def _on(space: str, slots: Iterable[int]) -> list[SlotUse]:
    return [SlotUse(space, slot) for slot in slots]
