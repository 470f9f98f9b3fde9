"""What sections share: the engine, the driver, how much of everything, backends, batches and clocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aiokv.backends.arena import Layout
from aiokv.backends.base import DeviceEvent, EventStatus
from aiokv.backends.cuda import CudaBackend
from aiokv.backends.cuda_driver import CudaDriver
from aiokv.model.ids import Direction
from aiokv.model.plan import CopyBatch
from aiokv.model.spec import CacheGeometry, FullAttention
from tests.gpu.engine import Engine

GROUP: Final = "full"
BLOCK: Final = 16
GEOMETRY: Final = CacheGeometry(groups=(FullAttention(GROUP, block_size=BLOCK),), hash_block_size=BLOCK)
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_PATIENCE_S: Final = 60.0

Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything."""

    rounds: int = 12
    """Of copies in both directions whose every byte is compared."""
    blocks: int = 256
    """Of each pool in these."""
    fragment_bytes: int = 64 * KIB
    races: int = 200
    race_micros: float = 1500.0
    """How far behind the copies the kernels of a race are: more than handing a copy over takes."""
    speed_sizes: tuple[int, ...] = (4 * KIB, 16 * KIB, 24 * KIB, 28 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, 2 * MIB)
    speed_bytes: int = 256 * MIB
    """Of one transfer, at most."""
    most_copies: int = 8192
    repeats: int = 5
    submit_copies: tuple[int, ...] = (64, 1024, 8192)
    submit_repeats: int = 20
    queries: int = 20_000
    queue_copies: int = 3000
    registered_bytes: int = 4 * GIB
    requests: int = 240
    waiting: tuple[int, ...] = (1, 100)
    """Requests that load at once, for the latency of wake-ups."""
    wake_bytes: int = 4 * MIB
    wake_rounds: int = 40


TINY: Final = Sizes(
    rounds=3,
    blocks=12,
    fragment_bytes=96,
    races=12,
    race_micros=3000.0,
    speed_sizes=(4 * KIB, 64 * KIB),
    speed_bytes=MIB,
    most_copies=64,
    repeats=2,
    submit_copies=(64, 512),
    submit_repeats=3,
    queries=200,
    queue_copies=1500,
    registered_bytes=8 * MIB,
    requests=48,
    waiting=(1, 8),
    wake_bytes=4 * KIB,
    wake_rounds=3,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every section is given."""

    engine: Engine
    driver: CudaDriver
    api: Any
    """The module `cuda.bindings.driver`."""
    sizes: Sizes

    def call(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401  # whatever the bindings take and give
        """A call that must succeed, with the context current."""
        code, *results = getattr(self.api, name)(*arguments)
        self.driver.require_success(int(code), api=name)
        return results[0] if results else None


@dataclass(slots=True, kw_only=True)
class Found:
    """What a section tells: figures, and what is wrong."""

    figures: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def require(self, is_so: object, fault: str) -> None:
        """Note a fault unless it is so."""
        if not is_so:
            self.faults.append(fault)


@contextmanager
def opened(tensors: Sequence[object], *, gpu_blocks: int, cpu_blocks: int) -> Iterator[CudaBackend]:
    """A backend over these tensors whose CPU arena is settled; closed at the end, and that must work."""
    backend = CudaBackend()
    arenas: Mapping[str, Sequence[object]] = {GROUP: list(tensors)}
    backend.open(Layout(geometry=GEOMETRY, gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks, arenas=arenas))
    try:
        settled = threading.Event()
        backend.pinning.when_settled(settled.set)
        if not settled.wait(_PATIENCE_S):
            raise TimeoutError("the CPU arena is not pinned yet")
        yield backend
    finally:
        is_closed = backend.close(deadline_s=_PATIENCE_S)
    if not is_closed:
        raise RuntimeError("the backend could not be closed: a copy is stuck")


def batch(direction: Direction, *, gpu: Slots, cpu: Slots, after: object = None) -> CopyBatch:
    """Copies between `gpu[i]` and `cpu[i]`."""
    sources, targets = (gpu, cpu) if direction is Direction.STORE else (cpu, gpu)
    return CopyBatch(direction=direction, group=GROUP, source_blocks=sources, target_blocks=targets, after=after)


def slots(*numbers: int) -> Slots:
    """Some, by number."""
    return np.array(numbers, np.int64)


def spin(*events: DeviceEvent) -> None:
    """Ask without a pause until all have ended; they must have ended well."""
    give_up = time.monotonic() + _PATIENCE_S
    for event in events:
        while event.query() is EventStatus.PENDING:
            if time.monotonic() > give_up:
                raise TimeoutError("a copy has not ended")
        if event.query() is not EventStatus.DONE:
            raise RuntimeError(f"a copy ended with {event.query().value}: {event.detail()}")


def quantiles(seconds: Sequence[float], *, unit: float = 1e6) -> dict[str, float]:
    """Median and 99th percentile, in microseconds unless told otherwise."""
    p50, p99 = np.quantile([second * unit for second in seconds], (0.5, 0.99)).tolist()
    return {"p50": round(p50, 2), "p99": round(p99, 2)}
