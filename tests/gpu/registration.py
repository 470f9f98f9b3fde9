"""What pinning costs: seconds per GiB, with small and with huge pages, and what submissions take meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from aiokv.backends.cuda import CudaBackend
from aiokv.backends.mapping import Bytes, Pages, address_of, map_bytes, touch
from aiokv.model.ids import Direction
from tests.gpu.bench import GIB, Bench, Found, Slots, batch, opened, quantiles, spin

_ROW_BYTES: Final = 4096
_BLOCKS: Final = 65
_ALONE: Final = 300
_BATCH: Final = 16


def measure_registration(bench: Bench) -> Found:
    """Touch, register and unregister; small submissions go on from this thread all the while."""
    found = Found()
    rows = bench.engine.rows(_BLOCKS, _ROW_BYTES)
    with opened([rows.tensor], gpu_blocks=_BLOCKS, cpu_blocks=_BLOCKS) as backend:
        chosen = 1 + np.random.default_rng(0).permutation(_BLOCKS - 1)[:_BATCH]
        alone = [_submit(backend, chosen) for _ in range(_ALONE)]
        for pages in Pages:
            found.figures[f"{pages.value}_pages"] = _register(bench, backend, pages=pages, chosen=chosen)
    found.figures["submit_alone_us"] = quantiles(alone) | {"max": round(max(alone) * 1e6, 1)}
    return found


def _register(bench: Bench, backend: CudaBackend, *, pages: Pages, chosen: Slots) -> dict[str, Any]:
    memory = map_bytes(bench.sizes.registered_bytes, pages=pages)
    address = address_of(memory)
    touched = _seconds_to_touch(memory)
    with _in_thread(lambda: bench.driver.register_host(address, len(memory))) as taken:
        beside = _submit_until(backend, chosen, ended=taken.ended)
    with _in_thread(lambda: bench.driver.unregister_host(address)) as taken_back:
        taken_back.ended.wait()
    gib = len(memory) / GIB
    return {
        "gib": round(gib, 3),
        "touch_s_per_gib": round(touched / gib, 4),
        "register_s_per_gib": round(taken.seconds / gib, 4),
        "unregister_s_per_gib": round(taken_back.seconds / gib, 4),
        "submit_meanwhile_us": quantiles(beside) | {"max": round(max(beside) * 1e6, 1)},
    }


class _Taken:
    """A call in a thread of its own."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.ended = threading.Event()
        self.error: BaseException | None = None


@contextmanager
def _in_thread(call: Callable[[], None]) -> Iterator[_Taken]:
    """Run it until the end of the block at least; what it raises is raised there."""
    taken = _Taken()

    def run() -> None:
        began = time.perf_counter()
        try:
            call()
        except BaseException as error:  # raised again by who waits
            taken.error = error
        taken.seconds = time.perf_counter() - began
        taken.ended.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield taken
    thread.join()
    if taken.error is not None:
        raise taken.error


def _seconds_to_touch(memory: Bytes) -> float:
    began = time.perf_counter()
    for _ in touch(memory):
        pass
    return time.perf_counter() - began


def _submit_until(backend: CudaBackend, chosen: Slots, *, ended: threading.Event) -> list[float]:
    taken = [_submit(backend, chosen)]
    while not ended.is_set():
        taken.append(_submit(backend, chosen))
    return taken


def _submit(backend: CudaBackend, chosen: Slots) -> float:
    began = time.perf_counter()
    event = backend.submit(batch(Direction.STORE, gpu=chosen, cpu=chosen))
    taken = time.perf_counter() - began
    spin(event)
    return taken
