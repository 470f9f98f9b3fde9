"""What the tests of the backends share: layouts, batches, waiting without sleeping."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aiokv import RuntimeConfig
from aiokv.backends.arena import Layout
from aiokv.backends.base import DeviceEvent, EventStatus
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch
from aiokv.model.spec import CacheGeometry, FullAttention, GroupSpec, RecurrentState

GUARD_S = 30.0
"""How long anything may take before a test gives up. Never how long something is expected to take."""


def geometry_of(*names: str) -> CacheGeometry:
    """Groups of the given names; one whose name starts with `r` holds recurrent states."""
    groups: list[GroupSpec] = [
        RecurrentState(name, block_size=16) if name.startswith("r") else FullAttention(name, block_size=16)
        for name in names
    ]
    return CacheGeometry(groups=tuple(groups), hash_block_size=16)


def layout_of(arenas: Mapping[str, Sequence[object]], *, gpu_blocks: int, cpu_blocks: int = 8) -> Layout:
    return Layout(geometry=geometry_of(*arenas), gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks, arenas=arenas)


def batch_of(direction: Direction, pairs: Mapping[int, int], *, group: str = "full") -> CopyBatch:
    """A batch that copies each key of `pairs` to its value."""
    return CopyBatch(
        direction=direction,
        group=group,
        source_blocks=np.fromiter(pairs.keys(), dtype=np.int32, count=len(pairs)),
        target_blocks=np.fromiter(pairs.values(), dtype=np.int32, count=len(pairs)),
    )


def store(pairs: Mapping[int, int], *, group: str = "full") -> CopyBatch:
    return batch_of(Direction.STORE, pairs, group=group)


def load(pairs: Mapping[int, int], *, group: str = "full") -> CopyBatch:
    return batch_of(Direction.LOAD, pairs, group=group)


def device_settings() -> dict[str, Any]:
    """What a runtime must be told of the engine where copies are made by a device: its stream, here the default one."""
    return {"compute_stream": 0} if "compute_stream" in RuntimeConfig.__dataclass_fields__ else {}


def give_way() -> None:
    """Let go of the GIL for a moment, without sleeping."""
    select.select([], [], [], 0)


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < give_up, "gave up waiting"
        give_way()


def end_of(event: DeviceEvent) -> EventStatus:
    """The final status of an event that ends by itself."""
    wait_until(lambda: event.query() is not EventStatus.PENDING)
    return event.query()
