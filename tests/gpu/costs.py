"""What calls cost who makes them: handing copies over, asking an event, and a queue that is full."""

from __future__ import annotations

import time
from typing import Any, Final, final

import numpy as np

from aiokv.backends.cuda import CudaBackend
from aiokv.backends.cuda_batch import choose_copier
from aiokv.backends.cuda_copies import Copies
from aiokv.backends.cuda_events import stream_handle
from aiokv.backends.mapping import address_of
from aiokv.model.ids import Direction
from tests.gpu.bench import Bench, Found, Slots, batch, opened, quantiles, slots, spin
from tests.gpu.engine import Rows

_ROW_BYTES: Final = 512
_STREAM_ORDER: Final = 1
_BUSY_MICROS: Final = 60_000.0
_WAITED_S: Final = 2e-3
"""A call that takes longer has waited for room, until the kernel ahead of all copies has ended."""


@final
class _Submits:
    """The same stores handed over in three ways."""

    def __init__(self, bench: Bench, backend: CudaBackend, *, rows: Rows, chosen: Slots) -> None:
        self._bench = bench
        self._backend = backend
        self._batch = batch(Direction.STORE, gpu=chosen, cpu=chosen)
        self._stream = stream_handle(bench.engine.stream())
        self._copier = choose_copier(bench.driver, direction=Direction.STORE)
        device = rows.tensor.__cuda_array_interface__["data"][0]
        host = address_of(backend.cpu_slot(0))
        columns = (host + chosen * _ROW_BYTES, device + chosen * _ROW_BYTES, np.full(len(chosen), _ROW_BYTES))
        self._copies = Copies(*(np.ascontiguousarray(column, dtype=np.uint64) for column in columns))

    def ours(self) -> float:
        """Until the caller has its thread back: long batches are handed over behind it."""
        began = time.perf_counter()
        event = self._backend.submit(self._batch)
        taken = time.perf_counter() - began
        spin(event)
        return taken

    def arrays(self) -> float:
        """The driver, called with the addresses of arrays."""
        began = time.perf_counter()
        with self._bench.driver.submitting():
            self._copier.enqueue(self._copies, stream=self._stream)
        return time.perf_counter() - began

    def lists(self) -> float:
        """The bindings, called with an object per address."""
        api = self._bench.api
        began = time.perf_counter()
        attributes = api.CUmemcpyAttributes()
        attributes.srcAccessOrder = api.CUmemcpySrcAccessOrder(_STREAM_ORDER)
        with self._bench.driver.submitting():
            targets, sources = ([api.CUdeviceptr(place) for place in part.tolist()] for part in self._copies[:2])
            sizes = self._copies.sizes.tolist()
            more = ([attributes], [0], 1, self._stream)
            self._bench.call("cuMemcpyBatchAsync", targets, sources, sizes, len(sizes), *more)
        return time.perf_counter() - began


def measure_submits(bench: Bench) -> Found:
    """All three in turns, the device at rest before each."""
    table = []
    most = max(bench.sizes.submit_copies)
    rows = bench.engine.rows(2 * most + 1, _ROW_BYTES)
    with opened([rows.tensor], gpu_blocks=2 * most + 1, cpu_blocks=2 * most + 1) as backend:
        for copies in bench.sizes.submit_copies:
            chosen = 1 + np.random.default_rng(0).permutation(2 * most)[:copies]
            submits = _Submits(bench, backend, rows=rows, chosen=chosen)
            ways = {"ours": submits.ours, "arrays": submits.arrays, "bindings_list": submits.lists}
            taken: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(1 + bench.sizes.submit_repeats):
                for name, submit in ways.items():
                    taken[name].append(submit())
                    bench.engine.settle()
            medians = {f"{name}_us": quantiles(seconds[1:])["p50"] for name, seconds in taken.items()}
            ratio = round(medians["bindings_list_us"] / medians["ours_us"], 1)
            table.append({"copies": copies} | medians | {"ratio": ratio})
    return Found(figures={"rows": table})


def measure_queries(bench: Bench) -> Found:
    """Asking an event that has been reached, one that has not, and the backend about a copy in flight."""
    found, stream = Found(), bench.engine.stream()
    rows = bench.engine.rows(3, _ROW_BYTES)
    with opened([rows.tensor], gpu_blocks=3, cpu_blocks=2) as backend:
        with bench.driver.current():
            event = bench.driver.create_event()
            bench.driver.record_event(event, stream_handle(stream))
        bench.engine.settle()
        found.figures["reached_us"] = _query(bench, event, queries=bench.sizes.queries)
        bench.engine.work(stream, micros=_BUSY_MICROS)
        with bench.driver.current():
            bench.driver.record_event(event, stream_handle(stream))
        copy = backend.submit(batch(Direction.STORE, gpu=slots(1), cpu=slots(1), after=backend.fence(stream)))
        found.figures["pending_us"] = _query(bench, event, queries=100)
        began = time.perf_counter()
        for _ in range(100):
            copy.query()
        found.figures["backend_pending_us"] = round((time.perf_counter() - began) / 100 * 1e6, 3)
        spin(copy)
        bench.engine.settle()
        with bench.driver.current():
            bench.driver.destroy_event(event)
    return found


def _query(bench: Bench, event: int, *, queries: int) -> float:
    """Microseconds of one, with the context current."""
    with bench.driver.current():
        began = time.perf_counter()
        for _ in range(queries):
            bench.driver.query_event(event)
        return round((time.perf_counter() - began) / queries * 1e6, 3)


def measure_queue_depth(bench: Bench) -> Found:
    """Copies one by one behind a kernel: from which one on a call waits for room."""
    source, stream = bench.engine.rows(2, _ROW_BYTES), bench.engine.stream()
    address = source.tensor.__cuda_array_interface__["data"][0]
    taken = []
    bench.engine.work(stream, micros=_BUSY_MICROS)
    with bench.driver.submitting():
        for _ in range(bench.sizes.queue_copies):
            began = time.perf_counter()
            bench.call("cuMemcpyDtoDAsync", address + _ROW_BYTES, address, _ROW_BYTES, stream_handle(stream))
            taken.append(time.perf_counter() - began)
    bench.engine.settle()
    longest = int(np.argmax(taken[1:])) + 1
    has_waited = taken[longest] > _WAITED_S
    figures: dict[str, Any] = {
        "copies": len(taken),
        "call_us": quantiles(taken),
        "knee": longest if has_waited else None,
    }
    return Found(figures=figures | {"longest_us": round(taken[longest] * 1e6, 1)})
