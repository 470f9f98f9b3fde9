"""Backends whose copies take a time that is told: what the benchmark needs of one, and the CUDA backend as such.

The fake driver ends each copy when its time has come, from threads of its own, and stamps events with the clock that
`time.monotonic` reads. The backend's own events are used again as soon as they have been reached, so that others are
recorded behind them, on a stream that does nothing else.
"""

from __future__ import annotations

from typing import Any, Final, Protocol, final

import numpy as np

from aiokv.backends.base import Backend
from aiokv.backends.cuda import CudaBackend
from aiokv.backends.cuda_completion import CudaEvent
from aiokv.cli.bench.device import BenchDevice
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch
from aiokv.testing.passing_backend import PassingBackend

__all__ = ["PacedBackend", "PacedCudaBackend"]

_BLOCK_BYTES: Final = 64


class PacedBackend(Backend, Protocol):
    """One whose copies are loads of one batch each, and run one after the other."""

    def hold(self) -> None:
        """What is submitted from now on stands still until `start`. Nothing may be in flight."""
        ...

    def start(self) -> None:
        """Each takes its time from now on."""
        ...

    def hurry(self) -> None:
        """What runs, and what comes, ends at once."""
        ...

    def watch(self, place: int) -> None:
        """See to it that the end of a copy will be known, if it can be yet: of the one `place` after `hold`."""
        ...

    def done_at(self, place: int) -> float | None:
        """When a copy has ended, by `time.monotonic`, all being over; `None` where that was not seen."""
        ...


@final
class PacedCudaBackend(PassingBackend):
    """The CUDA backend on the fake driver. `tensor` is the engine's, of `blocks` blocks."""

    __slots__ = (
        "_copy_us",
        "_cuda",
        "_device",
        "_driver",
        "_events",
        "_free",
        "_gate",
        "_loads_from",
        "_marks",
        "_stream",
        "compute_stream",
        "tensor",
    )

    def __init__(self, driver: Any, *, blocks: int, copy_us: float) -> None:  # noqa: ANN401  # a `FakeDriver`
        self._cuda = CudaBackend()
        super().__init__(self._cuda)
        self._driver = driver
        self._copy_us = copy_us
        self._device = BenchDevice()
        self.tensor = self._device.rows(np.zeros((blocks, _BLOCK_BYTES), np.uint8))
        with self._device.driver.current():
            self._stream, self._gate, self.compute_stream = (self._device.driver.create_stream() for _ in range(3))
            self._loads_from = self._device.driver.create_event()
        self._events: list[CudaEvent] = []
        self._marks: dict[int, int] = {}
        self._free: list[int] = []

    def hold(self) -> None:
        """See `PacedBackend`."""
        self._free += self._marks.values()
        self._marks.clear()
        self._events.clear()
        self._driver.set_timing(latency_us=self._copy_us)
        self._driver.hold(self._gate)
        driver, loads = self._device.driver, self._cuda.stream_of(Direction.LOAD)
        with driver.current():  # a held stream's own clock would run on
            driver.zero_device(self.tensor.address, 1, stream=self._gate)
            driver.record_event(self._loads_from, self._gate)
            driver.wait_event(loads, self._loads_from)

    def start(self) -> None:
        """See `PacedBackend`."""
        self._driver.release(self._gate)

    def hurry(self) -> None:
        """See `PacedBackend`; what is in the driver's queue already still takes its time."""
        self._driver.set_timing()
        self._driver.release(self._gate)

    def submit(self, batch: CopyBatch) -> CudaEvent:
        """See `Backend`."""
        event = self._cuda.submit(batch)
        self._events.append(event)
        self.watch(len(self._events) - 1)
        return event

    def watch(self, place: int) -> None:
        """See `PacedBackend`. Not yet, while it waits for room in the driver's queue."""
        if place >= len(self._events) or place in self._marks or not self._is_running(place):
            return
        self._cuda.wait(self._stream, self._events[place])
        with self._device.driver.current():
            mark = self._free.pop() if self._free else self._device.driver.create_event()
            self._device.driver.record_event(mark, self._stream)
        if self._is_running(place):
            self._marks[place] = mark
        else:  # then it may not have been waited for
            self._free.append(mark)

    def done_at(self, place: int) -> float | None:
        """See `PacedBackend`."""
        done_ns = self._driver.event_done_ns(self._marks[place]) if place in self._marks else None
        return None if done_ns is None else done_ns / 1e9

    def close(self, *, deadline_s: float) -> bool:
        """See `Backend`; the engine's part is freed as well."""
        is_closed = super().close(deadline_s=deadline_s)
        if is_closed and self.tensor.address:
            with self._device.driver.current():
                for mark in (self._loads_from, *self._free, *self._marks.values()):
                    self._device.driver.destroy_event(mark)
                for stream in (self._stream, self._gate, self.compute_stream):
                    self._device.driver.destroy_stream(stream)
            self._device.free([self.tensor])
            self.tensor.address = 0
        return is_closed

    def _is_running(self, place: int) -> bool:
        """Whether its copies are in the driver's queue, as far as the backend has seen."""
        last = self._events[place].job.last
        return last is not None and not last.is_over
