"""The backend of machines without a GPU: both tiers in RAM, copied by one thread of its own.

It behaves as a device does: `submit` returns at once, each direction is a stream that ends in order, and completion is
asked of an event. The "GPU" tensors are numpy arrays or torch tensors in CPU memory.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from aiokv.backends.arena import CpuArena, Layout
from aiokv.backends.base import BackendLayout, WakeMode
from aiokv.backends.checksums import BlockChecksums, choose_digest
from aiokv.backends.host_copy import Lane, cut_lanes
from aiokv.backends.host_thread import CopyJob, CopyThread, HostEvent, HostFaults, Stall
from aiokv.backends.no_streams import NoStreams
from aiokv.backends.pinning import NOTHING_TO_PIN
from aiokv.errors import BackendLost, ConfigError, UsageError
from aiokv.model.ids import NULL_SLOT, Direction
from aiokv.model.plan import Checksum, CopyBatch

__all__ = ["HostBackend", "HostEvent", "HostFaults", "Stall"]

_log = logging.getLogger(__name__)

ByteRow = NDArray[np.uint8]

_leaked: Final[list[object]] = []
"""Memory that a stuck copy may still touch: kept for as long as the process lives."""


@final
class _Opened:
    """What exists between `open` and `close`."""

    __slots__ = ("__weakref__", "arena", "lanes", "layout", "thread")

    def __init__(self, layout: Layout, *, faults: HostFaults) -> None:
        self.layout = layout
        self.arena = CpuArena(blocks=layout.cpu_blocks, block_bytes=layout.cpu_block_bytes)
        self.lanes: Mapping[str, Sequence[Lane]] = {
            group: cut_lanes(fragments, gpu_blocks=layout.gpu_blocks, cpu_rows=self.arena.rows)
            for group, fragments in layout.fragments.items()
        }
        for lane in (lane for lanes in self.lanes.values() for lane in lanes):
            lane.gpu.rows[NULL_SLOT] = 0
        self.thread = CopyThread(faults=faults, checksums=self._make_checksums())
        weakref.finalize(self, self.thread.stop)

    def _make_checksums(self) -> BlockChecksums | None:
        if self.layout.checksum is Checksum.OFF:
            return None
        return BlockChecksums(self.arena.rows, how=self.layout.checksum, digest=choose_digest())


@final
class HostBackend(NoStreams):
    """Copies in RAM, through one thread. `faults` makes chosen copies go wrong, for tests."""

    __slots__ = ("_closed_cleanly", "_faults", "_opened", "_pid", "_submitted")

    name = "host"
    wake_mode = WakeMode.POLL
    pinning = NOTHING_TO_PIN

    def __init__(self, *, faults: HostFaults | None = None) -> None:
        self._faults = faults or HostFaults()
        self._pid = os.getpid()
        self._opened: _Opened | None = None
        self._closed_cleanly: bool | None = None
        self._submitted = 0

    def open(self, layout: BackendLayout) -> None:
        """Map and touch the CPU arena, zero the null block, start the thread. Takes 0.5 to 1 s per GiB."""
        self._require_own_process()
        if self._opened is not None or self._closed_cleanly is not None:
            raise UsageError("a host backend is opened once")
        checked = Layout.of(layout)
        if not checked.fragments:
            raise ConfigError("the host backend needs arenas: the KV tensors of every group")
        if checked.device != "cpu":
            raise ConfigError(f"the host backend copies CPU memory, but the tensors are on {checked.device}")
        self._opened = _Opened(checked, faults=self._faults)

    def attach_doorbell(self, ring: Callable[[], None]) -> None:
        """Nothing to attach: the bridge polls."""

    def submit(self, batch: CopyBatch) -> HostEvent:
        """Queue a batch on the stream of its direction; `UsageError` for slots that do not exist."""
        opened = self._require_open()
        if opened.thread.lost:
            raise BackendLost(self.name, detail=opened.thread.lost)
        opened.layout.require_places(batch)
        event = HostEvent(opened.thread)
        opened.thread.put(CopyJob(batch, number=self._submitted, lanes=opened.lanes[batch.group], event=event))
        self._submitted += 1
        return event

    def block_bytes(self, group: str) -> int:
        """Bytes of one block of `group`, over all its tensors."""
        return self._require_open().layout.block_bytes(group)

    def eta_seconds(self, direction: Direction, num_bytes: int) -> float:
        """From the bandwidth of recent copies in that direction; 0.0 before the first."""
        bandwidth = self._require_open().thread.bandwidth(direction)
        return num_bytes / bandwidth if bandwidth else 0.0

    def close(self, *, deadline_s: float) -> bool:
        """Finish what is queued, then free. False: a copy did not end in time; both arenas are kept for ever."""
        self._require_own_process()
        if self._closed_cleanly is None:
            self._closed_cleanly = self._opened is None or _end_thread(self._opened, deadline_s=deadline_s)
            self._opened = None
        return self._closed_cleanly

    def cpu_slot(self, slot: int) -> ByteRow:
        """The bytes of one CPU slot, shape `[cpu_block_bytes]`, as they are now; writing to it writes the slot."""
        opened = self._require_open()
        if not 0 <= slot < opened.layout.cpu_blocks:
            raise UsageError(f"the CPU pool has no slot {slot}, only {opened.layout.cpu_blocks}")
        row: ByteRow = opened.arena.rows[slot]
        return row

    def _require_open(self) -> _Opened:
        self._require_own_process()
        if self._opened is None:
            raise UsageError("the host backend is not open")
        return self._opened

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(f"the host backend belongs to process {self._pid}; a forked child cannot use it")


def _end_thread(opened: _Opened, *, deadline_s: float) -> bool:
    opened.thread.stop()
    if opened.thread.join(deadline_s=deadline_s):
        return True
    opened.thread.abandon("it was closed while a copy was stuck")
    _leaked.append(opened)
    _log.error(
        "a host copy did not end within %.3g s: %d bytes of CPU arena and the tensors behind it are leaked on purpose",
        deadline_s,
        opened.arena.num_bytes,
    )
    return False
