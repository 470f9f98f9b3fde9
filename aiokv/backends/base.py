"""The contract between the runtime and whatever moves bytes.

A backend owns streams. Copies handed to `submit` for one stream end in order; each answers with a *device event*, which
the bridge polls, head of the stream only. A backend never calls into the runtime except to ring the doorbell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol

from aiokv.model.ids import Direction, KeyEnum
from aiokv.model.pinning import PinStatus
from aiokv.model.plan import Checksum, CopyBatch
from aiokv.model.spec import CacheGeometry

__all__ = ["Backend", "BackendLayout", "DeviceEvent", "EngineStreams", "EventStatus", "Pinning", "WakeMode"]


class EventStatus(KeyEnum):
    """What a device event says when it is asked."""

    PENDING = "pending"
    DONE = "done"
    CORRUPT = "corrupt"
    """This load has been made, but some of its sources are not as they were stored."""
    FAILED = "failed"
    """This copy ended with an error; later copies of the stream are not affected."""
    LOST = "lost"
    """The backend cannot say any more what was copied (a sticky context error, a dead copy thread)."""


class WakeMode(Enum):
    """How the bridge learns of progress."""

    POLL = "poll"
    """The bridge polls heads of streams by timer."""
    DOORBELL = "doorbell"
    """The backend calls the doorbell from the loop's thread; the bridge sets no timer."""


class DeviceEvent(Protocol):
    """The completion of one submitted batch. Asking changes nothing and never blocks."""

    def query(self) -> EventStatus:
        """The status now. Once it is not PENDING it never changes."""
        ...

    def detail(self) -> str:
        """What went wrong, in words; empty unless the status is CORRUPT, FAILED or LOST."""
        ...

    def corrupt_copies(self) -> Sequence[int]:
        """Places in the batch of the copies whose source was corrupt; empty unless the status is CORRUPT."""
        ...


class BackendLayout(Protocol):
    """What a backend must know of the pools at `open`. `aiokv.backends.arena.Layout` is the one implementation."""

    @property
    def geometry(self) -> CacheGeometry:
        """The groups."""
        ...

    @property
    def gpu_blocks(self) -> int:
        """Slots of the GPU pool, the null block included."""
        ...

    @property
    def cpu_blocks(self) -> int:
        """Slots of the CPU pool; 0 for no CPU tier."""
        ...

    @property
    def arenas(self) -> Mapping[str, Sequence[object]]:
        """Per group, the engine's KV tensors; empty for a backend without memory."""
        ...

    @property
    def checksum(self) -> Checksum:
        """How blocks are checked when they are loaded; a backend without memory has nothing to check."""
        ...


class EngineStreams(Protocol):
    """How a backend is ordered with the engine's compute streams (law 5).

    A *fence* is a point of one such stream, as the backend names it. The batches of `submit` wait for those in `after`,
    on the device, before their first copy; streams of the engine wait by `wait`. Streams are the engine's: a backend
    says what it takes for one. It keeps nothing of a fence that nobody holds any more.
    """

    needs_fences: bool
    """Whether compute runs behind the host's back, so that every use of a slot has to end with a fence. Where it is
    False the host's own calls order compute and copies, and nobody asks for fences but the engine itself."""

    def fence(self, stream: object) -> object | None:
        """A fence of all that was launched on `stream` so far; None where nothing has to be waited for.

        `UsageError` for what is no stream; of these `StreamCaptured` for one that is being captured, which asked again
        later will answer.
        """
        ...

    def fence_done(self, fence: object) -> bool:
        """Whether the stream has passed a fence. Once True it stays so. Cheap, and never blocks."""
        ...

    def wait(self, stream: object, fence_or_event: object) -> None:
        """Let `stream` go on, on the device, only behind a fence or behind the copies of an event of `submit`.

        Says nothing of how those copies end. `UsageError` as in `fence`; nothing is waited for on the host.
        """
        ...


class Pinning(Protocol):
    """How the CPU arena becomes known to the device, which goes on in the background. Called from the loop's thread.

    `aiokv.backends.pinning.NOTHING_TO_PIN` is that of backends without a device.
    """

    @property
    def status(self) -> PinStatus:
        """As of now; any thread may ask."""
        ...

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call back once, from any thread, when there is nothing to wait for; at once if that is so already."""
        ...

    def forget(self, callback: Callable[[], None]) -> None:
        """Undo `when_settled`, if it has not called back yet."""
        ...

    def pause(self, when_quiet: Callable[[], None]) -> None:
        """Begin no call into the driver until `resume` was called as often.

        Calls back once, from any thread, when the one in progress has ended; at once if there is none.
        """
        ...

    def resume(self) -> None:
        """Undo one `pause`."""
        ...


class Backend(EngineStreams, Protocol):
    """Moves whole blocks between the tiers.

    All methods are called from the runtime's thread, and none blocks for longer than 1 ms, but for `open` and `close`:
    the runtime calls these two in a worker thread, and `close` in the caller's once its loop is gone.
    """

    name: str
    wake_mode: WakeMode

    @property
    def pinning(self) -> Pinning:
        """How its CPU arena stands with the device. Asked once it is open, and still after `close`."""
        ...

    def open(self, layout: BackendLayout) -> None:
        """Take the engine's tensors, make the CPU arena. Raises `ConfigError` for what cannot be used."""
        ...

    def attach_doorbell(self, ring: Callable[[], None]) -> None:
        """From now on call `ring()` from the loop's thread whenever an event may have changed (DOORBELL mode only)."""
        ...

    def submit(self, batch: CopyBatch) -> DeviceEvent:
        """Start a batch on the stream of its direction, behind the fences in its `after`.

        Raises `CopyFailed` or `BackendLost`, and starts nothing then; `UsageError` before `open`, after `close` and in
        a forked child. The batch's arrays must not change until the event has ended.
        """
        ...

    def block_bytes(self, group: str) -> int:
        """Bytes of one block of `group`, over all its tensors; 0 for a backend without memory."""
        ...

    def eta_seconds(self, direction: Direction, num_bytes: int) -> float:
        """An estimate of how long `num_bytes` take on the stream of `direction`; 0.0 when there is none yet."""
        ...

    def close(self, *, deadline_s: float) -> bool:
        """Wait for running copies until the deadline, then free. False: one is stuck, its memory is leaked on purpose.

        Idempotent; needs no running event loop.
        """
        ...
