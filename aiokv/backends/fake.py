"""A backend without memory, clock or thread, for tests: copies end when the test says so.

It is strict where a real device is silent: a slot that does not exist, a repeated slot, the null block as a load's
target, and a slot reused while a copy that touches it still runs are all `UsageError` at `submit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from aiokv.backends.base import BackendLayout, EventStatus, WakeMode
from aiokv.backends.no_streams import NoStreams
from aiokv.backends.pinning import NOTHING_TO_PIN
from aiokv.errors import BackendLost, UsageError
from aiokv.model.ids import NULL_SLOT, BoolArray, Direction, IntArray, SlotArray, Tier
from aiokv.model.plan import CopyBatch

__all__ = ["CopyDirection", "FakeBackend", "FakeCopy"]

CopyDirection = Literal["load", "store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeCopy:
    """One submitted batch, as a test reads it: `source_blocks[i]` goes to `target_blocks[i]`."""

    direction: CopyDirection
    group: str
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]

    def __len__(self) -> int:
        """Blocks copied."""
        return len(self.source_blocks)


@final
class _FakeEvent:
    """The device event of one copy; the backend alone moves it, once."""

    __slots__ = ("_corrupt", "_detail", "_status")

    def __init__(self) -> None:
        self._status = EventStatus.PENDING
        self._detail = ""
        self._corrupt: tuple[int, ...] = ()

    def query(self) -> EventStatus:
        return self._status

    def detail(self) -> str:
        return self._detail

    def corrupt_copies(self) -> tuple[int, ...]:
        return self._corrupt

    def end(self, status: EventStatus, *, detail: str, corrupt: tuple[int, ...] = ()) -> None:
        self._status = status
        self._detail = detail
        self._corrupt = corrupt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Running:
    """An accepted batch; it is made readable only when a test reads it, as that takes longer than to submit it."""

    batch: CopyBatch
    event: _FakeEvent = field(default_factory=_FakeEvent)

    def copy(self) -> FakeCopy:
        return FakeCopy(
            direction=self.batch.direction.value,
            group=self.batch.group,
            source_blocks=tuple(self.batch.source_blocks.tolist()),
            target_blocks=tuple(self.batch.target_blocks.tolist()),
        )


@final
class _Traffic:
    """Which slots of one tier running copies read and write."""

    __slots__ = ("_readers", "_stamps", "_written")

    def __init__(self, blocks: int) -> None:
        self._stamps: NDArray[np.int32] = np.zeros(blocks, dtype=np.int32)
        self._readers: IntArray = np.zeros(blocks, dtype=np.int64)
        self._written: BoolArray = np.zeros(blocks, dtype=np.bool_)

    def check(self, slots: SlotArray, *, what: str) -> None:
        """`UsageError` unless `slots` are distinct places of this pool."""
        if len(slots) and not (0 <= int(slots.min()) and int(slots.max()) < len(self._written)):
            raise UsageError(f"{what} has {len(self._written)} blocks, but {_some(slots)} were named")
        order = np.arange(len(slots), dtype=np.int32)
        self._stamps[slots] = order  # of a slot named twice only the last stamp is left
        if np.count_nonzero(self._stamps[slots] != order):
            raise UsageError(f"the same {what} block is named twice in one copy: {_some(slots)}")

    def check_readable(self, slots: SlotArray, *, what: str) -> None:
        if (busy := slots[self._written[slots]]).size:
            raise UsageError(f"{what} blocks {_some(busy)} are read while another copy still writes them")

    def check_writable(self, slots: SlotArray, *, what: str) -> None:
        if (busy := slots[self._written[slots] | (self._readers[slots] > 0)]).size:
            raise UsageError(f"{what} blocks {_some(busy)} are written while another copy still uses them")

    def begin(self, *, reads: SlotArray | None = None, writes: SlotArray | None = None) -> None:
        if reads is not None:
            self._readers[reads] += 1
        if writes is not None:
            self._written[writes] = True

    def end(self, *, reads: SlotArray | None = None, writes: SlotArray | None = None) -> None:
        if reads is not None:
            self._readers[reads] -= 1
        if writes is not None:
            self._written[writes] = False


@final
class FakeBackend(NoStreams):
    """`manual=True`: every copy waits for `complete` or `fail`. `manual=False`: it is done at the loop's next turn.

    All methods belong to the loop's thread. `n` counts copies, not blocks, oldest first over both directions; an `n`
    larger than what is pending means all of them. `block_bytes` is what every group's block is said to weigh.
    """

    __slots__ = (
        "_block_bytes",
        "_closed",
        "_history",
        "_layout",
        "_lost",
        "_manual",
        "_next_error",
        "_ring",
        "_running",
        "_traffic",
    )

    name = "fake"
    wake_mode = WakeMode.DOORBELL
    pinning = NOTHING_TO_PIN

    def __init__(self, *, manual: bool = True, block_bytes: int = 0) -> None:
        """Nothing is allocated before `open`."""
        self._manual = manual
        self._block_bytes = block_bytes
        self._layout: BackendLayout | None = None
        self._ring: Callable[[], None] = _ring_nothing
        self._running: list[_Running] = []
        self._history: list[_Running] = []
        self._traffic: dict[Tier, _Traffic] = {}
        self._next_error: Exception | None = None
        self._lost = ""
        self._closed = False

    # What a test reads.

    @property
    def pending(self) -> tuple[FakeCopy, ...]:
        """Submitted and unfinished copies, oldest first."""
        return tuple(run.copy() for run in self._running)

    @property
    def history(self) -> tuple[FakeCopy, ...]:
        """Every copy ever accepted by `submit`, oldest first."""
        return tuple(run.copy() for run in self._history)

    @property
    def layout(self) -> BackendLayout | None:
        """What `open` was given; `None` before."""
        return self._layout

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    # What a test does.

    def complete(self, n: int = 1, *, direction: CopyDirection | None = None) -> None:
        """End the `n` oldest copies (of one direction if given) well, and ring the doorbell once."""
        self._end(n, direction=direction, status=EventStatus.DONE, detail="")

    def complete_all(self) -> None:
        """End every pending copy well, and ring the doorbell once."""
        self.complete(len(self._running))

    def fail(self, n: int = 1, *, direction: CopyDirection | None = None) -> None:
        """End the `n` oldest copies (of one direction if given) with an error, and ring the doorbell once."""
        self._end(n, direction=direction, status=EventStatus.FAILED, detail="the test failed this copy")

    def corrupt(self, n: int = 1, *, copies: Sequence[int] = (0,)) -> None:
        """End the `n` oldest loads by finding the CPU blocks of these `copies` (places in the load) corrupt; ring once.

        `UsageError`, and nothing has ended, if one of the loads has no such copy, or if `copies` is empty.
        """
        loads = [run for run in self._running if run.batch.direction is Direction.LOAD][: max(n, 0)]
        if not copies or any(not 0 <= copy < len(run.batch) for run in loads for copy in copies):
            raise UsageError(f"copies must name at least one place that each of the loads has, not {tuple(copies)}")
        self._end(
            n,
            direction="load",
            status=EventStatus.CORRUPT,
            detail="the test found blocks changed",
            corrupt=tuple(copies),
        )

    def fail_next_submit(self, error: Exception) -> None:
        """The next `submit` raises `error` and starts nothing."""
        self._next_error = error

    def lose(self, detail: str = "the test lost the backend") -> None:
        """Every pending copy is LOST, and every later `submit` raises `BackendLost`."""
        self._lost = detail
        self._end(len(self._running), direction=None, status=EventStatus.LOST, detail=detail)

    # The `Backend` protocol.

    def open(self, layout: BackendLayout) -> None:
        """Record the layout; its arenas are not touched and may be empty."""
        self._layout = layout
        self._traffic = {Tier.GPU: _Traffic(layout.gpu_blocks), Tier.CPU: _Traffic(layout.cpu_blocks)}

    def attach_doorbell(self, ring: Callable[[], None]) -> None:
        """`ring` is called once at the end of each method above that ended a copy."""
        self._ring = ring

    def submit(self, batch: CopyBatch) -> _FakeEvent:
        """See `Backend`. With `manual=False` the doorbell rings in here, before the caller has the event."""
        self._refuse(batch)
        run = _Running(batch=_own(batch))
        self._history.append(run)
        if not self._manual:  # it never runs beside another one, so nobody can be in its way
            run.event.end(EventStatus.DONE, detail="")
            self._ring()
            return run.event
        self._running.append(run)
        self._traffic[batch.direction.source_tier].begin(reads=batch.source_blocks)
        self._traffic[batch.direction.target_tier].begin(writes=batch.target_blocks)
        return run.event

    def block_bytes(self, group: str) -> int:
        """What the constructor was given, for every group."""
        return self._block_bytes

    def eta_seconds(self, direction: Direction, num_bytes: int) -> float:
        """Always 0.0: there is no clock."""
        return 0.0

    def close(self, *, deadline_s: float) -> bool:
        """False if copies are pending: they count as stuck at once, and may still be completed by the test."""
        self._closed = True
        return not self._running

    # Helpers.

    def _refuse(self, batch: CopyBatch) -> None:
        if self._layout is None or self._closed:
            raise UsageError("submit on a fake backend that is closed" if self._closed else "submit before open")
        if self._lost:
            raise BackendLost(self.name, detail=self._lost)
        if (error := self._next_error) is not None:
            self._next_error = None
            raise error
        self._layout.geometry.group_index(batch.group)
        source, target = batch.direction.source_tier, batch.direction.target_tier
        self._traffic[source].check(batch.source_blocks, what=source.value)
        self._traffic[target].check(batch.target_blocks, what=target.value)
        if self._running:
            self._traffic[source].check_readable(batch.source_blocks, what=source.value)
            self._traffic[target].check_writable(batch.target_blocks, what=target.value)
        if batch.direction is Direction.LOAD and NULL_SLOT in batch.target_blocks:
            raise UsageError("a load writes the null block")

    def _end(
        self,
        n: int,
        *,
        direction: CopyDirection | None,
        status: EventStatus,
        detail: str,
        corrupt: tuple[int, ...] = (),
    ) -> None:
        if n < 0:
            raise UsageError(f"n must not be negative, it is {n}")
        if direction is None:
            ended, self._running = self._running[:n], self._running[n:]
        else:
            ended = [run for run in self._running if run.batch.direction.value == direction][:n]
            self._running = [run for run in self._running if run not in ended]
        if not ended:
            return
        for run in ended:
            self._traffic[run.batch.direction.source_tier].end(reads=run.batch.source_blocks)
            self._traffic[run.batch.direction.target_tier].end(writes=run.batch.target_blocks)
            run.event.end(status, detail=detail, corrupt=corrupt)
        self._ring()


def _ring_nothing() -> None:
    """Stands for the doorbell until the bridge attaches its own."""


def _own(batch: CopyBatch) -> CopyBatch:
    """The same, whatever becomes of the arrays that were submitted."""
    return CopyBatch(
        direction=batch.direction,
        group=batch.group,
        source_blocks=batch.source_blocks.copy(),
        target_blocks=batch.target_blocks.copy(),
        after=batch.after,
    )


def _some(slots: SlotArray) -> str:
    shown = ", ".join(map(str, slots[:5].tolist()))
    return f"{shown}, ..." if len(slots) > 5 else shown
