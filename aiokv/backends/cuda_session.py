"""What exists between `open` and `close` of a `CudaBackend`: the arenas, the streams, and what was handed to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, final

from aiokv.backends.arena import Layout
from aiokv.backends.checksums import BlockChecksums, choose_digest
from aiokv.backends.cuda_batch import Copier, choose_copier
from aiokv.backends.cuda_completion import CheckThread, CudaEvent
from aiokv.backends.cuda_copies import CopyMaker, cut_copy_lanes
from aiokv.backends.cuda_driver import CudaDriver, CudaError
from aiokv.backends.cuda_events import CudaFence, EventPool, Health
from aiokv.backends.cuda_stream import CopyJob, CopyStream
from aiokv.backends.pinned import PinnedArena
from aiokv.model.ids import NULL_SLOT, Direction
from aiokv.model.plan import Checksum, CopyBatch

__all__ = ["CudaSession", "released_on_error"]

_GIVE_BACK_S: Final = 30.0
"""How long the CPU arena may take to be unpinned when a stream could not be made."""


@final
class CudaSession:
    """Begins to pin the CPU arena at construction. Not usable any more after `free` or `abandon`."""

    __slots__ = ("_checks", "_fences", "_makers", "arena", "driver", "health", "layout", "streams")

    def __init__(self, layout: Layout, *, driver: CudaDriver) -> None:
        self.layout = layout
        self.driver = driver
        self.health = Health()
        self._fences = EventPool(driver.create_event)
        with released_on_error(driver):
            copiers = {direction: choose_copier(driver, direction=direction) for direction in Direction}
            self.arena = PinnedArena(
                blocks=layout.cpu_blocks,
                block_bytes=layout.cpu_block_bytes,
                registrar=driver,
                node=driver.device_numa_node(),
            )
        self._makers: Mapping[str, CopyMaker] = {
            group: CopyMaker(
                cut_copy_lanes(fragments, cpu_address=self.arena.address, cpu_stride=layout.cpu_block_bytes),
                seam_blocks=self.arena.chunks.slots_per_chunk,
            )
            for group, fragments in layout.fragments.items()
        }
        self.streams: dict[Direction, CopyStream] = {}
        self._checks: CheckThread | None = None
        try:
            self._checks = self._begin_checks()
            for direction, copier in copiers.items():
                self.streams[direction] = self._begin_stream(direction, copier=copier)
        except BaseException:
            self._give_up()
            raise

    def zero_null_block(self) -> None:
        """Enqueue it, as the first work of the stream of loads."""
        stream = self.streams[Direction.LOAD]
        with self.driver.current():
            for fragment in {f for own in self.layout.fragments.values() for f in own}:
                address = fragment.address + NULL_SLOT * fragment.block_stride
                self.driver.zero_device(address, fragment.num_bytes, stream=stream.handle)

    def submit(self, batch: CopyBatch, *, fences: Sequence[CudaFence]) -> CudaEvent:
        """Hand a batch over, or to the thread that does; `CudaError`: nothing was started."""
        stream = self.streams[batch.direction]
        job = CopyJob(self._makers[batch.group].describe(batch), fences=fences)
        check = None
        if self._checks is not None:
            check = self._checks.prepare(batch, num_bytes=self.layout.block_bytes(batch.group))
        event = CudaEvent(job, stream=stream, health=self.health, check=check)
        stream.submit(job)  # last: from here on its thread wants to run
        return event

    def new_fence(self, stream: int) -> CudaFence:
        """A point of a stream; call it with the context current."""
        fence = CudaFence(self._fences.take(), pool=self._fences)
        self.driver.record_event(fence.event, stream)
        return fence

    def has_made(self, fence: CudaFence) -> bool:
        """Whether this is one of its own."""
        return fence.pool is self._fences

    def is_dead(self) -> bool:
        """Ask whether the context still answers."""
        try:
            with self.driver.current():
                self.driver.is_idle(self.streams[Direction.LOAD].handle)
        except CudaError as error:
            self.health.lose(str(error))
        return bool(self.health.lost)

    def is_quiet(self) -> bool:
        """Whether all that was submitted has ended; as far as is known, where the context is lost."""
        return all(stream.is_quiet() and self._is_idle(stream) for stream in self.streams.values())

    def stop(self) -> None:
        """Let the threads end after what they have to do; no copy ends after its checks any more."""
        for stream in self.streams.values():
            stream.stop()
        if self._checks is not None:
            self._checks.stop()

    def free(self, *, deadline_s: float) -> bool:
        """Give everything back, once all is quiet. False: the device has not let go of the CPU arena."""
        if not self.arena.close(deadline_s=max(deadline_s, 0.0)):
            return False
        with self.driver.current():
            for event in self._fences.drain():
                self.driver.destroy_event(event)
            for stream in self.streams.values():
                stream.destroy()
        self.driver.release()
        return True

    def abandon(self, why: str) -> None:
        """Keep everything for ever: a copy may still touch it."""
        self.health.lose(why)
        self.arena.leave()
        for stream in self.streams.values():
            stream.abandon()

    def _give_up(self) -> None:
        """It could not begin: what has begun is ended and given back."""
        self.stop()
        with suppress(CudaError):  # the first error is the one to tell
            self.free(deadline_s=_GIVE_BACK_S)

    def _is_idle(self, stream: CopyStream) -> bool:
        with self.driver.current():
            return self.driver.is_idle(stream.handle)

    def _begin_stream(self, direction: Direction, *, copier: Copier) -> CopyStream:
        return CopyStream(
            self.driver, name=direction.value, copier=copier, health=self.health, pinning=self.arena.pinning
        )

    def _begin_checks(self) -> CheckThread | None:
        if self.layout.checksum is Checksum.OFF:
            return None
        return CheckThread(BlockChecksums(self.arena.rows, how=self.layout.checksum, digest=choose_digest()))


@contextmanager
def released_on_error(driver: CudaDriver) -> Iterator[None]:
    """Whatever fails in the `with` block, the primary context is given back first."""
    try:
        yield
    except BaseException:
        with suppress(CudaError):  # the first error is the one to tell
            driver.release()
        raise
